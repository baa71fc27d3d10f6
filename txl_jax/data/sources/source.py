"""A corpus's text as bytes of files, before it is prepared."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_jax.data.errors import DataError
from txl_jax.data.vocab import check_utf8

SPLITS = ("train", "valid", "test")
BLOCK = 256 * 1024
"""Bytes read at a time, and of an example in the prepared text."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a file."""

    path: Path
    start: int
    stop: int

    @classmethod
    def whole(cls, path: Path) -> "Piece":
        """All bytes of a file."""
        return cls(path, 0, path.stat().st_size)


Text = Sequence[Piece | bytes]
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
      published: whether this is the published data, byte for byte.
      label: what the text is, in words, for reports.
    """

    name: str
    files: Mapping[str, Path]
    splits: Mapping[str, Text]
    counted: tuple[str, ...] = ("train",)
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    published: bool = False
    label: str = ""

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
        """sha256 over the names and the contents of the files, read now."""
        sums = {name: file_hash(path) for name, path in self.files.items()}
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()

    def blocks(self, split: str) -> Iterator[bytes]:
        """The text of a split, in blocks of about :data:`BLOCK` bytes."""
        return filled_blocks(read(self.splits[split]))

    def check_utf8(self) -> None:
        """Raises DataError, naming file and byte, where a file is not UTF-8."""
        for path in self.files.values():
            check_utf8(read([Piece.whole(path)]), str(path))


def text_size(text: Text) -> int:
    """Bytes of a text."""
    return sum(len(p) if isinstance(p, bytes) else p.stop - p.start for p in text)


def read(text: Text) -> Iterator[bytes]:
    """The bytes of a text, in order, none of the parts longer than :data:`BLOCK`."""
    for piece in text:
        if isinstance(piece, bytes):
            yield piece
            continue
        with open(piece.path, "rb") as file:
            file.seek(piece.start)
            left = piece.stop - piece.start
            while left and (block := file.read(min(left, BLOCK))):
                yield block
                left -= len(block)


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


def part_of(text: Text, start: int, stop: int) -> list[Piece | bytes]:
    """Bytes ``start`` to ``stop`` of a text."""
    part: list[Piece | bytes] = []
    offset = 0
    for piece in text:
        size = text_size([piece])
        a, b = max(start - offset, 0), min(stop - offset, size)
        if a < b:
            if isinstance(piece, bytes):
                part.append(piece[a:b])
            else:
                part.append(Piece(piece.path, piece.start + a, piece.start + b))
        offset += size
    return part


def file_hash(path: Path, kind: str = "sha256") -> str:
    """Hash of a file, ``kind`` as in :mod:`hashlib`, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def existing(path: str) -> Path:
    """The path of a file or folder that is there; DataError if not."""
    found = Path(path).expanduser()
    if not found.exists():
        raise DataError(f"data.path = {path!r}: there is no such file or folder")
    return found
