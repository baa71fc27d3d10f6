"""Subwords: frequent pieces of words as tokens, learnt from a text by byte-level BPE.

Byte pair encoding (Sennrich et al. 2016) over the bytes of UTF-8 (Radford et al. 2019), by Hugging
Face's ``tokenizers``: the 256 bytes are symbols, and each merge of two that stand side by side most
often is another. So every text has an encoding, nothing is unknown, and no two texts share one.

A text is cut after each line end, and after :data:`LONGEST` characters without one; a token never
reaches over a cut. Where blocks of it end decides nothing.

The package is needed to learn and to encode; :meth:`Vocab.decode` works without.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from txl_jax.data.blocks import decoded
from txl_jax.data.errors import DataError

LONGEST = 1 << 16
"""Characters of a line that are encoded at once; it bounds the memory of a text without lines."""
BATCH = 4096
"""Lines that are handed over at a time; together no more than a block and a line."""

_BYTES_FORM = re.compile(r"(?:<0x[0-9A-F]{2}>)+")


def learn(blocks: Iterable[bytes | str], vocab_size: int) -> dict[str, Any]:
    """The tokenizer of a text as its JSON: the same for the same text, on any machine.

    Args:
      blocks: the text, cut anywhere.
      vocab_size: symbols, 256 or more; a short text gives fewer.

    Raises:
      DataError: the package is missing, or the text is not UTF-8.
    """
    library = package()
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(whole_lines(blocks), trainer=trainer)
    return json.loads(tokenizer.to_str())


def package() -> Any:
    """The package ``tokenizers``. Raises DataError, saying how to install it, if it is missing."""
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "data.vocab = 'subword': needs the package tokenizers, which is not installed: pip"
            " install '.[subword]' in the project's folder, or use vocab='byte'"
        ) from error
    return tokenizers


class Encoder:
    """Text to ids with a tokenizer of :func:`learn`.

    Raises:
      DataError: the package is missing, or does not read this tokenizer.
    """

    def __init__(self, tokenizer: Mapping[str, Any], dtype: np.dtype):
        try:
            self._tokenizer = package().Tokenizer.from_str(json.dumps(tokenizer))
        except DataError:
            raise
        except Exception as error:  # the package raises this very type
            raise DataError(f"the tokenizer of this vocabulary cannot be read: {error}") from error
        self._dtype = dtype

    def encode_blocks(self, blocks: Iterable[bytes | str], where: str) -> Iterator[np.ndarray]:
        """Arrays of ids, to be read one after another; one block is in memory at a time.

        Raises:
          DataError: text that is not UTF-8.
        """
        for lines in whole_lines(blocks, where):
            encoded = self._tokenizer.encode_batch_fast(lines, add_special_tokens=False)
            yield np.fromiter(itertools.chain.from_iterable(e.ids for e in encoded), self._dtype)


def whole_lines(blocks: Iterable[bytes | str], where: str = "text") -> Iterator[list[str]]:
    """The text's lines with their ends, some at a time; long ones in pieces of LONGEST characters.

    Only ``\\n`` ends a line, and stays in it: the lines joined are the text.
    """
    kept = ""
    for text in decoded(blocks, where):
        *ended, kept = (kept + text).split("\n")
        pieces = [piece for line in ended for piece in _pieces(line + "\n")]
        *whole, kept = _pieces(kept) or [""]
        pieces += whole
        yield from (pieces[at : at + BATCH] for at in range(0, len(pieces), BATCH))
    if kept:
        yield [kept]


def _pieces(line: str) -> list[str]:
    return [line[at : at + LONGEST] for at in range(0, len(line), LONGEST)]


# Symbols: what a token is, so that it can be read.


def symbols_of(tokenizer: Mapping[str, Any]) -> list[str]:
    """The symbols of a tokenizer in id order, as they are read.

    A symbol is its text, ``" the"``; where its bytes are no UTF-8, as inside of a character,
    it is them: ``<0xE2><0x80>``.

    Raises:
      DataError: it is none of :func:`learn`'s.
    """
    try:
        ids = tokenizer["model"]["vocab"]
        tokens = sorted(ids, key=ids.__getitem__)
        if [ids[token] for token in tokens] != list(range(len(tokens))):
            raise ValueError("ids are not 0, 1, 2, …")
        symbols = [bytes(_BYTE_OF_CHARACTER[c] for c in token) for token in tokens]
        if (single := sum(len(symbol) == 1 for symbol in symbols)) != 256:
            raise ValueError(f"{single} of the 256 bytes have a symbol")
        return [shown(symbol) for symbol in symbols]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"a subword vocabulary needs a byte-level tokenizer ({error})") from error


def shown(raw: bytes) -> str:
    """Bytes as a symbol; no two have the same."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = ""
    if text and not _BYTES_FORM.fullmatch(text):
        return text
    return "".join(f"<0x{value:02X}>" for value in raw)


def bytes_of(symbol: str) -> bytes:
    """Inverse of :func:`shown`."""
    if _BYTES_FORM.fullmatch(symbol):
        return bytes.fromhex(symbol.replace("<0x", "").replace(">", ""))
    return symbol.encode()


def _byte_of_character() -> dict[str, int]:
    """The characters that stand for bytes in a tokenizer's JSON (Radford et al. 2019, code).

    Printable ones of Latin-1 stand for themselves, the other bytes are 256, 257, … in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    table = {chr(value): value for value in printable}
    return table | {chr(256 + n): value for n, value in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
