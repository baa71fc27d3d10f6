"""Encodes blocks of text, which may end inside a word or a character, and decodes ids."""

import codecs
import collections
import contextlib
import io
import itertools
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from txl_jax.data.errors import DataError
from txl_jax.data.symbols import BOUNDARY, BYTES, EOS, SENTENCE_UNK, SPACE, UNK, UnknownSymbolError
from txl_jax.file_kinds import not_text, wide_encoding
from txl_jax.units import Unit

Blocks = Iterable[str | bytes]
NEWLINE = 10
TO_UTF8 = "convert the text to UTF-8, for example by  iconv -f CP1252 -t UTF-8 FILE > NEW"
_DROP_BYTES = "remove such bytes, for example by  iconv -c -f UTF-8 -t UTF-8 FILE > NEW"
_DROP_NUL = r"remove it, for example by  tr -d '\000' < FILE > NEW"
_ANY_TEXT = "train with data.vocab='byte', which takes any text"
_WHITE_TO_SPACE = bytes.maketrans(string.whitespace.encode(), SPACE.encode() * 6)


def decode_utf8(blocks: Blocks, where: str = "text", any_character: bool = False) -> Iterator[str]:
    """Decodes blocks of UTF-8, which may end inside a character, and changes no character.

    Raises DataError for blocks that are not UTF-8. Unless ``any_character`` is true, the character
    U+0000 (NUL) is an error too, because text in UTF-16 and UTF-32 has bytes that are 0.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    read, start = 0, b""
    for block in itertools.chain(blocks, [None]):
        raw = block if isinstance(block, bytes) else as_bytes(block or "", where, "strict")
        start = start or raw[:4096]
        kept, fault = len(decoder.getstate()[0]), ""
        try:
            text = block if isinstance(block, str) else decoder.decode(raw, final=block is None)
            if not any_character and (at := raw.find(0)) >= 0:
                fault = "the character U+0000 (NUL), which no text has"
        except UnicodeDecodeError as error:
            at, fault = error.start - kept, f"not UTF-8 ({error.reason})"
        if fault:
            around = raw[max(at - 2048, 0) : max(at, 0) + 2048]
            if kind := not_text(start) or ("binary data" if not_text(around) else None):
                raise DataError(f"{where}, byte {read + at}: {fault}; this is {kind}, not text")
            like, fix = _like(start), TO_UTF8
            if not like and "NUL" in fault:
                fix = _DROP_NUL
            elif not like and not around.decode(errors="ignore").isascii():  # the rest is UTF-8
                fix = _DROP_BYTES
            fix = f"{like}; {fix}, or use data.vocab='byte' for any bytes"
            raise DataError(f"{where}, byte {read + at}: {fault}{fix}") from None
        yield text
        read += len(raw)


def _like(block: str | bytes) -> str:
    """Returns a part of a message that names the probable encoding of a text, or an empty text."""
    name = None
    with contextlib.suppress(UnicodeEncodeError):
        start = block[:4096]
        raw = start.encode("utf-8", "surrogateescape") if isinstance(start, str) else start
        name = wide_encoding(raw)
    return f"; the text looks like {name} without a byte order mark" if name else ""


def as_bytes(block: str | bytes, where: str = "text", errors: str = "surrogateescape") -> bytes:
    """Encodes a block in UTF-8; a surrogate that stands for a byte becomes this byte again.

    In the text of a command line, Python writes bytes that are not UTF-8 as such surrogates.
    Raises DataError for other surrogates, and if ``errors`` is ``strict``, for all surrogates.
    """
    try:
        return block.encode("utf-8", errors) if isinstance(block, str) else block
    except UnicodeEncodeError as error:
        what = f"{block[error.start]!r} is not a character{_like(block)}"
        raise DataError(
            f"{where}, character {error.start}: {what}; give text that is UTF-8"
        ) from None


def _crlf_fix(text: str | bytes, at: int) -> str | None:
    """Returns advice for an error if the symbol at ``at`` is a CR of a CRLF, or else ``None``."""
    if text[at : at + 2] not in ("\r", "\r\n", b"\r", b"\r\n"):
        return None
    fault = "the line ends are CRLF (Windows), and those of the training text are not"
    return f"{fault}; convert them with  sed -i 's/\\r$//' FILE"


def as_letters(block: str | bytes) -> bytes:
    """Converts a block to lower case, with ``_`` for white space; errors as in :func:`as_bytes`."""
    return as_bytes(block).lower().translate(_WHITE_TO_SPACE)


def whole_words(blocks: Blocks, where: str = "text", end_last_line: bool = False) -> Iterator[str]:
    """Yields a text in parts, none of which ends inside a word; CRLF and CR become LF.

    With ``end_last_line``, the last line gets a line end if it has none.
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
    """Returns the byte values in ``blocks`` by decreasing frequency, then by first occurrence."""
    counts: collections.Counter[int] = collections.Counter()
    for block in blocks:
        found = np.bincount(np.frombuffer(block, np.uint8), minlength=256)
        for value in sorted(np.flatnonzero(found).tolist(), key=block.index):
            counts[value] += int(found[value])
    return [value for value, _ in counts.most_common()]


