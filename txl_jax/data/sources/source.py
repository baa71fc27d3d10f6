"""A corpus's text as bytes of files, before it is prepared."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_jax.data.blocks import check_utf8
from txl_jax.data.errors import DataError

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
          DataError: a downloaded file is not what came.
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


def joined(files: Sequence[Path]) -> list[Piece | bytes]:
    """The files one after another; one without a line end at its end gets one."""
    text: list[Piece | bytes] = []
    for path in files:
        piece = Piece.whole(path)
        if piece.stop:
            text += [piece] if _ends_a_line(text) else [b"\n", piece]
    return text


def _ends_a_line(text: Text) -> bool:
    size = text_size(text[-1:])
    return b"".join(read(part_of(text[-1:], size - 1, size))) in (b"\n", b"")


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
