"""Defines kinds of vocabularies and special symbols, and checks ids."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from txl_jax.data.errors import DataError

Kind = Literal["byte", "char", "letter", "word", "sentence", "subword", "tokenizer", "id"]

EOS = "<eos>"  # ends each line of words; its id is 0 if this program counts the words
UNK = "<unk>"  # stands for unknown words, if the counted text has this symbol
BOUNDARY = "<S>"  # ends a sentence, and begins the next sentence
SENTENCE_UNK = "<UNK>"  # stands for unknown words in sentences
SPACE = "_"  # stands for white space in a text of letters
CHUNK = 1 << 20  # the number of tokens that are checked at a time
BYTES = {str(value): value for value in range(256)}  # from the symbol of a byte to its value


class UnknownSymbolError(DataError):
    """A text has a symbol without an id; ``what`` describes the error, and ``fix`` the remedy."""

    def __init__(self, what: str, fix: str):
        super().__init__(f"{what}; {fix}")
        self.what = what


def readable(kind: str, symbol: str) -> str:
    """Formats a symbol for display; a byte becomes a printable ASCII character or ``\\xNN``."""
    if kind != "byte":
        return symbol
    value = BYTES[symbol]
    return chr(value) if 0x20 <= value < 0x7F else f"\\x{value:02x}"


def check_ids(name: str, tokens: np.ndarray, vocab_size: int | None) -> None:
    """Raises DataError, with the first wrong position, unless all ids are from 0 to V-1.

    If ``vocab_size`` (V) is ``None``, every id must fit into int32.
    """
    why = f"the vocabulary has {vocab_size} symbols"
    if vocab_size is None:
        if np.can_cast(np.asanyarray(tokens).dtype, np.int32):
            return
        vocab_size, why = 1 << 31, "ids are int32"
    _, outside = scan_ids(tokens, vocab_size)
    if outside is not None:
        rule = f"a token id must be from 0 to {vocab_size - 1}, because {why}"
        raise DataError(f"{name}[{outside}] = {int(tokens[outside])}: {rule}")


def scan_ids(tokens: np.ndarray, vocab_size: int) -> tuple[int, int | None]:
    """Returns the largest id, and the index of the first wrong id, or ``None`` if all are right.

    A right id is from 0 to ``vocab_size`` - 1. After a wrong id, the scan stops.
    """
    largest = 0
    for start, part in chunks(tokens):
        if part.min() < 0 or part.max() >= vocab_size:
            return largest, start + int(np.argmax((part < 0) | (part >= vocab_size)))
        largest = max(largest, int(part.max()))
    return largest, None


def chunks(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields consecutive parts of a 1-D array, perhaps memory-mapped, as (first index, part)."""
    for start in range(0, len(tokens), CHUNK):
        yield start, np.asarray(tokens[start : start + CHUNK])
