"""One training run a folder: who trains in a workdir holds a lock on it."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator

from txl_jax.checkpoint.workdir_files import LOCK

NAME = LOCK

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class LockedError(RuntimeError):
    """Another run trains in this workdir; the text names its process and what to do."""


@contextlib.contextmanager
def training_lock(workdir: str) -> Iterator[None]:
    """Holds a workdir for training; the system lets go of it however the process ends.

    The file ``.lock`` says who holds it, and stays: what counts is the lock on it (``flock``), not
    that it is there. Where the file system knows no locks, that is told and training goes on.

    Raises:
      LockedError: another process holds it.
    """
    path = os.path.join(workdir, NAME)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise LockedError(_refusal(workdir, path)) from None
            print(
                f"warning: --workdir={workdir} cannot be locked here ({error.strerror}): see to it"
                " that no second run trains in it",
                file=sys.stderr,
                flush=True,
            )
        else:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_self()).encode())
        yield
    finally:
        os.close(descriptor)


def _self() -> dict[str, str | int]:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": now}


def _refusal(workdir: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            holder = json.load(file)
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']},"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just taken it
        who = "another process"
    return (
        f"--workdir={workdir}: {who} trains in this folder. Wait for it, stop it (it saves, and"
        " this command then goes on from there), or name another --workdir"
    )