class Codec:
    """Encodes and decodes text with one kind of vocabulary.

    The constructor raises DataError for symbols of another kind.
    """

    required: ClassVar[tuple[str, ...]] = ()  # symbols that every vocabulary of this kind has
    unit: Unit = "bpc"  # the unit of a mean loss
    unknown: ClassVar[str | None] = None  # the symbol that can stand for unknown words
    lower_case = False  # whether text is put in lower case before it is encoded

    def __init__(self, kind: str, symbols: Sequence[str], tokenizer: Mapping[str, Any]):
        for symbol in self.required:
            if symbol not in symbols:
                raise DataError(f"a {kind} vocabulary must have the symbol {symbol}")
        n = len(symbols)
        self.dtype = np.dtype("uint8" if n <= 1 << 8 else "uint16" if n <= 1 << 16 else "int32")
        self.symbols = symbols

    def encode_blocks(
        self, blocks: Blocks, where: str, end_last_line: bool
    ) -> Iterator[np.ndarray]:
        """Yields arrays of ids; see :meth:`Vocab.encode_blocks`."""
        raise NotImplementedError

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of valid ids."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: np.ndarray) -> bytes:
        """Returns the bytes of valid ids."""
        return self.decode(ids).encode()

    def _not_among(self, what: str) -> str:
        return f"is not among the {len(self.symbols)} {what} of the vocabulary"


class ByteCodec(Codec):
    """The encoding of text as bytes; a symbol is a value in decimal, as in the authors' files.

    If the vocabulary lacks the newline byte, newlines are dropped, as in the authors' preparation
    of enwik8. The loss then does not cover every byte, so its unit is that of the paper: bits per
    character.
    """

    def __init__(self, kind: str, symbols: Sequence[str], tokenizer: Mapping[str, Any]):
        super().__init__(kind, symbols, tokenizer)
        if wrong := [symbol for symbol in symbols if symbol not in BYTES]:
            raise DataError(
                f"a byte vocabulary's symbols must be the numbers 0 to 255, not {wrong[0]!r}"
            )
        self._bytes = np.array([int(symbol) for symbol in symbols], np.uint8)
        self.unit = "bpb" if NEWLINE in self._bytes else "bpc"
        self._ids = np.full(256, -1, np.int16)
        self._ids[self._bytes] = np.arange(len(symbols))

    def encode_blocks(self, blocks, where, end_last_line):
        """Drops newlines that have no id; raises UnknownSymbolError for other bytes without one."""
        position = 0
        for block in blocks:
            raw = as_bytes(block, where)
            values = np.frombuffer(raw, np.uint8)
            ids = self._ids[values]
            wrong = np.flatnonzero((ids < 0) & (values != NEWLINE))
            if wrong.size:
                fault = f"byte {position + wrong[0]}: the value {values[wrong[0]]}"
                fix = _crlf_fix(raw, wrong[0]) or "remove this byte, or train on a text that has it"
                raise UnknownSymbolError(f"{where}, {fault} {self._not_among('bytes')}", fix)
            yield ids[ids >= 0].astype(self.dtype)
            position += len(raw)

    def decode_bytes(self, ids):
        """Returns the bytes of the ids, exactly."""
        return self._bytes[ids].tobytes()


