"""``text8``: 100,000,000 characters of Wikipedia, a to z and space, 90M / 5M / 5M.

As the authors prepare it: white space at both ends of each split is stripped, and the symbol of
the space is ``_``.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from txl_jax.data.errors import DataError
from txl_jax.data.sources.mahoney import PREPARED, SIZES, RawFile, find_splits, twentieths
from txl_jax.data.sources.source import BLOCK, SPLITS, ByteRange, Source, reading

RAW = RawFile("text8", "http://mattmahoney.net/dc/text8.zip", "3bea1919949baf155f99411df5fada7e")


def find(path: str | None, cache: Path) -> Source:
    """The corpus at ``path``, or downloaded.

    The last twentieth of the raw file is test, the one before it valid. The vocabulary is counted
    over all three, as the authors do.

    Args:
      path: ``text8.zip``, the raw file, a folder with one of them, or one as the authors' script
        leaves it: ``train.txt``, ``valid.txt`` and ``test.txt`` (symbols between spaces), or
        ``train.txt.raw``, … (the text) where these are missing. ``None``: downloaded; the
        published hash is enforced.
      cache: folder for what is downloaded or unpacked.

    Raises:
      DataError: nothing usable is there, or a download has a wrong hash.
    """
    found = find_splits("text8", path)
    if found is None:
        raw, published, label = RAW.find(path, cache)
        return _source({"text8": raw}, twentieths(raw), published, label)
    pattern, files = found
    pieces = {split: ByteRange.whole(file) for split, file in files.items()}
    label = f"{pattern.format('train')}, …, for which no hash is published"
    return _source(files, pieces, None, label, symbols=pattern == PREPARED)


def _source(
    files: dict[str, Path],
    pieces: dict[str, ByteRange],
    published: bool | None,
    label: str,
    symbols: bool = False,
) -> Source:
    # a split loses at most the one space at each of its ends
    sizes = {("bytes", split): range(size - 2, size + 1) for split, size in SIZES.items()}
    return Source(
        name="text8",
        files=files,
        splits={split: [stripped(piece)] for split, piece in pieces.items()},
        counted=SPLITS,
        protocol={"symbols": symbols},
        published=published,
        label=f"text8, {label}",
        counts={**sizes, ("symbols", ""): 27},
        decoded=from_symbols if symbols else None,
    )


def stripped(piece: ByteRange) -> ByteRange:
    """The piece without white space at its ends."""
    start, stop = piece.start, piece.stop
    with reading(piece.path), open(piece.path, "rb") as file:
        while start < stop:
            file.seek(start)
            block = file.read(min(BLOCK, stop - start))
            kept = block.lstrip()
            start += len(block) - len(kept)
            if kept:
                break
        while start < stop:
            size = min(BLOCK, stop - start)
            file.seek(stop - size)
            kept = file.read(size).rstrip()
            stop -= size - len(kept)
            if kept:
                break
    return ByteRange(piece.path, start, stop)


def from_symbols(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The text that the authors' script wrote as symbols between spaces.

    Raises:
      DataError: a symbol is longer than one character: this is not what that script writes.
    """
    last = b" "
    for part in parts:
        at_edge = bool(last.strip() and part[:1].strip())
        text = b"".join(symbols := part.split())
        if at_edge or len(text) != len(symbols):
            wrong = next((s for s in symbols if len(s) > 1), last + part[:1])
            raise DataError(
                f"text8: {wrong[:20].decode('utf-8', 'replace')!r} in train.txt, valid.txt or"
                " test.txt is not one character, as the authors' script writes them; name the raw"
                " file or text8.zip in data.path"
            )
        last = part[-1:]
        yield text.replace(b"_", b" ")
