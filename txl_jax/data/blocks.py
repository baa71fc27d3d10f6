"""Text in blocks; a block may end inside of a word or of a character."""

import codecs
import io
import itertools
import string
from collections.abc import Iterable, Iterator

import numpy as np

from txl_jax.data.errors import DataError
from txl_jax.data.symbols import SPACE

NEWLINE = 10
_WHITE_TO_SPACE = bytes.maketrans(string.whitespace.encode(), SPACE.encode() * 6)


def decode_utf8(blocks: Iterable[bytes | str], where: str = "text") -> Iterator[str]:
    """The same blocks as text; a character in two blocks is put in the second one.

    DataError: bytes that are not UTF-8, or surrogates in a text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    for block in itertools.chain(blocks, [None]):
        if isinstance(block, str):
            as_bytes(block, where, "strict")
            yield block
            continue
        kept = len(decoder.getstate()[0])
        try:
            yield decoder.decode(block or b"", final=block is None)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}, byte {read - kept + error.start}: not UTF-8 ({error.reason}); convert"
                " the text to UTF-8, or use vocab='byte', which takes any bytes"
            ) from None
        read += len(block or b"")


def as_bytes(block: str | bytes, where: str = "text", errors: str = "surrogateescape") -> bytes:
    """A block in UTF-8; bytes of a command line that were not UTF-8 are restored.

    DataError: a surrogate that does not stand for such a byte (``strict``: any).
    """
    try:
        return block.encode("utf-8", errors) if isinstance(block, str) else block
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}, character {error.start}: {block[error.start]!r} is not a character; give"
            " text that is UTF-8"
        ) from None


def as_letters(block: str | bytes) -> bytes:
    """In lower case, ``_`` for white space; raises DataError as :func:`as_bytes`."""
    return as_bytes(block).lower().translate(_WHITE_TO_SPACE)


def whole_words(
    blocks: Iterable[bytes | str], where: str = "text", end_last_line: bool = False
) -> Iterator[str]:
    """The text in parts that never end inside of a word.

    Line ends are ``\\n``, ``\\r\\n`` and ``\\r`` alike, as for a text file in Python.
    """
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    kept, last = "", "\n"
    for block in decode_utf8(blocks, where):
        text = newlines.decode(block)
        end = max(text.rfind(" "), text.rfind("\n")) + 1
        if end:
            yield kept + text[:end]
            kept, last = "", text[end - 1]
        kept += text[end:]
    kept += newlines.decode("", final=True)
    if end_last_line and (kept or last)[-1] != "\n":
        kept += "\n"
    if kept:
        yield kept


def bytes_by_frequency(blocks: Iterable[bytes]) -> list[int]:
    """The values of bytes that occur, by falling frequency and as first seen among equals."""
    counts = np.zeros(256, np.int64)
    first_seen: dict[int, None] = {}
    for block in blocks:
        in_block = np.bincount(np.frombuffer(block, np.uint8), minlength=256)
        new = [v for v in np.flatnonzero(in_block).tolist() if v not in first_seen]
        first_seen |= dict.fromkeys(sorted(new, key=block.index))
        counts += in_block
    return sorted(first_seen, key=lambda value: -counts[value])
