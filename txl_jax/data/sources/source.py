"""A corpus's text as bytes of files, before it is prepared."""

import contextlib
import dataclasses
import hashlib
import json
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_jax.config.folders import expanded
from txl_jax.data.blocks import check_utf8
from txl_jax.data.errors import DataError

SPLITS = ("train", "valid", "test")
BLOCK = 256 * 1024
"""Bytes read at a time, and of an example in the prepared text."""


@dataclasses.dataclass(frozen=True)
class ByteRange:
    """Bytes ``start`` to ``stop`` of a file."""

    path: Path
    start: int
    stop: int

    @classmethod
    def whole(cls, path: Path) -> "ByteRange":
        """All bytes of a file; DataError where it cannot be read."""
        with reading(path):
            return cls(path, 0, path.stat().st_size)


Text = Sequence[ByteRange | bytes]
"""Pieces, and bytes that stand between them, one after another."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Everything that decides a corpus's text.

    Attributes:
      name: of the corpus.
      files: the files that are read, by a name that does not depend on where they lie.
      splits: the text of ``train``, ``valid`` and ``test``.
      counted: the splits that a char or word vocabulary is made from.
      protocol: settings that decided the splits, beside the files themselves.
      published: whether this is the published data, byte for byte; ``None``: no hash is
        published for files of this form.
      label: what the text is, in words, for reports.
      counts: what is published of the prepared corpus, by the names of ``corpus.info``:
        ``("tokens", "train")``, ``("symbols", "")``, …; a range allows for what is unknown.
      decoded: makes text of the files' bytes, where these are symbols instead.
      vocab_file: one of the files, the vocabulary.
      recorded: sha256 of files when they were downloaded, by the names of ``files``.
    """

    name: str
    files: Mapping[str, Path]
    splits: Mapping[str, Text]
    counted: tuple[str, ...] = ("train",)
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    published: bool | None = False
    label: str = ""
    counts: Mapping[tuple[str, str], int | range] = dataclasses.field(default_factory=dict)
    decoded: Callable[[Iterable[bytes]], Iterator[bytes]] | None = None
    vocab_file: Path | None = None
    recorded: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for split in SPLITS:
            if not text_size(self.splits[split]):
                raise DataError(
                    f"{self.label}: the {split} split is empty{self._settings()}; give a longer"
                    " text, or a folder with train.txt, valid.txt and test.txt"
                )

    def _settings(self) -> str:
        return f" with {json.dumps(dict(self.protocol))}" if self.protocol else ""

    def hash(self) -> str:
        """sha256 over the names and the contents of the files, read now.

        Raises:
          DataError: a file cannot be read, or a downloaded one has changed.
        """
        sums = {name: file_hash(path) for name, path in self.files.items()}
        for name, expected in self.recorded.items():
            if sums[name] != expected:
                path = self.files[name]
                raise DataError(
                    f"{path}: its sha256 is {sums[name]}, not {expected} as when it was downloaded;"
                    f" delete the folder {path.parent}, it will be downloaded again"
                )
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()

    def blocks(self, split: str) -> Iterator[bytes]:
        """The text of a split, in blocks of about :data:`BLOCK` bytes."""
        parts = read(self.splits[split])
        return filled_blocks(self.decoded(parts) if self.decoded else parts)

    def size(self, split: str) -> int:
        """Bytes of the files that a split is read from."""
        return text_size(self.splits[split])

    def check_utf8(self) -> None:
        """Raises DataError, naming file and byte, where a file is not UTF-8."""
        for path in self.files.values():
            check_utf8(read([ByteRange.whole(path)]), str(path))


def text_size(text: Text) -> int:
    """Bytes of a text."""
    return sum(len(p) if isinstance(p, bytes) else p.stop - p.start for p in text)


def read(text: Text) -> Iterator[bytes]:
    """The bytes of a text, in order, in parts of up to :data:`BLOCK` bytes.

    Raises:
      DataError: a file cannot be read, or has become shorter.
    """
    for piece in text:
        if isinstance(piece, bytes):
            yield piece
            continue
        with reading(piece.path), open(piece.path, "rb") as file:
            file.seek(piece.start)
            left = piece.stop - piece.start
            while left and (block := file.read(min(left, BLOCK))):
                yield block
                left -= len(block)
        if left:
            raise DataError(f"{piece.path}: has become {left:,} bytes shorter")


def filled_blocks(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes with small parts put together, up to :data:`BLOCK` or a little more."""
    held = bytearray()
    for part in parts:
        held += part
        if len(held) >= BLOCK:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def part_of(text: Text, start: int, stop: int) -> list[ByteRange | bytes]:
    """Bytes ``start`` to ``stop`` of a text."""
    part: list[ByteRange | bytes] = []
    offset = 0
    for piece in text:
        size = text_size([piece])
        a, b = max(start - offset, 0), min(stop - offset, size)
        if a < b:
            if isinstance(piece, bytes):
                part.append(piece[a:b])
            else:
                part.append(ByteRange(piece.path, piece.start + a, piece.start + b))
        offset += size
    return part


def joined(files: Sequence[Path]) -> list[ByteRange | bytes]:
    """The files one after another; one without a line end at its end gets one."""
    text: list[ByteRange | bytes] = []
    for path in files:
        piece = ByteRange.whole(path)
        if piece.stop:
            text += [piece] if _ends_a_line(text) else [b"\n", piece]
    return text


def _ends_a_line(text: Text) -> bool:
    size = text_size(text[-1:])
    return b"".join(read(part_of(text[-1:], size - 1, size))) in (b"\n", b"")


def file_hash(path: Path, kind: str = "sha256") -> str:
    """Hash of a file, ``kind`` as in :mod:`hashlib`, in hexadecimal digits.

    Raises:
      DataError: it cannot be read.
    """
    with reading(path), open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises DataError, naming the file, where an OSError says that it cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def existing(path: str) -> Path:
    """The path of a regular file or folder that is there; DataError or ConfigError if not."""
    found, named = expanded(path, "config key data.path"), f"data.path = {path!r}"
    try:
        mode = found.stat().st_mode
    except FileNotFoundError:
        raise DataError(f"{named}: there is no such file or folder") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{named}: cannot be read ({reason})") from None
    if not stat.S_ISDIR(mode):
        _check_regular(mode, named)
    return found


def is_file(path: Path) -> bool:
    """Whether there is a regular file; False for a folder or nothing at all.

    Raises:
      DataError: there is something else that has this name (a named pipe, a device, a link to
        nothing), or that cannot be told.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise DataError(f"{path}: is a link to a file that does not exist") from None
        return False
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if not stat.S_ISDIR(mode):
        _check_regular(mode, str(path))
    return stat.S_ISREG(mode)


def _check_regular(mode: int, named: str) -> None:
    """A pipe can be read once only, and a text is read several times."""
    kinds = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in kinds if is_kind(mode)), "a device")
        raise DataError(f"{named}: is {kind}; write the text to a regular file and name that")
