"""The symbols of vocabularies: those with a meaning, and what each kind must and may have."""

import collections
import os
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from txl_jax.data.errors import DataError

Kind = Literal["byte", "char", "letter", "word", "sentence", "subword"]

EOS = "<eos>"
"""The symbol of a line's end in a word vocabulary; id 0 of those counted here."""
UNK = "<unk>"
"""The symbol that stands for unknown words, where the counted text itself has it."""
BOUNDARY = "<S>"
"""The symbol between two sentences: the first one's end and the next one's start."""
SENTENCE_UNK = "<UNK>"
"""The symbol of unknown words in a sentence vocabulary."""
BYTES = {str(value): value for value in range(256)}
"""Symbol to value."""


class UnknownSymbolError(DataError):
    """Text with a symbol that a vocabulary has no id for: ``what`` and where, and ``fix``."""

    def __init__(self, what: str, fix: str):
        super().__init__(f"{what}; {fix}")
        self.what = what


def readable(kind: str, symbol: str) -> str:
    """A symbol for people: a byte is its ASCII character if that is printable, else ``\\xNN``."""
    if kind != "byte":
        return symbol
    value = BYTES[symbol]
    return chr(value) if 0x20 <= value < 0x7F else f"\\x{value:02x}"


def check_symbols(kind: str, symbols: Sequence[str]) -> None:
    """Raises DataError where no vocabulary of this kind has these symbols."""
    if kind not in get_args(Kind):
        kinds = ", ".join(repr(known) for known in get_args(Kind))
        raise DataError(f"vocabulary kind {kind!r}: must be one of {kinds}")
    if not symbols:
        raise DataError(f"a {kind} vocabulary without symbols")
    if len(set(symbols)) != len(symbols):
        twice = collections.Counter(symbols).most_common(1)[0][0]
        raise DataError(f"{kind} vocabulary: the symbol {twice!r} stands in it twice")
    if kind == "byte" and (wrong := [symbol for symbol in symbols if symbol not in BYTES]):
        raise DataError(
            f"a byte vocabulary's symbols must be the numbers 0 to 255, not {wrong[0]!r}"
        )
    if kind in ("char", "letter") and any(len(symbol) != 1 for symbol in symbols):
        raise DataError(f"a {kind} vocabulary's symbols must be single characters")
    needed = {"word": (EOS,), "sentence": (BOUNDARY, SENTENCE_UNK)}.get(kind, ())
    for symbol in needed:
        if symbol not in symbols:
            raise DataError(f"a {kind} vocabulary must have the symbol {symbol}")


def check_ids(tokens: np.ndarray, vocab_size: int, name: str) -> None:
    """Raises DataError, naming the first position and its id, where an id is not in 0..V-1."""
    block = 1 << 20
    for start in range(0, len(tokens), block):
        part = np.asarray(tokens[start : start + block])
        wrong = (part < 0) | (part >= vocab_size)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(
                f"{name}[{start + at}] = {int(part[at])}: a token id must be from 0 to"
                f" {vocab_size - 1}, the vocabulary has {vocab_size} symbols"
            )


def symbols_in_file(path: str | os.PathLike) -> list[str]:
    """The symbols of sentences in a file, a symbol a line, in id order.

    Of a line with several fields the first is the symbol; one that was there before is passed
    over. Both as the authors read ``1b_word_vocab.txt``.

    Raises:
      DataError: a file that cannot be read, an empty line, text that is not UTF-8, or no ``<S>``
        or ``<UNK>``.
    """
    symbols: dict[str, None] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                fields = line.split(maxsplit=1)
                if not fields:
                    raise DataError(f"{path}, line {number}: has no symbol")
                symbols.setdefault(fields[0])
        check_symbols("sentence", list(symbols))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason})") from error
    except DataError as error:
        raise error if str(path) in str(error) else DataError(f"{path}: {error}") from None
    return list(symbols)


class WithUnknown(dict):
    """Ids of words; a word that is not there has that of the unknown ones."""

    def __init__(self, ids: Mapping[str, int], unknown: int):
        super().__init__(ids)
        self._unknown = unknown

    def __missing__(self, word: str) -> int:
        return self._unknown
