"""Locks a workdir, so that only one process at a time trains in it."""

import contextlib
import datetime
import errno
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from filelock import FileLock, Timeout

from txl_jax.checkpoint.lease import EXPIRES_AFTER, Lease
from txl_jax.checkpoint.workdir_files import LOCK
from txl_jax.messages import UserError, argument
from txl_jax.paths import is_remote, path
from txl_jax.standard_streams import say

_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class LockedError(UserError, RuntimeError):
    """Another run trains in this workdir; the message names its process and what to do."""


@contextlib.contextmanager
def training_lock(workdir: str) -> Iterator[None]:
    """Locks a workdir for training, or raises LockedError if another run has locked it.

    The lock is the ``flock`` on the file ``.lock``, which the system releases when the process
    ends. The file itself stays. If the file system has no ``flock``, a warning is printed. In a
    bucket the lock is a :class:`~txl_jax.checkpoint.lease.Lease`.
    """
    file = os.path.join(workdir, LOCK)
    if is_remote(workdir):
        with _leased(workdir, file):
            yield
        return
    # A soft lock, whose file would outlive a killed process, is no replacement for flock.
    lock = FileLock(file, blocking=False, fallback_to_soft=False, on_acquired=_write_holder)
    try:
        lock.acquire()
    except Timeout:
        raise _locked(workdir, file) from None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        say(
            f"warning: {argument('workdir', workdir)}: the file system does not support locks"
            f" ({error.strerror}), so the run is not protected; make sure that no second run trains"
            " in this folder"
        )
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _leased(workdir: str, file: str) -> Iterator[None]:
    tell = lambda text: say(f"{argument('workdir', workdir)}: {text}")
    took = f"warning: another run has replaced the lock {file}; stop one of the two runs"
    wait = f"for up to {EXPIRES_AFTER:.0f} seconds, because a killed run leaves its lock behind"
    lease = Lease(file, _this_process(), lambda: tell(took))
    if not lease.acquire(lambda: tell(f"waiting for {_holder(file)} {wait}")):
        raise _locked(workdir, file)
    try:
        yield
    finally:
        lease.release()


def _this_process() -> dict[str, Any]:
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def _write_holder(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)


def _locked(workdir: str, file: str) -> LockedError:
    return LockedError(
        f"{argument('workdir', workdir)}: {_holder(file)} trains in this folder. Wait for it,"
        " stop it (it saves its state, and a new start then resumes from there), or name"
        " another workdir"
    )


def _holder(file: str) -> str:
    try:
        holder = json.loads(path(file).read_bytes())
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']},"
    except (OSError, ValueError, KeyError, TypeError):  # the holder has not written it yet
        return "another process"
