"""Opens files that hold text, compressed or in zip archives, and stores the unpacked text once.

    x.txt, x.jsonl      plain                    x.txt.gz, x.jsonl.zst    compressed
    x.zip               a folder of both         .gz .bz2 .xz .lzma .zst

Everything is read in blocks. Unpacked texts are written to the cache and stay there.
"""

import array
import bz2
import contextlib
import dataclasses
import gzip
import io
import lzma
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from txl_jax.data.codecs import decode_utf8
from txl_jax.data.errors import DataError
from txl_jax.data.sources.archives import BROKEN, archive_errors
from txl_jax.data.sources.cache import json_hash, make_folder, write_errors
from txl_jax.data.sources.source import BLOCK, file_hash, hidden
from txl_jax.file_kinds import (
    LOOKED_AT,
    file_kind,
    iso_2022,
    not_text,
    readable_end,
    wide_encoding,
    zip_kind,
)
from txl_jax.files import mark_size
from txl_jax.library_errors import import_optional
from txl_jax.progress import watched

ZIP = ".zip"
BOMB, RATIO = 256 << 20, 200
"""A file of n bytes is refused if it unpacks to more than ``BOMB`` and ``RATIO * n`` bytes."""
_STORED, _DEFLATED = 0, 8  # the methods of zip archives that are unpacked in bounded memory


