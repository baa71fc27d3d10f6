"""Unpacks chosen files of tar and zip archives to paths that the caller decides."""

import contextlib
import functools
import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from txl_jax.data.errors import DataError
from txl_jax.data.sources.cache import make_folder, write_errors
from txl_jax.data.sources.source import file_hash, opened

Wanted = Callable[[str], str | None]  # from a member's name to the path to write, or None
Member = tuple[str, Callable[[], Any]]  # the name, and a function to open it
BROKEN = (  # errors while reading a damaged or encrypted archive
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(OSError, EOFError, RuntimeError, ValueError, struct.error),
)


def plain_names(names: Sequence[str]) -> Wanted:
    """Returns a function that selects files with these names in any folder of an archive."""
    return lambda member: name if (name := os.path.basename(member)) in names else None


def unpacked(
    corpus: str, archive: Path, cache: Path, wanted: Wanted, required: Sequence[str]
) -> Path:
    """Unpacks a user's archive in the cache and returns the folder; see :func:`extract`."""
    into = cache / "unpacked" / f"{corpus}-{file_hash(archive)[:16]}"
    return make_folder(into, lambda folder: extract(archive, folder, wanted, required))


def extract(
    archive: Path, folder: Path, wanted: Wanted, required: Sequence[str], what: str | None = None
) -> None:
    """Writes the wanted plain files of a tar or zip archive to an empty folder.

    ``what`` names the archive in errors. Raises DataError if the file is no archive, is damaged or
    encrypted, or lacks a required path, or if the folder cannot be written.
    """
    what = what or str(archive)
    members = _zip_members(archive) if is_zip(archive) else _tar_members(archive)
    fix = "name an undamaged archive, or the folder of its files, in data.path"
    with archive_errors(what, fix, "unpacked"):
        for member, open_member in members:
            name = wanted(member)
            if name is not None and not (folder / name).exists():
                with open_member() as content:
                    _copy(content, folder / name)
    for name in required:
        if not (folder / name).exists():
            raise DataError(f"{what}: there is no {name} in this archive")


def _copy(content: IO[bytes], to: Path) -> None:
    with write_errors(to.parent):
        to.parent.mkdir(parents=True, exist_ok=True)
        to.touch()
    while block := content.read(1 << 20):  # an error here comes from the archive
        with write_errors(to.parent), open(to, "ab") as file:
            file.write(block)


def is_zip(path: Path) -> bool:
    """Whether a file begins like a zip archive; raises DataError if the file cannot be read."""
    with opened(path) as file:
        return file.read(4) == b"PK\x03\x04"


@contextlib.contextmanager
def archive_errors(where: object, fix: str, done: str = "read") -> Iterator[None]:
    """Converts errors of damaged, encrypted or unreadable files to DataErrors of one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if not isinstance(error, BROKEN) and type(error).__name__ != "ZstdError":
            raise
        if reason := getattr(error, "strerror", None):  # the system's error, not damaged content
            raise DataError(f"{where}: cannot be {done} ({reason})") from error
        several = "it is damaged, or is neither a tar nor a zip archive"
        reason = several if "\n" in str(error) else str(error) or "it is damaged"
        raise DataError(f"{where}: cannot be {done} ({reason}); {fix}") from error


def _tar_members(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive) as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
            yield member.name, functools.partial(tar.extractfile, member)
        rest: Any = tar.fileobj  # reading to the end verifies the checksum there
        while block := rest.read(1 << 20):
            if block.strip(b"\0"):  # a damaged header hides the members after it
                raise tarfile.ReadError("a header in it is damaged")


def _zip_members(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as whole:
        for member in whole.infolist():
            if not member.is_dir() and not stat.S_ISLNK(member.external_attr >> 16):
                yield member.filename, functools.partial(whole.open, member)
