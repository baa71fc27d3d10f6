"""Learns subwords, which are frequent pieces of words, from a text by byte-level BPE.

Hugging Face's ``tokenizers`` computes byte pair encoding (Sennrich et al. 2016) over the bytes of
UTF-8 (Radford et al. 2019). The first symbols are the 256 bytes, so every text can be encoded.
Training repeatedly merges the most frequent pair of neighbouring symbols into a new symbol.

A text is cut after each line end, and after 65,536 characters without a line end, to bound memory.
A token never crosses a cut. :meth:`Vocab.decode` works without ``tokenizers``.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from txl_jax.data.errors import DataError
from txl_jax.data.tokenizer import TokenizerCodec, import_tokenizers, whole_lines

DEFAULT_SIZE = 8000  # the number of subwords if ``data.vocab_size`` is not set

_BYTES_FORM = re.compile(r"(?:<0x[0-9A-F]{2}>)+")

# The characters that represent bytes in a tokenizer's JSON (Radford et al. 2019, code). Printable
# characters of Latin-1 represent themselves, and 256, 257, … represent the other bytes in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [value for value in range(256) if value not in _PRINTABLE]
_BYTE_OF_CHARACTER = {chr(value): value for value in _PRINTABLE}
_BYTE_OF_CHARACTER |= {chr(256 + n): value for n, value in enumerate(_OTHERS)}


def train_tokenizer(blocks: Iterable[bytes | str], vocab_size: int) -> dict[str, Any]:
    """Learns the tokenizer of a text and returns its JSON; a short text gives fewer symbols."""
    library = import_tokenizers()
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(whole_lines(blocks), trainer=trainer)
    return json.loads(tokenizer.to_str())


class SubwordCodec(TokenizerCodec):
    """The encoding of pieces of words, which include the space before them, by a tokenizer."""

    def __init__(self, kind: str, symbols: Sequence[str], tokenizer: Mapping[str, Any]):
        super().__init__(kind, symbols, tokenizer)
        if tokenizer_symbols(tokenizer) != symbols:
            raise DataError("a subword vocabulary's symbols must be those of its tokenizer")
        self._bytes = [symbol_to_bytes(symbol) for symbol in symbols]

    def decode(self, ids):
        """Returns the text; works without ``tokenizers``."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids):
        """Returns the bytes of the ids, exactly."""
        return b"".join(self._bytes[i] for i in ids)


def tokenizer_symbols(tokenizer: Mapping[str, Any]) -> list[str]:
    """Returns a byte-level tokenizer's symbols in id order; raises DataError for any other."""
    try:
        ids = tokenizer["model"]["vocab"]
        tokens = sorted(ids, key=ids.__getitem__)
        if [ids[token] for token in tokens] != list(range(len(tokens))):
            raise ValueError("ids are not 0, 1, 2, …")
        symbols = [bytes(_BYTE_OF_CHARACTER[c] for c in token) for token in tokens]
        if (single := sum(len(symbol) == 1 for symbol in symbols)) != 256:
            raise ValueError(f"{single} symbols are single bytes, not 256")
        return [bytes_to_symbol(symbol) for symbol in symbols]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"a subword vocabulary needs a byte-level tokenizer ({error})") from error


def bytes_to_symbol(raw: bytes) -> str:
    """Converts bytes to a symbol; different bytes have different symbols."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = ""
    if text and not _BYTES_FORM.fullmatch(text):
        return text
    return "".join(f"<0x{value:02X}>" for value in raw)


def symbol_to_bytes(symbol: str) -> bytes:
    """Converts a symbol back to bytes; the inverse of :func:`bytes_to_symbol`."""
    if _BYTES_FORM.fullmatch(symbol):
        return bytes.fromhex(symbol.replace("<0x", "").replace(">", ""))
    return symbol.encode()
