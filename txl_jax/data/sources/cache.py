"""Creates files and folders of the cache; a name in the cache exists only once it is complete.

A process creates ``NAME`` while it holds the lock file ``.NAME.lock``. It writes a folder as
``NAME.unfinished`` and a download as ``NAME.part``, and renames them to ``NAME`` at the end. If the
process is killed, the next process that needs ``NAME`` begins a folder again, and resumes a
download.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from absl import logging

from txl_jax.data.errors import DataError


def make_folder(final: Path, fill: Callable[[Path], object]) -> Path:
    """Returns the folder ``final``, which ``fill`` writes if it is missing, or raises DataError."""
    if final.is_dir():
        return final
    with _locked(final):
        if not final.is_dir():
            unfinished = final.with_name(f"{final.name}.unfinished")
            try:
                with write_errors(final.parent):
                    shutil.rmtree(unfinished, ignore_errors=True)
                    unfinished.mkdir()
                fill(unfinished)
                with write_errors(final.parent):
                    rename_folder(unfinished, final)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return final


@contextlib.contextmanager
def unfinished_download(final: Path) -> Iterator[Path]:
    """Locks and yields the partial download of ``final``, which the next call can resume."""
    path = final.with_name(f"{final.name}.part")
    with _locked(final):
        with write_errors(final.parent):
            path.touch()
        try:
            yield path
        finally:
            if path.exists() and not path.stat().st_size:
                path.unlink()


def remove_damaged(final: Path, is_damaged: Callable[[], object]) -> None:
    """Removes a damaged folder, unless another process has already replaced it."""
    with _locked(final):
        if final.exists() and is_damaged():
            unfinished = final.with_name(f"{final.name}.unfinished")
            os.rename(final, unfinished)  # no process finds the folder half removed
            shutil.rmtree(unfinished, ignore_errors=True)


def rename_folder(complete: Path, final: Path) -> None:
    """Renames a complete folder to its final name once all its files are on the disk."""
    for path in [*complete.rglob("*"), complete]:
        _sync(path)
    os.rename(complete, final)
    _sync(final.parent)


def json_hash(value: Any, sort_keys: bool = False) -> str:
    """Returns the sha256 of a JSON value, which identifies it."""
    return hashlib.sha256(json.dumps(value, sort_keys=sort_keys).encode()).hexdigest()


def write_npy(path: Path, dtype: np.dtype, parts: Iterable[np.ndarray]) -> int:
    """Writes arrays, one after another, to one ``.npy`` file; returns their total length."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (0,)}
    n = 0
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            part.astype(dtype, copy=False).tofile(file)
            n += len(part)
        file.seek(0)  # the header has the same length for any n, because NumPy pads it
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (n,)})
    return n


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Converts an OSError while writing to a cache folder to a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write in the cache folder {folder} ({error.strerror or error}); set"
            " data.cache_dir or $TXL_DATA_DIR to a folder that can be written"
        ) from error


@contextlib.contextmanager
def _locked(final: Path) -> Iterator[None]:
    """Holds the lock of a file or folder in the cache; waits while another process holds it."""
    with write_errors(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(final.with_name(f".{final.name}.lock"))
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            logging.warning("waiting for another process to finish %s", final)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
