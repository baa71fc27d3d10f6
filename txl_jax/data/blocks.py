"""Text in blocks that are cut anywhere, inside of a word or of a character too."""

import codecs
import io
import string
from collections.abc import Iterable, Iterator

import numpy as np

from txl_jax.data.errors import DataError

NEWLINE = 10
SPACE = "_"
"""The symbol of white space in a letter vocabulary."""

_SPACE_OF_WHITE = bytes(ord(SPACE) if value in string.whitespace.encode() else value
                        for value in range(256))  # fmt: skip


def decoded(blocks: Iterable[bytes | str], where: str = "text") -> Iterator[str]:
    """The same blocks as text; a character cut by a block's end comes with the next block.

    Raises:
      DataError: bytes that are not UTF-8, or surrogates in a text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    for block in blocks:
        if isinstance(block, str):
            _encoded(block, where, "strict")
            yield block
            continue
        kept = len(decoder.getstate()[0])
        yield _decode(decoder, block, False, read - kept, where)
        read += len(block)
    _decode(decoder, b"", True, read - len(decoder.getstate()[0]), where)


def _decode(
    decoder: codecs.IncrementalDecoder, block: bytes, final: bool, start: int, where: str
) -> str:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}, byte {start + error.start}: not UTF-8 ({error.reason}); convert the text"
            " to UTF-8, or use vocab='byte', which takes any bytes"
        ) from None


def as_bytes(block: str | bytes, where: str = "text") -> bytes:
    """A block in UTF-8. Bytes of a command line that were not UTF-8 come back as they were.

    Raises:
      DataError: a surrogate that does not stand for such a byte.
    """
    return _encoded(block, where, "surrogateescape") if isinstance(block, str) else block


def _encoded(text: str, where: str, errors: str) -> bytes:
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}, character {error.start}: {text[error.start]!r} is no character; give text"
            " that is UTF-8"
        ) from None


def whole_words(
    blocks: Iterable[bytes | str], where: str = "text", end_last_line: bool = False
) -> Iterator[str]:
    """The text in pieces that never end inside of a word.

    Line ends are ``\\n``, ``\\r\\n`` and ``\\r`` alike, as for a text file in Python.
    """
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    kept, last = "", "\n"
    for block in decoded(blocks, where):
        text = newlines.decode(block)
        cut = max(text.rfind(" "), text.rfind("\n")) + 1
        if cut:
            yield kept + text[:cut]
            kept, last = "", text[cut - 1]
        kept += text[cut:]
    kept += newlines.decode("", final=True)
    if end_last_line and (kept or last)[-1] != "\n":
        kept += "\n"
    if kept:
        yield kept


def check_utf8(blocks: Iterable[bytes], where: str) -> None:
    """Raises DataError, naming the byte offset, where the blocks together are not UTF-8."""
    for _ in decoded(blocks, where):
        pass


def counted_bytes(blocks: Iterable[bytes]) -> list[int]:
    """The values of bytes that occur, by falling frequency and as first seen among equals."""
    counts = np.zeros(256, np.int64)
    first = np.full(256, np.iinfo(np.int64).max)
    position = 0
    for block in blocks:
        values = np.frombuffer(block, np.uint8)
        of_block = np.bincount(values, minlength=256)
        for value in np.flatnonzero((of_block > 0) & (counts == 0)):
            first[value] = position + block.index(value.astype(np.uint8).tobytes())
        counts += of_block
        position += len(block)
    order = np.lexsort((first, -counts))
    return [int(value) for value in order if counts[value]]


def lettered(block: str | bytes) -> bytes:
    """In lower case, ``_`` for white space; raises DataError as :func:`as_bytes`."""
    return as_bytes(block).lower().translate(_SPACE_OF_WHITE)
