"""Unfinished files and folders: each belongs to one process until it has its final name.

An unfinished folder lies beside its final place as ``NAME.tmp-HOST-ID``, an unfinished download
as ``NAME.part-HOST-ID``, where ID is 12 hexadecimal digits. The process that writes it holds a
lock on it, and the system releases the lock when that process ends. What has no lock was left by
a killed process: such folders are removed, such downloads are resumed. Anything whose name this
program would not give is the user's and stays.
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
import typing
import uuid
from collections.abc import Iterator
from pathlib import Path

from txl_jax.config import DataConfig
from txl_jax.data.errors import DataError

ABANDONED = 2 * 24 * 3600
"""Seconds without a change after which something that another host made counts as left: a lock
of another machine may not be seen here."""

_ID = "-.+-[0-9a-f]{12}"
"""Host and random digits at the end of an unfinished name, see :func:`_beside`."""

_CORPORA = "|".join(typing.get_args(typing.get_type_hints(DataConfig)["name"]))
_UNFINISHED = re.compile(rf"(({_CORPORA})(-[a-z]+)?|lm1b-vocab)(-[0-9a-f]{{16,20}})*\.tmp{_ID}")
"""The names of unfinished folders: a corpus, perhaps its kind of vocabulary, perhaps hashes."""


@contextlib.contextmanager
def folder_in_the_making(final: Path) -> Iterator[Path]:
    """A new folder beside ``final``, removed at the end unless it was given its name.

    Folders that killed processes left beside it are removed first.

    Raises:
      DataError: the folder cannot be made.
    """
    with writing(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        clear_left_folders(final.parent)
        path, lock = _new_folder(final)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def file_in_the_making(final: Path) -> Iterator[Path]:
    """A file beside ``final``: an unfinished download of it, or new and empty.

    It stays when the block is left, so that the next call can resume, unless it is empty or was
    renamed or removed.

    Raises:
      DataError: the file cannot be made.
    """
    with writing(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        path, lock = _left_file(final) or _new_file(final)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            if not path.stat().st_size:
                path.unlink()
        os.close(lock)


def clear_left_folders(folder: Path) -> None:
    """Removes the unfinished folders that killed processes left in ``folder``."""
    for path in folder.glob("*.tmp-*"):
        ours = _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        lock = _lock(path) if ours and _may_be_left(path) else None
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def remove_folder(path: Path) -> None:
    """Removes a complete folder in one move, so that nobody finds half of it; raises OSError."""
    going = _beside(path, "tmp")  # what is left of it is cleared away like one in the making
    os.rename(path, going)
    shutil.rmtree(going, ignore_errors=True)


def rename_folder(made: Path, final: Path) -> None:
    """Gives a complete folder its name in one move; if another process was first, its stays."""
    for path in [*made.rglob("*"), made]:
        _sync(path)
    try:
        os.rename(made, final)
        _sync(final.parent)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises DataError where an OSError says that nothing can be written in a cache folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write in the cache folder {folder} ({error.strerror or error}); set"
            " data.cache_dir or $TXL_DATA_DIR to a folder that can be written"
        ) from error


# --------------------------------------------------------------------------------------


def _new_folder(final: Path) -> tuple[Path, int]:
    while True:
        path = _beside(final, "tmp")
        path.mkdir()
        with contextlib.suppress(FileNotFoundError):  # cleared away before it was locked
            lock = os.open(path, os.O_RDONLY)
            _try_lock(lock)
            if _is_still(lock, path):
                return path, lock
            os.close(lock)


def _new_file(final: Path) -> tuple[Path, int]:
    path = _beside(final, "part")
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    _try_lock(lock)
    return path, lock


def _left_file(final: Path) -> tuple[Path, int] | None:
    """The largest that a process which is gone has left, locked; the others are removed."""
    found: list[tuple[int, Path, int]] = []
    unfinished = re.compile(rf"{re.escape(final.name)}\.part{_ID}")
    for path in final.parent.glob("*.part-*"):
        ours = unfinished.fullmatch(path.name) and path.is_file() and not path.is_symlink()
        lock = _lock(path) if ours and _may_be_left(path) else None
        if lock is not None:
            found.append((os.fstat(lock).st_size, path, lock))
    found.sort()
    for _, path, lock in found[:-1]:
        path.unlink(missing_ok=True)
        os.close(lock)
    return found[-1][1:] if found else None


def _beside(final: Path, kind: str) -> Path:
    return final.with_name(f"{final.name}.{kind}-{socket.gethostname()}-{uuid.uuid4().hex[:12]}")


def _may_be_left(path: Path) -> bool:
    """False for what another host has made and changed lately."""
    if f"-{socket.gethostname()}-" in path.name:
        return True
    with contextlib.suppress(OSError):
        newest = max(part.stat().st_mtime for part in [path, *path.rglob("*")])
        return time.time() - newest > ABANDONED
    return False


def _lock(path: Path) -> int | None:
    """A lock on what is there, ``None`` if another process has it or locks do not work here."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    if _try_lock(lock) and _is_still(lock, path):
        return lock
    os.close(lock)
    return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
