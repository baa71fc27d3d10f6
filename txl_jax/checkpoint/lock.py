"""Locks a workdir, so that only one process at a time trains in it."""

import contextlib
import datetime
import errno
import json
import os
import socket
from collections.abc import Iterator

from filelock import FileLock, Timeout

from txl_jax.checkpoint.workdir_files import LOCK
from txl_jax.messages import UserError, argument
from txl_jax.standard_streams import stderr

_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class LockedError(UserError, RuntimeError):
    """Another run trains in this workdir; the message names its process and what to do."""


@contextlib.contextmanager
def training_lock(workdir: str) -> Iterator[None]:
    """Locks a workdir for training, or raises LockedError if another run has locked it.

    Only the ``flock`` on the file ``.lock`` counts, which the system releases when the process
    ends. The file is kept. If the file system has no ``flock``, a warning is printed.
    """
    path = os.path.join(workdir, LOCK)
    # A soft lock, whose file would outlive a killed process, is no replacement for flock.
    lock = FileLock(path, blocking=False, fallback_to_soft=False, on_acquired=_write_holder)
    try:
        lock.acquire()
    except Timeout:
        raise LockedError(
            f"{argument('workdir', workdir)}: {_holder(path)} trains in this folder. Wait for it,"
            " stop it (it saves its state, and a new start then resumes from there), or name"
            " another workdir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        print(
            f"warning: {argument('workdir', workdir)}: the file system does not support locks"
            f" ({error.strerror}), so the run is not protected; make sure that no second run trains"
            " in this folder",
            file=stderr(),
            flush=True,
        )
    try:
        yield
    finally:
        lock.release()


def _write_holder(descriptor: int) -> None:
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            holder = json.load(file)
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']},"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just locked the file
        return "another process"
