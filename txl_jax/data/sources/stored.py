"""Opens files of text, also compressed or in zip archives, and stores the unpacked text once.

    x.txt, x.jsonl      plain                    x.txt.gz, x.jsonl.zst    compressed
    x.zip               a folder of both         .gz .bz2 .xz .lzma .zst

Files are read in blocks. Unpacked texts are written to the cache and kept there.
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
from txl_jax.file_kinds import LOOKED_AT, not_text, wide_encoding, zip_kind
from txl_jax.files import mark_size
from txl_jax.library_errors import import_optional
from txl_jax.progress import watched

ZIP = ".zip"
BOMB, RATIO = 256 << 20, 200
"""A file of n bytes is refused if it unpacks to more bytes than both ``BOMB`` and ``RATIO * n``."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A file, or a member of a zip archive."""

    path: Path  # of the file or the archive
    name: str  # in lists of files; ``/`` separates folders
    size: int  # the number of bytes as stored, compressed or not
    member: str = ""  # the name in the archive, or an empty text
    shown: str = ""  # takes the place of the path in messages, unless it is empty

    def __str__(self) -> str:
        return f"{self.path}, {self.member}" if self.member else self.shown or str(self.path)

    @property
    def compression(self) -> str:
        """The suffix that says how the file is compressed, or an empty text."""
        suffix = PurePosixPath(self.name).suffix.lower()
        return suffix if suffix in OPENERS else ""

    @property
    def suffix(self) -> str:
        """The suffix of the name in lower case, such as ``.txt`` for ``x.txt.gz``."""
        plain = self.name[: len(self.name) - len(self.compression)]
        return PurePosixPath(plain).suffix.lower()

    @property
    def stem(self) -> str:
        """The name without its suffixes, such as ``x`` for ``x.txt.gz``."""
        return self.name[: len(self.name) - len(self.suffix + self.compression)]

    @contextlib.contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Opens the file for reading unpacked bytes; reading damaged bytes raises DataError."""
        fix = "get the file again if it is damaged, or correct the end of its name"
        with archive_errors(self, fix), contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(open(self.path, "rb"))
            if self.member:
                archive = stack.enter_context(zipfile.ZipFile(file))
                file = stack.enter_context(archive.open(self.member))
            if self.compression:
                file = stack.enter_context(OPENERS[self.compression](file))
            yield stack.enter_context(io.BufferedReader(file, BLOCK))

    def blocks(self, any_bytes: bool) -> Iterator[bytes]:
        """Yields unpacked bytes without a byte order mark; requires UTF-8 unless ``any_bytes``."""

        def raw() -> Iterator[bytes]:
            with self.opened() as file:
                start = file.read(BLOCK)
                yield start[mark_size(start[:4]) :]
                while block := file.read(BLOCK):
                    yield block

        return raw() if any_bytes else (t.encode() for t in decode_utf8(raw(), str(self)))

    def start(self) -> bytes:
        """Returns the first unpacked bytes of the file."""
        with self.opened() as file:
            return file.read(LOOKED_AT)

    def check_text(self) -> None:
        """Raises DataError if the unpacked bytes are not text, or are in UTF-16 or UTF-32."""
        start = self.start()
        try:
            mark_size(start[:4])
        except ValueError as error:
            raise DataError(f"{self}: {error}") from None
        if kind := not_text(start):
            if not self.member and zipfile.is_zipfile(self.path):
                with contextlib.suppress(*BROKEN), zipfile.ZipFile(self.path) as archive:
                    kind = zip_kind(archive.namelist()) or kind
            fix = "name a text; docs/own_data.md lists what is read"
            raise DataError(f"{self}: is {kind}, not text; {fix}")
        if kind := wide_encoding(start):
            raise DataError(f"{self}: is {kind} text without a byte order mark; save it as UTF-8")


def _open_zstd(file: IO[bytes]) -> Any:
    package = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    fix = "run pip install '.[zstd]' in the project's folder, or unpack the file with  zstd -d"
    fault = f"{file.name}: reading a .zst file needs the package {package}"
    zstd = import_optional(package, DataError(f"{fault}; {fix}"))
    return zstd.ZstdFile(file, options={zstd.DecompressionParameter.window_log_max: 27})


OPENERS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".lzma": lzma.open,
    ".zst": _open_zstd,
}
"""Functions that open a compressed file, by its suffix."""


def members(path: Path, folder: str = "") -> list[Stored]:
    """Returns the files in a zip archive; raises DataError for a zip bomb.

    Hidden files are left out. A name is ``folder``, and then the path of the file from the
    innermost folder of the archive that has all files.
    """
    errors = archive_errors(path, "get it again, or name the folder of its files")
    with errors, zipfile.ZipFile(path) as archive:
        infos = [i for i in archive.infolist() if not i.is_dir() and not hidden(i.filename)]
    check_unpacked_size(sum(info.file_size for info in infos), path.stat().st_size, str(path))
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
    """Returns the text of a file as a plain file in the cache, which the first call writes.

    ``read`` yields the text in blocks; its argument is a folder for temporary files. If
    ``documents`` is true, each block is a document. ``key`` has the settings that decide the
    blocks.
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
