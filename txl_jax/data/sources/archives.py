"""Archives, unpacked with the safe filter."""

import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from txl_jax.data.errors import DataError
from txl_jax.data.sources.partial import folder_in_the_making, rename_folder
from txl_jax.data.sources.source import file_hash

Check = Callable[[Path], None]
"""Raises DataError for a file or folder that is not what it should be."""


_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
"""What a damaged or encrypted archive raises."""


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
      DataError: not an archive, a file is missing, ``check`` refused, or a member is not safe:
        refused by the filter ``data`` of :mod:`tarfile` (a path that leaves the folder, a
        device, …), or the like in a zip.
    """
    if into.is_dir():
        return into
    what = what or str(archive)
    into.parent.mkdir(parents=True, exist_ok=True)
    with folder_in_the_making(into) as folder:
        try:
            if zipfile.is_zipfile(archive):
                _unpack_zip(archive, folder, wanted, what)
            else:
                _unpack_tar(archive, folder, wanted, what)
            for name in required:
                if not (folder / name).exists():
                    raise DataError(f"{what}: there is no {name} in this archive")
            check(folder)
            rename_folder(folder, into)
        except (*_BROKEN, OSError) as error:
            raise DataError(f"{what}: cannot be unpacked ({error})") from error
    return into


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
            tar.extract(safe.replace(name=name), folder, filter="data")


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
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with whole.open(member) as source, open(folder / name, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