class CharCodec(Codec):
    """The encoding of text as Unicode characters."""

    def __init__(self, kind: str, symbols: Sequence[str], tokenizer: Mapping[str, Any]):
        super().__init__(kind, symbols, tokenizer)
        if any(len(symbol) != 1 for symbol in symbols):
            raise DataError(f"a {kind} vocabulary's symbols must be single characters")
        self._ids = np.full(0x110000, -1, np.int32)  # the id of every code point, or -1
        self._ids[[ord(symbol) for symbol in symbols]] = np.arange(len(symbols))

    def encode_blocks(self, blocks, where, end_last_line):
        """Raises UnknownSymbolError for a character that has no id."""
        position, line = 0, 1
        for text in decode_utf8(blocks, where):
            ids = self._ids[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")]
            if ids.size and ids.min() < 0:
                at = int(np.argmax(ids < 0))
                at_line = f"line {line + text.count(chr(10), 0, at)}, character {position + at}"
                fault = f"{text[at]!r} (U+{ord(text[at]):04X}) {self._not_among('characters')}"
                fix = _crlf_fix(text, at) or f"remove this character, or {_ANY_TEXT}"
                raise UnknownSymbolError(f"{where}, {at_line}: {fault}", fix)
            yield ids.astype(self.dtype)
            position, line = position + len(text), line + text.count("\n")

    def decode(self, ids):
        """Returns the characters of the ids as a text."""
        return "".join(self.symbols[i] for i in ids)


class LetterCodec(CharCodec):
    """The encoding of text8: letters from a to z, and ``_`` for white space."""

    lower_case = True

    def encode_blocks(self, blocks, where, end_last_line):
        """Converts text to lower case before encoding it."""
        return super().encode_blocks(map(as_letters, blocks), where, end_last_line)

    def decode(self, ids):
        """Returns the text with spaces in place of ``_``."""
        return super().decode(ids).replace(SPACE, " ")


class WordCodec(Codec):
    """The encoding of text as words between white space, with ``<eos>`` at the end of each line.

    If no symbol has a capital letter, text is first converted to lower case (Penn Treebank).
    """

    unit = "ppl"
    required: ClassVar[tuple[str, ...]] = (EOS,)
    unknown = UNK

    def __init__(self, kind: str, symbols: Sequence[str], tokenizer: Mapping[str, Any]):
        super().__init__(kind, symbols, tokenizer)
        self._ids = {symbol: i for i, symbol in enumerate(symbols)}
        self.lower_case = kind == "word" and all(s == s.lower() for s in symbols)

    def encode_blocks(self, blocks, where, end_last_line):
        """Raises UnknownSymbolError for a word that has no id."""
        line = 1
        for text in whole_words(blocks, where, end_last_line):
            text = text.lower() if self.lower_case else text
            try:
                yield self._ids_of(text.replace("\n", f" {EOS} "))
            except KeyError as error:
                word = error.args[0]
                lines = enumerate(text.split("\n"), line)
                line = next(n for n, words in lines if word in words.split())
                fault = f"the word {word!r} {self._not_among('words')}, which does not have {UNK}"
                fix = f"write {UNK} for rare words in the training text, or {_ANY_TEXT}"
                raise UnknownSymbolError(f"{where}, line {line}: {fault}", fix) from None
            line += text.count("\n")

    def decode(self, ids):
        """Returns the words, joined by spaces; the symbol for a line's end becomes a newline."""
        words = (self.symbols[i] for i in ids)
        text = "".join("\n" if word == self.required[0] else word + " " for word in words)
        return text.replace(" \n", "\n").removesuffix(" ")

    def _ids_of(self, spaced: str) -> np.ndarray:
        """Returns ids of words, that of ``unknown`` for other words; KeyError if there is none."""
        words, unknown = spaced.split(), self._ids.get(self.unknown)
        if unknown is None:
            return np.array(list(map(self._ids.__getitem__, words)), self.dtype)
        return np.array(list(map(self._ids.get, words, itertools.repeat(unknown))), self.dtype)


class SentenceCodec(WordCodec):
    """The encoding of lines as sentences with ``<S>`` around each; unknown words are ``<UNK>``."""

    required = (BOUNDARY, SENTENCE_UNK)
    unknown = SENTENCE_UNK

    def encode_blocks(self, blocks, where, end_last_line):
        """Encodes sentences; unknown words have the id of ``<UNK>``."""
        return (ids for ids, _ in self.encode_sentences(blocks, where, end_last_line))

    def encode_sentences(
        self, blocks: Blocks, where: str, end_last_line: bool
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields ids and boundaries; see :meth:`Vocab.encode_sentences`."""
        boundary = self._ids[BOUNDARY]
        yield np.array([boundary], self.dtype), np.zeros(1, np.int64)
        for text in whole_words(blocks, where, end_last_line):
            ids = self._ids_of(text.replace("\n", f" {BOUNDARY} "))
            ends = np.flatnonzero(ids == boundary)
            if BOUNDARY in text:  # the text has a word <S>, which ends no sentence
                sizes = [len(line.split()) + 1 for line in text.split("\n")[:-1]]
                ends = np.cumsum(sizes, dtype=np.int64) - 1
            yield ids, ends

    def decode(self, ids):
        """Returns the sentences, one on each line, without the first ``<S>``."""
        begins = ids.size and self.symbols[ids[0]] == BOUNDARY
        return super().decode(ids[1:] if begins else ids)


class IdCodec(Codec):
    r"""The encoding of the user's own ids; a text lists their symbols, separated by white space.

    A number that is not a symbol is an id: ``C4 17`` is the id of the symbol ``C4``, then the id
    17. White space inside a symbol is written as in a Python string: ``\n`` or ``\x20``. If every
    symbol is a single character, and one of them is white space, symbols are not separated.
    """

    unit = "ppl"

    def __init__(self, kind: str, symbols: Sequence[str], tokenizer: Mapping[str, Any]):
        super().__init__(kind, symbols, tokenizer)
        if "" in symbols:
            raise DataError("the symbol '' is empty; each symbol must have a character")
        white = any(symbol.isspace() for symbol in symbols)
        self.is_text = white and all(len(symbol) == 1 for symbol in symbols)
        self._written = list(symbols) if self.is_text else list(map(_one_word, symbols))
        self._ids = {symbol: i for i, symbol in enumerate(self._written)}
        if len(self._ids) < len(symbols):
            raise DataError("two symbols differ only in how white space is written in them")

    def encode_blocks(self, blocks, where, end_last_line):
        """Raises UnknownSymbolError for a word that is neither a symbol nor a valid id."""
        n = len(self.symbols)
        texts = decode_utf8(blocks, where) if self.is_text else whole_words(blocks, where)
        for text in texts:
            words = list(text) if self.is_text else text.split()
            ids = [self._ids.get(word, self._number(word)) for word in words]
            if wrong := [w for w, i in zip(words, ids, strict=True) if not 0 <= i < n]:
                fix = f"write symbols, or ids from 0 to {n - 1} with white space between them"
                if self.is_text:
                    fix = f"write only the {n} characters that are symbols"
                raise UnknownSymbolError(f"{where}: {wrong[0]!r} is no symbol of this model", fix)
            yield np.array(ids, self.dtype)

    def _number(self, word: str) -> int:
        is_id = not self.is_text and word.isascii() and word.isdigit() and len(word) < 19
        return int(word) if is_id else -1

    def decode(self, ids):
        """Returns the symbols, joined by spaces, or without spaces if they are characters."""
        return ("" if self.is_text else " ").join(self._written[i] for i in ids)


def _one_word(symbol: str) -> str:
    """Returns a symbol with the white space in it written as Python's escape sequences."""
    written = lambda c: "\\x20" if c == " " else c.encode("unicode_escape").decode()
    return "".join(written(c) if c.isspace() else c for c in symbol)
