"""Encodes text with a ``tokenizer.json``, a file of Hugging Face's package ``tokenizers``.

A text is encoded line by line. The special tokens that a tokenizer can add before and after a text
are left out. A special token that is written in the text itself becomes one token. Truncation and
padding are turned off.

Subwords are frequent pieces of words, learnt from a text by byte pair encoding (Sennrich et al.
2016) over the bytes of UTF-8 (Radford et al. 2019). The first symbols are the 256 bytes, so every
text can be encoded. Decoding subwords does not need the package ``tokenizers``.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.data.codecs import Codec, decode_utf8
from txl_jax.data.errors import DataError
from txl_jax.files import parse_json
from txl_jax.library_errors import import_optional

LONGEST = 1 << 16  # the largest number of characters of a line that are encoded together
BATCH = 4096  # the number of lines that are encoded together
DEFAULT_SIZE = 8000  # the number of subwords if ``data.vocab_size`` is not set

_BYTES_FORM = re.compile(r"(?:<0x[0-9A-F]{2}>)+")

# The characters that represent bytes in a tokenizer's JSON (Radford et al. 2019, code). Printable
# characters of Latin-1 represent themselves, and 256, 257, … represent the other bytes in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [value for value in range(256) if value not in _PRINTABLE]
_BYTE_OF_CHARACTER = {chr(value): value for value in _PRINTABLE}
_BYTE_OF_CHARACTER |= {chr(256 + n): value for n, value in enumerate(_OTHERS)}


def import_tokenizers() -> Any:
    """Returns the package ``tokenizers``; raises DataError if it is not installed."""
    missing = DataError(
        "data.vocab='subword' and data.tokenizer need the package tokenizers, which is not"
        " installed; run pip install '.[subword]' in the project's folder, or use data.vocab='byte'"
    )
    return import_optional("tokenizers", missing)


class TokenizerCodec(Codec):
    """The encoding of text by a tokenizer of any kind."""

    unit = "ppl"

    def __init__(self, kind: str, symbols: Sequence[str], tokenizer: Mapping[str, Any]):
        super().__init__(kind, symbols, tokenizer)
        self._json = tokenizer

    def encode_blocks(self, blocks, where, end_last_line):
        """Raises DataError if ``tokenizers`` is missing or cannot read this tokenizer."""
        for lines in whole_lines(blocks, where):
            try:
                encoded = self._tokenizer.encode_batch_fast(lines, add_special_tokens=False)
            except Exception as error:  # tokenizers raises Exception itself
                fault = f"the tokenizer cannot encode this text ({error})"
                raise DataError(f"{where}: {fault}") from error
            yield np.fromiter(itertools.chain.from_iterable(e.ids for e in encoded), self.dtype)

    def decode(self, ids):
        """Returns the text as the tokenizer decodes it, with its special tokens."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._json, "this vocabulary")


def load_tokenizer(stored: Mapping[str, Any], where: str) -> Any:
    """Returns the tokenizer of a JSON object; raises DataError if ``tokenizers`` refuses it."""
    library = import_tokenizers()
    try:
        tokenizer = library.Tokenizer.from_str(json.dumps(stored))
    except Exception as error:  # tokenizers raises Exception itself
        raise DataError(f"the tokenizer of {where} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Returns the tokens of a ``tokenizer.json`` in the order of their ids, and its content.

    Ids without a token are called ``<unused N>``. Raises DataError if the file is no tokenizer.
    """
    try:
        stored = parse_json(path.read_bytes())
    except OSError as error:
        fix = "name a file, such as the tokenizer.json that save_pretrained('FOLDER') writes"
        fault = f"cannot be read ({error.strerror})"
        raise DataError(f"data.tokenizer = {str(path)!r}: {fault}; {fix}") from error
    except ValueError as error:
        raise DataError(f"data.tokenizer = {str(path)!r}: {error}") from error
    ids = load_tokenizer(stored, str(path)).get_vocab(with_added_tokens=True)
    if not ids:
        raise DataError(f"data.tokenizer = {str(path)!r}: has no tokens")
    names = {i: token for token, i in ids.items()}
    return [names.get(i, f"<unused {i}>") for i in range(max(names) + 1)], stored


def whole_lines(blocks: Iterable[bytes | str], where: str = "text") -> Iterator[list[str]]:
    """Yields lists of lines with their ends; lines longer than LONGEST characters are cut."""
    kept = ""
    for text in decode_utf8(blocks, where, any_character=True):  # tokenizers accept NUL too
        *ended, kept = (kept + text).split("\n")
        parts = [part for line in ended for part in _parts(line + "\n")]
        *whole, kept = _parts(kept) or [""]
        parts += whole
        yield from (parts[at : at + BATCH] for at in range(0, len(parts), BATCH))
    if kept:
        yield [kept]


def _parts(line: str) -> list[str]:
    return [line[at : at + LONGEST] for at in range(0, len(line), LONGEST)]


def train_tokenizer(blocks: Iterable[bytes | str], vocab_size: int) -> dict[str, Any]:
    """Learns a tokenizer of up to ``vocab_size`` symbols from a text, and returns it as a dict."""
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
    """The encoding of text as subwords; the space before a word is a part of its first subword."""

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
    """Returns a byte-level tokenizer's symbols in id order, or raises DataError for another one."""
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
    """Converts the bytes of a token to a symbol; different bytes give different symbols."""
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
