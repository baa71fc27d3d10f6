"""``enwik8``: the first 100,000,000 bytes of a Wikipedia dump of 2006, 90M / 5M / 5M.

Two protocols, by name:

- ``authors``: their preparation drops the newline byte, so there are 204 symbols, and bits per
  character are per byte that is no newline.
- ``bytes``: nothing is dropped, 205 symbols.

The two do not compare: a newline is a token in the one and nothing in the other.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from txl_jax.data.errors import DataError
from txl_jax.data.sources.mahoney import PREPARED, SIZES, RawFile, find_splits, twentieths
from txl_jax.data.sources.source import SPLITS, ByteRange, Source, filled_blocks

Protocol = Literal["authors", "bytes"]

RAW = RawFile("enwik8", "http://mattmahoney.net/dc/enwik8.zip", "a1fa5ffddb56f4953e226637dabbb36a")
SYMBOLS = {"authors": 204, "bytes": 205}
TITLES = {
    "authors": "the authors' protocol (newline bytes left out)",
    "bytes": "the byte protocol (no byte left out)",
}


def find(path: str | None, protocol: Protocol, cache: Path) -> Source:
    """The corpus at ``path``, or downloaded.

    The last twentieth of the raw file is test, the one before it valid. The vocabulary is counted
    over all three, as the authors do.

    Args:
      path: ``enwik8.zip``, the raw file, a folder with one of them, or one as the authors' script
        leaves it: ``train.txt``, ``valid.txt`` and ``test.txt`` (each byte a decimal number), or
        ``train.txt.raw``, … (the bytes) where these are missing. ``None``: downloaded; the
        published hash is enforced.
      protocol: see the head of this file.
      cache: folder for what is downloaded or unpacked.

    Raises:
      DataError: nothing usable is there, or a download has a wrong hash.
    """
    found = find_splits("enwik8", path)
    if found is None:
        raw, published, label = RAW.find(path, cache)
        files, pieces = {"enwik8": raw}, twentieths(raw)
        return _source(files, pieces, protocol, published, label)
    pattern, files = found
    pieces = {split: ByteRange.whole(file) for split, file in files.items()}
    label = f"{Path(pattern.format('train')).name}, …, for which no hash is published"
    return _source(files, pieces, protocol, None, label, numbers=pattern == PREPARED)


def _source(
    files: dict[str, Path],
    pieces: dict[str, ByteRange],
    protocol: Protocol,
    published: bool | None,
    label: str,
    numbers: bool = False,
) -> Source:
    sizes = {("bytes", split): size for split, size in SIZES.items()}
    return Source(
        name="enwik8",
        files=files,
        splits={split: [piece] for split, piece in pieces.items()},
        counted=SPLITS,
        protocol={"protocol": protocol, "numbers": numbers},
        published=published,
        label=f"enwik8, {TITLES[protocol]}, {label}",
        counts={**sizes, ("symbols", ""): SYMBOLS[protocol]},
        decoded=from_numbers if numbers else None,
    )


def from_numbers(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes that the authors' script wrote as decimal numbers.

    Numbers stand between spaces; a line end is itself the newline byte, as that script left it.

    Raises:
      DataError: something else stands there.
    """
    left = b""
    for block in filled_blocks(parts):
        text = left + block
        cut = max(text.rfind(b" "), text.rfind(b"\n")) + 1
        left = text[cut:]
        yield _bytes_of(text[:cut])
    yield _bytes_of(left)


def _bytes_of(text: bytes) -> bytes:
    numbers = text.replace(b"\n", b" 10 ").split()
    try:
        return bytes(map(int, numbers))
    except ValueError:
        wrong = next(n for n in numbers if not n.isdigit() or len(n) > 3 or int(n) > 255)
        raise DataError(
            f"enwik8: {wrong[:20].decode('utf-8', 'replace')!r} in train.txt, valid.txt or test.txt"
            " is not the decimal number of a byte, as the authors' script writes them; name the raw"
            " file or enwik8.zip in data.path"
        ) from None
