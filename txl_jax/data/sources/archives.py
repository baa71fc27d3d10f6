"""Archives, unpacked with the safe filter."""

import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from txl_jax.data.errors import DataError
from txl_jax.data.sources.partial import folder_in_the_making, rename_folder, writing
from txl_jax.data.sources.source import file_hash, reading

Check = Callable[[Path], None]
"""Raises DataError for a file or folder that is not what it should be."""

ZIP = b"PK\x03\x04"
"""The first bytes of a zip archive."""

_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(OSError, EOFError, RuntimeError, ValueError, struct.error),
)
"""What reading a damaged or encrypted archive raises."""


def plain_names(names: Sequence[str]) -> Callable[[str], str | None]:
    """``wanted`` of :func:`unpack`: these file names, wherever in an archive they lie."""
    return lambda member: name if (name := os.path.basename(member)) in names else None


def unpack(
    archive: Path,
    into: Path,
    wanted: Callable[[str], str | None],
    required: Sequence[str],
    check: Check = lambda folder: None,
    what: str | None = None,
) -> Path:
    """The folder ``into`` with some files of a tar or zip archive; made only if it is not there.

    Args:
      archive: tar, compressed or not, or zip.
      into: the folder that is wanted.
      wanted: from a member's name to its path in the folder, ``None`` for what is left out.
      required: paths that must be there.
      check: of the folder before it gets its name.
      what: name of the archive for errors, if not its path.

    Raises:
      DataError: the archive is damaged, encrypted or none at all; a file is missing; ``check``
        refused; a member is not safe (refused by the filter ``data`` of :mod:`tarfile`: a path
        that leaves the folder, a device, …; the same is refused in a zip); or the cache folder
        cannot be written.
    """
    if into.is_dir():
        return into
    what = what or str(archive)
    is_zip = first_bytes(archive) == ZIP
    with folder_in_the_making(into) as folder:
        try:
            (_unpack_zip if is_zip else _unpack_tar)(archive, folder, wanted, what)
        except DataError:
            raise
        except _BROKEN as error:
            raise DataError(
                f"{what}: cannot be unpacked ({_reason(error)}); name an undamaged archive, or"
                " the folder of its files, in data.path"
            ) from error
        for name in required:
            if not (folder / name).exists():
                raise DataError(f"{what}: there is no {name} in this archive")
        check(folder)
        with writing(into.parent):
            rename_folder(folder, into)
    return into


def first_bytes(path: Path) -> bytes:
    """The first four bytes of a file; DataError where it cannot be read."""
    with reading(path), open(path, "rb") as file:
        return file.read(4)


def _reason(error: Exception) -> str:
    """What is wrong with an archive, in one line."""
    lines = str(error).splitlines() or ["it is damaged"]
    return lines[0] if len(lines) == 1 else "it is damaged, or neither a tar nor a zip archive"


def unpacked(
    corpus: str, archive: Path, cache: Path, wanted: Callable[[str], str | None],
    required: Sequence[str],
) -> Path:  # fmt: skip
    """The folder in the cache with the files of an archive of the user's own."""
    into = cache / "unpacked" / f"{corpus}-{file_hash(archive)[:16]}"
    return unpack(archive, into, wanted, required)


def _unpack_tar(archive: Path, folder: Path, wanted: Callable, what: str) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise DataError(
            f"{what}: this Python has no safe filter for archives (3.11.4 and later have);"
            " unpack it by hand and name the folder in data.path"
        )
    with tarfile.open(archive) as tar:
        for member in tar:
            name = wanted(member.name)
            if name is None or (folder / name).exists():
                continue
            safe = tarfile.data_filter(member, str(folder))
            if not safe.isfile():
                raise DataError(f"{what}: {member.name} in it is not a plain file")
            source = tar.extractfile(member)
            assert source is not None  # a plain file has content
            _copy(source, folder / name)
        _check_rest(tar.fileobj)


def _check_rest(rest: Any) -> None:
    """Raises ReadError unless only zeros follow the last member of a tar archive.

    A damaged header ends the list of members, and the members after it would be missing without
    notice. Reading to the end also checks the checksum at the end of a compressed file.
    """
    while block := rest.read(1 << 20):
        if block.strip(b"\0"):
            raise tarfile.ReadError("a header in it is damaged")


def _copy(source: IO[bytes], to: Path) -> None:
    """Writes a member of an archive as a file."""
    with writing(to.parent):
        to.parent.mkdir(parents=True, exist_ok=True)
        to.touch()
    while block := source.read(1 << 20):
        with writing(to.parent), open(to, "ab") as file:
            file.write(block)


def _unpack_zip(archive: Path, folder: Path, wanted: Callable, what: str) -> None:
    with zipfile.ZipFile(archive) as whole:
        for member in whole.infolist():
            name = wanted(member.filename)
            if name is None or member.is_dir() or (folder / name).exists():
                continue
            path = PurePosixPath(member.filename.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise DataError(f"{what}: {member.filename} in it would be outside the destination")
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
                raise DataError(f"{what}: {member.filename} in it is not a plain file")
            with whole.open(member) as source:
                _copy(source, folder / name)