@dataclasses.dataclass(frozen=True)
class Stored:
    """A file, or a member of a zip archive.

    Attributes:
      path: the file or the archive.
      name: its name in lists of files; ``/`` separates folders.
      size: the number of its bytes as stored, compressed or not.
      member: its name in the archive, or an empty text.
      shown: takes the place of the path in messages, unless it is empty.
    """

    path: Path
    name: str
    size: int
    member: str = ""
    shown: str = ""

    def __str__(self) -> str:
        return f"{self.path}, {self.member}" if self.member else self.shown or str(self.path)

    @property
    def compression(self) -> str:
        """The suffix that says how the file is compressed, or an empty text."""
        suffix = PurePosixPath(self.name).suffix.lower()
        return suffix if suffix in OPENERS else ""

    @property
    def stem(self) -> str:
        """The name without its suffix and that of a compression."""
        plain = self.name[: len(self.name) - len(self.compression)]
        return plain.removesuffix(PurePosixPath(plain).suffix)

    @property
    def suffix(self) -> str:
        """The suffix of the name, in lower case; that of a compression does not count."""
        plain = self.name[: len(self.name) - len(self.compression)]
        return PurePosixPath(plain).suffix.lower()

    @contextlib.contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Opens its unpacked bytes; reading damaged bytes in the context raises DataError."""
        errors = archive_errors(self, "get the file again, because it is damaged or incomplete")
        with errors, contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(open(self.path, "rb"))
            if self.member:
                archive = stack.enter_context(zipfile.ZipFile(file))
                file = stack.enter_context(archive.open(self.member))
            if self.compression:
                file = io.BufferedReader(file, LOOKED_AT)
                self._check_compression(file.peek())
                file = stack.enter_context(OPENERS[self.compression](file))
            yield stack.enter_context(io.BufferedReader(file, BLOCK))

    def _check_compression(self, start: bytes) -> None:
        """Raises DataError for a file that is not compressed as its suffix says."""
        end = readable_end(start)
        marked = end or self.compression in (".gz", ".bz2", ".xz")  # others have several starts
        if start and marked and end != self.compression:
            kind = file_kind(start) or f"no {self.compression} file"
            fix = f"end its name in {end}" if end else f"leave {self.compression} out of its name"
            fix += ", or if the file is damaged get it again"
            raise DataError(f"{self}: cannot be read (it is {kind}); {fix}")

    def blocks(self, any_bytes: bool) -> Iterator[bytes]:
        """Yields its bytes without a byte order mark; they must be UTF-8 unless ``any_bytes``."""

        def raw() -> Iterator[bytes]:
            with self.opened() as file:
                start = file.read(BLOCK)
                yield start[mark_size(start[:4]) :]
                while block := file.read(BLOCK):
                    yield block

        return raw() if any_bytes else (t.encode() for t in decode_utf8(raw(), str(self)))

    def check_text(self, encoding: bool) -> None:
        """Raises DataError if its unpacked bytes are no text or, if ``encoding``, are not UTF-8.

        The byte order mark of another encoding is always refused.
        """
        with self.opened() as file:
            start = file.read(LOOKED_AT)
        try:
            mark_size(start[:4])
        except ValueError as error:
            raise DataError(f"{self}: {error}") from None
        if kind := not_text(start):
            end = readable_end(start)
            other = "name a text; docs/own_data.md lists what is read"
            fix = "unpack it" if end or "archive" in kind else other
            if not (self.member or self.compression):
                if start.startswith(b"PK\3\4"):
                    with contextlib.suppress(*BROKEN), zipfile.ZipFile(self.path) as archive:
                        if named := zip_kind(archive.namelist()):
                            kind, fix = named, other
                if _holds_tar(self.path, end):
                    kind = "a compressed tar archive"
                elif kind == file_kind(start) and end:
                    fix = f"unpack it, or for data.name='text' end its name in {end}"
            raise DataError(f"{self}: is {kind}, not text; {fix}")
        if encoding and (kind := wide_encoding(start)):
            raise DataError(f"{self}: is {kind} text without a byte order mark; save it as UTF-8")
        if encoding and iso_2022(start):
            for _ in decode_utf8([start], str(self)):
                pass


def _holds_tar(path: Path, end: str | None) -> bool:
    """Whether a file that is compressed as the suffix ``end`` says contains a tar archive."""
    with contextlib.suppress(DataError, *BROKEN):
        if end in OPENERS:
            with open(path, "rb") as file, OPENERS[end](file) as plain:
                return file_kind(plain.read(LOOKED_AT)) == "a tar archive"
    return False


def _open_zstd(file: IO[bytes]) -> Any:
    package = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    fix = "run pip install '.[zstd]' in the project's folder, or unpack the file with  zstd -d"
    fault = f"{file.name}: reading a .zst file needs the package {package}"
    zstd = import_optional(package, DataError(f"{fault}; {fix}"))
    return zstd.ZstdFile(file, options={zstd.DecompressionParameter.window_log_max: 27})


OPENERS: dict[str, Callable[[Any], Any]] = {
    **{".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".lzma": lzma.open, ".zst": _open_zstd}
}
"""Functions that open a compressed file, by its suffix."""


def members(path: Path, folder: str = "") -> list[Stored]:
    """Returns the files in a zip archive, named below ``folder``; raises DataError for a zip bomb.

    Hidden files are left out. Names are relative to the innermost folder that all files are in.
    """
    errors = archive_errors(path, "get it again, or name the folder of its files")
    with errors, zipfile.ZipFile(path) as archive:
        infos = [i for i in archive.infolist() if not i.is_dir() and not hidden(i.filename)]
    check_unpacked_size(sum(info.file_size for info in infos), path.stat().st_size, str(path))
    for info in infos:
        if info.flag_bits & 1 or info.compress_type not in (_STORED, _DEFLATED):
            fault = "is encrypted" if info.flag_bits & 1 else "is not compressed by deflate"
            fix = "unpack the archive by other means, and name the folder"
            raise DataError(f"{path}, {info.filename}: {fault}; {fix}")
    paths = [PurePosixPath(info.filename.lstrip("/")) for info in infos]
    common = os.path.commonpath([path.parent for path in paths]) if paths else ""
    inner = [os.path.join(folder, path.relative_to(common)) for path in paths]
    zipped = zip(infos, inner, strict=True)
    return [Stored(path, name, info.compress_size, info.filename) for info, name in zipped]


def check_unpacked_size(plain: int, stored: int, where: str) -> None:
    """Raises DataError if a file unpacks to so many bytes that it seems to be a zip bomb."""
    if plain > BOMB and plain > RATIO * stored:
        fault = f"unpacks to {plain:,} bytes or more from {stored:,}"
        fix = "if the file is right, unpack it and name the result in data.path"
        raise DataError(f"{where}: {fault}, as a zip bomb does; {fix}")


@dataclasses.dataclass(frozen=True)
class PlainText:
    """A plain file of text, and the number of bytes of each document, or ``None``."""

    path: Path
    sizes: np.ndarray | None = None


def unpacked(
    stored: Stored, read: Callable[[Path], Iterator[bytes]], documents: bool, key: Any, cache: Path
) -> PlainText:
    """Writes the text of a file to the cache, unless it is there, and returns it.

    ``read`` takes an empty folder for temporary files and yields blocks, which are documents if
    ``documents``. ``key`` has the settings that decide what ``read`` yields.
    """
    identity = [file_hash(stored.path), stored.member, stored.compression, stored.suffix, key]

    def fill(folder: Path) -> None:
        sizes, total = array.array("q"), 0
        with write_errors(cache), open(folder / "text", "wb") as file:
            for block in watched(read(folder), f"reading {stored.name}", None):
                total += len(block)
                check_unpacked_size(total, stored.size, str(stored))
                file.write(block)
                if documents:
                    sizes.append(len(block))
            np.save(folder / "sizes.npy", np.asarray(sizes, np.int64))

    folder = make_folder(cache / "unpacked" / f"text-{json_hash(identity)[:20]}", fill)
    return PlainText(folder / "text", np.load(folder / "sizes.npy") if documents else None)
