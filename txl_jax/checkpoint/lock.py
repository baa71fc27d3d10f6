"""Locks a workdir, so that only one process at a time trains in it."""

import contextlib
import datetime
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from filelock import FileLock, Timeout

from txl_jax.checkpoint.workdir_files import LOCK
from txl_jax.messages import UserError, argument
from txl_jax.paths import BUCKETS, is_remote, path, store
from txl_jax.standard_streams import say

_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)

RENEWED_EVERY, EXPIRES_AFTER = 15.0, 60.0  # seconds
_STEP = 1.0


class LockedError(UserError, RuntimeError):
    """Another run trains in this workdir; the message names its process and what to do."""


@contextlib.contextmanager
def training_lock(workdir: str) -> Iterator[None]:
    """Locks a workdir for training, or raises LockedError if another run has locked it.

    The lock is an ``flock`` on the file ``.lock``. The operating system releases the lock when the
    process ends, but keeps the file. If the file system has no ``flock``, a warning is printed. In
    a bucket the lock is a :class:`Lease`.
    """
    file = os.path.join(workdir, LOCK)
    if is_remote(workdir):
        with _leased(workdir, file):
            yield
        return
    # A soft lock is no replacement for flock: its file would remain after a process is killed.
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


class Lease:
    """A lock in a bucket, which has no flock: the object ``address``, which its holder renews.

    The object is created only if there is none (``ifGenerationMatch=0``), so only one of two runs
    holds the lock. A thread of the holder changes the object every :data:`RENEWED_EVERY` seconds.
    Another run that finds the object waits. If the object changes, its holder is alive and keeps
    the lock. If the object stays the same for :data:`EXPIRES_AFTER` seconds, or its holder was a
    process of this machine that has ended, the waiting run removes the object and takes the lock.
    ``holder`` describes this process to other processes. ``lost`` is called once, by a thread, if
    another run removed or replaced the object.
    """

    def __init__(self, address: str, holder: dict[str, Any], lost: Callable[[], None]):
        self._content = json.dumps({**holder, "machine": _machine()}).encode()
        self._address, self._lost = address, lost
        self._object = tuple(address.removeprefix(BUCKETS).split("/", 1))
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def acquire(self, waiting: Callable[[], None]) -> bool:
        """Returns whether this process has the lock; calls ``waiting`` if it has to wait."""
        while not self._create():
            if (state := self._state()) is None:
                continue
            if not self._holder_ended():
                waiting()
                if self._is_renewed(state):
                    return False
            self._remove(state)
        self._generation = (self._state() or {}).get("ifGenerationMatch", "0")
        self._thread.start()
        return True

    def _is_renewed(self, state: dict[str, str]) -> bool:
        """Waits until the object changes or expires; returns whether its holder is alive."""
        limit = time.monotonic() + EXPIRES_AFTER
        while time.monotonic() < limit:
            time.sleep(_STEP)
            if (now := self._state()) != state:
                return now is not None
        return False

    def release(self) -> None:
        """Removes the lock, if this process has it."""
        if self._thread.is_alive():
            self._released.set()
            self._thread.join()
            with contextlib.suppress(Exception):  # if the client fails, the lock expires
                if (state := self._state()) and state["ifGenerationMatch"] == self._generation:
                    self._remove(state)

    def _create(self) -> bool:
        try:
            store().pipe_file(self._address, self._content, mode="create")
        except FileExistsError:
            return False
        return True

    def _state(self) -> dict[str, str] | None:
        """Returns conditions that hold until the object changes, or ``None`` if there is none."""
        try:
            found = store().call("GET", "b/{}/o/{}", *self._object, json_out=True)
        except FileNotFoundError:
            return None
        numbers = found["generation"], found["metageneration"]
        return dict(zip(("ifGenerationMatch", "ifMetagenerationMatch"), numbers, strict=True))

    def _holder_ended(self) -> bool:
        """Whether the holder is a process of this machine that has ended."""
        try:
            holder = json.loads(store().cat_file(self._address))
            if _machine() is not None and holder["machine"] == _machine():
                os.kill(holder["pid"], 0)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return isinstance(error, ProcessLookupError)
        return False

    def _remove(self, state: dict[str, str]) -> None:
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # the object has changed
            store().call("DELETE", "b/{}/o/{}", *self._object, **state)

    def _renew(self) -> None:
        count = 0
        while not self._released.wait(RENEWED_EVERY):
            count += 1
            renewal = {"metadata": {"renewed": str(count)}}
            conditions = {"ifGenerationMatch": self._generation}
            try:
                store().call("PATCH", "b/{}/o/{}", *self._object, json=renewal, **conditions)
            except (FileNotFoundError, FileExistsError):
                self._lost()
                return
            except Exception:  # such as a network error; the next renewal may succeed
                continue


def _machine() -> str | None:
    """Returns an id of this boot and PID namespace, within which PIDs are unique, or ``None``."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None
