"""What a token is: bytes, characters or words, with one id each.

Bytes, letters and words that are counted here have the authors' order: by falling frequency, and
as first seen among equals, so that ids, adaptive cutoffs and converted models mean what theirs do.
"""

import collections
import dataclasses
import functools
import itertools
import os
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from txl_jax.data import subword
from txl_jax.data.blocks import (
    NEWLINE,
    SPACE,
    as_bytes,
    counted_bytes,
    decoded,
    lettered,
    whole_words,
)
from txl_jax.data.errors import DataError
from txl_jax.data.symbols import (
    BOUNDARY,
    BYTES,
    EOS,
    SENTENCE_UNK,
    UNK,
    Kind,
    UnknownSymbolError,
    WithUnknown,
    check_ids,
    check_symbols,
    symbols_in_file,
)

__all__ = ["BOUNDARY", "EOS", "SENTENCE_UNK", "SPACE", "UNK", "Kind", "Vocab", "check_ids"]


@dataclasses.dataclass(frozen=True)
class Vocab:
    """Text to ids and back.

    Attributes:
      kind: how text becomes symbols, see below.
      symbols: in id order.
      tokenizer: of ``subword``: how text is cut into symbols (data/subword.py), as JSON.

    ``byte``: the bytes of UTF-8; symbols are their values as decimal strings, the form in which
      the authors wrote enwik8. A vocabulary without the newline drops newlines (their protocol).
    ``char``: Unicode characters.
    ``letter``: a to z in lower case, and ``_`` for white space: text8.
    ``word``: what stands between white space, and ``<eos>`` at each line's end. Where no symbol
      has a capital, text is put in lower case first (Penn Treebank).
    ``sentence``: words too, every line a sentence between ``<S>`` and ``<S>``; ``<UNK>`` for words
      that are not known (One Billion Word).
    ``subword``: pieces of words, with the space before them; any text has an encoding.
    """

    kind: Kind
    symbols: list[str]
    tokenizer: Mapping[str, Any] | None = None

    def __post_init__(self):
        check_symbols(self.kind, self.symbols)
        if self.kind == "subword" and subword.symbols_of(self.tokenizer or {}) != self.symbols:
            raise DataError("a subword vocabulary's symbols must be those of its tokenizer")

    @classmethod
    def from_symbols(cls, symbols: Iterable[str]) -> "Vocab":
        """The vocabulary of a model from elsewhere; the symbols tell of which kind it is.

        Numbers of bytes are ``byte``; single characters ``char``, or ``letter`` if they are a to z
        and ``_`` alone; with ``<S>`` and ``<UNK>`` and no ``<eos>`` it is ``sentence``, else
        ``word``.

        Raises:
          DataError: a symbol stands in it twice, or ``<eos>`` is missing among words.
        """
        listed = list(symbols)
        found = set(listed)
        if all(len(symbol) == 1 for symbol in listed):
            letters = SPACE in found and found <= set(string.ascii_lowercase + SPACE)
            return cls("letter" if letters else "char", listed)
        if found <= BYTES.keys():
            return cls("byte", listed)
        is_sentence = {BOUNDARY, SENTENCE_UNK} <= found and EOS not in found
        return cls("sentence" if is_sentence else "word", listed)

    @classmethod
    def all_bytes(cls) -> "Vocab":
        """All 256 bytes; the value of a byte is its id."""
        return cls("byte", list(BYTES))

    @classmethod
    def from_counted_bytes(cls, *texts: Iterable[bytes], newline: bool = True) -> "Vocab":
        """The bytes of some texts; without ``newline`` that one is left out.

        Args:
          *texts: each one in blocks cut anywhere.
          newline: False for the authors' enwik8.
        """
        values = counted_bytes(itertools.chain(*texts))
        return cls("byte", [str(value) for value in values if newline or value != NEWLINE])

    @classmethod
    def from_letters(cls, *texts: Iterable[bytes]) -> "Vocab":
        """The letters of some texts, ``_`` for their white space; texts in blocks cut anywhere.

        Raises:
          DataError: a character that is not in ASCII.
        """
        symbols = [chr(v) for v in counted_bytes(map(lettered, itertools.chain(*texts)))]
        if wrong := [symbol for symbol in symbols if not symbol.isascii()]:
            raise DataError(
                f"the text has the byte {ord(wrong[0])}: a letter vocabulary is of a to z and white"
                " space; use data.name='text' with vocab='char' for other text"
            )
        return cls("letter", symbols)

    @classmethod
    def from_lines(cls, path: str | os.PathLike) -> "Vocab":
        """The sentence vocabulary in a file, see :func:`symbols_in_file`; raises DataError."""
        return cls("sentence", symbols_in_file(path))

    @classmethod
    def from_chars(cls, blocks: Iterable[bytes | str]) -> "Vocab":
        """The sorted characters of a text, given in blocks cut anywhere."""
        seen: set[str] = set()
        for text in decoded(blocks):
            seen.update(text)
        return cls("char", sorted(seen))

    @classmethod
    def from_words(cls, *texts: Iterable[bytes | str], lower_case: bool = False) -> "Vocab":
        """The words of some texts, ``<eos>`` first.

        Args:
          *texts: each one in blocks cut anywhere.
          lower_case: whether they are put in lower case first.
        """
        counts: collections.Counter[str] = collections.Counter()
        for blocks in texts:
            for text in whole_words(blocks):
                counts.update((text.lower() if lower_case else text).split())
        counts.pop(EOS, None)
        return cls("word", [EOS, *(word for word, _ in counts.most_common())])

    @classmethod
    def from_subwords(cls, *texts: Iterable[bytes | str], vocab_size: int) -> "Vocab":
        """Subwords learnt from some texts, each in blocks cut anywhere.

        Args:
          *texts: a line goes on from one to the next.
          vocab_size: 256 or more; short texts give fewer symbols.

        Raises:
          DataError: the package that learns them is missing.
        """
        tokenizer = subword.learn(itertools.chain(*texts), vocab_size)
        return cls("subword", subword.symbols_of(tokenizer), tokenizer)

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def unit(self) -> Literal["bpc", "ppl"]:
        """How a mean loss is reported: bits per byte or character, or perplexity per token."""
        return "ppl" if self.kind in ("word", "sentence", "subword") else "bpc"

    @property
    def unknown(self) -> str | None:
        """The symbol that stands for unknown words; ``None`` where there is none."""
        symbol = {"word": UNK, "sentence": SENTENCE_UNK}.get(self.kind)
        return symbol if symbol in self.symbols else None

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint8, uint16 and int32 that holds every id."""
        for dtype in (np.uint8, np.uint16):
            if len(self) <= np.iinfo(dtype).max + 1:
                return np.dtype(dtype)
        return np.dtype(np.int32)

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, 1-D, of :attr:`dtype`.

        A word vocabulary gives ``<eos>`` for each line end that is in the text: a last line
        without one, such as a prompt, gets none. A sentence vocabulary gives ``<S>`` for these,
        and one before the first line.

        Raises:
          DataError: a symbol that is not in the vocabulary (a word only where the vocabulary has
            none for unknown words), or bytes that are not UTF-8 for all kinds but ``byte``.
        """
        return np.concatenate([np.zeros(0, self.dtype), *self.encode_blocks([text])])

    def encode_blocks(
        self, blocks: Iterable[str | bytes], where: str = "text", end_last_line: bool = False
    ) -> Iterator[np.ndarray]:
        """Arrays of ids, to be read one after another; only one block is in memory at a time.

        Args:
          blocks: the text, cut anywhere (inside of a word or of a character too).
          where: the name of the text for errors.
          end_last_line: ``word`` and ``sentence``: a last line without a line end gets one, as
            the authors do with files.
        """
        if self.kind == "byte":
            return self._encode_bytes(blocks, where)
        if self.kind == "char":
            return self._encode_chars(blocks, where)
        if self.kind == "letter":
            return self._encode_chars(map(lettered, blocks), where)
        if self.kind == "subword":
            return self._subwords.encode_blocks(blocks, where)
        if self.kind == "sentence":
            sentences = self.encode_sentences(blocks, where, end_last_line)
            return (ids for ids, _ in sentences)
        return self._encode_words(blocks, where, end_last_line)

    def encode_sentences(
        self, blocks: Iterable[str | bytes], where: str = "text", end_last_line: bool = True
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids as :meth:`encode_blocks`, and with each array the places in it where sentences end.

        A place is that of a ``<S>`` that is a boundary; the first array is the one before the
        first sentence. A text may have the word ``<S>`` too, so ids alone do not tell.
        """
        boundary = self._id_of_word[BOUNDARY]
        yield np.array([boundary], self.dtype), np.zeros(1, np.int64)
        for text in whole_words(blocks, where, end_last_line):
            if BOUNDARY not in text:
                ids = self._ids(text.replace("\n", f" {BOUNDARY} "), where, 1)
                yield ids, np.flatnonzero(ids == boundary)
                continue
            *lines, rest = text.split("\n")
            parts = [self._ids(f"{line} {BOUNDARY}", where, 1) for line in lines]
            ends = np.cumsum([len(part) for part in parts], dtype=np.int64) - 1
            yield np.concatenate([*parts, self._ids(rest, where, 1)]), ends

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of some ids. Bytes that are not UTF-8 show as U+FFFD; words are joined with
        a space, ``<eos>`` becomes a line end, and so does ``<S>`` but for the first id.

        Raises:
          DataError: an id that is not in the vocabulary.
        """
        array = self._checked(ids)
        if self.kind in ("byte", "subword"):
            return self.decode_bytes(array).decode("utf-8", errors="replace")
        if self.kind == "char":
            return "".join(self.symbols[i] for i in array)
        if self.kind == "letter":
            return "".join(self.symbols[i] for i in array).replace(SPACE, " ")
        end = EOS if self.kind == "word" else BOUNDARY
        if self.kind == "sentence" and array.size and self.symbols[array[0]] == BOUNDARY:
            array = array[1:]
        words = (self.symbols[i] for i in array)
        text = "".join("\n" if word == end else word + " " for word in words)
        return text.replace(" \n", "\n").removesuffix(" ")

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """The bytes of some ids: those of :meth:`decode`, and for ``byte`` and ``subword`` exactly.

        Raises:
          DataError: an id that is not in the vocabulary.
        """
        if self.kind == "byte":
            return self._byte_of_id[self._checked(ids)].tobytes()
        if self.kind == "subword":
            return b"".join(self._bytes_of_id[i] for i in self._checked(ids))
        return self.decode(ids).encode()

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``, read again by :meth:`from_json`."""
        plain = {"kind": self.kind, "symbols": self.symbols}
        return plain if self.tokenizer is None else {**plain, "tokenizer": self.tokenizer}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Vocab":
        """The vocabulary that :meth:`to_json` wrote.

        Raises:
          DataError: it is not one.
        """
        missing = [key for key in ("kind", "symbols") if key not in stored]
        if missing:
            raise DataError(f"a stored vocabulary (vocab.json) without {' and '.join(missing)}")
        symbols, tokenizer = stored["symbols"], stored.get("tokenizer")
        if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols):
            raise DataError("the symbols of a stored vocabulary must be a list of texts")
        if not isinstance(tokenizer, dict | None):
            raise DataError("the tokenizer of a stored vocabulary must be an object")
        return cls(stored["kind"], list(symbols), tokenizer)

    # ----------------------------------------------------------------------------------

    def _checked(self, ids: Iterable[int] | np.ndarray) -> np.ndarray:
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        check_ids(array, len(self), "ids")
        return array

    def _encode_bytes(self, blocks: Iterable[str | bytes], where: str) -> Iterator[np.ndarray]:
        position, table = 0, self._id_of_byte
        every, drops = not (table < 0).any(), table[NEWLINE] < 0
        for block in blocks:
            raw = as_bytes(block, where)
            values = np.frombuffer(raw, np.uint8)
            ids = table[values]
            if not every:
                if drops:
                    kept = values != NEWLINE
                    values, ids = values[kept], ids[kept]
                if ids.size and ids.min() < 0:
                    at = int(np.argmax(ids < 0))
                    start = position + raw.index(values[at].tobytes())
                    raise UnknownSymbolError(
                        f"{where}, byte {start}: the value {values[at]} is not among the"
                        f" {len(self)} bytes of the vocabulary",
                        "remove it, or train on a text that has it",
                    )
            yield ids.astype(self.dtype)
            position += len(raw)

    def _encode_chars(self, blocks: Iterable[str | bytes], where: str) -> Iterator[np.ndarray]:
        position, line = 0, 1
        for text in decoded(blocks, where):
            codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
            ids = self._id_of_code[codes]
            if ids.size and ids.min() < 0:
                at = int(np.argmax(ids < 0))
                raise UnknownSymbolError(
                    f"{where}, line {line + text.count(chr(10), 0, at)}, character"
                    f" {position + at}: {text[at]!r} (U+{ord(text[at]):04X}) is not among the"
                    f" {len(self)} characters of the vocabulary, which are those of the training"
                    " text",
                    "remove it, or use vocab='byte', which takes any text",
                )
            yield ids.astype(self.dtype)
            position, line = position + len(text), line + text.count("\n")

    def _encode_words(
        self, blocks: Iterable[str | bytes], where: str, end_last_line: bool
    ) -> Iterator[np.ndarray]:
        line = 1
        for text in whole_words(blocks, where, end_last_line):
            text = text.lower() if self.lower_case else text
            yield self._ids(text.replace("\n", f" {EOS} "), where, line, text)
            line += text.count("\n")

    def _ids(self, spaced: str, where: str, line: int, text: str = "") -> np.ndarray:
        """The ids of words between spaces; ``text`` is theirs with its lines, for errors."""
        try:
            return np.array(list(map(self._id_of_word.__getitem__, spaced.split())), self.dtype)
        except KeyError:
            self._refuse_word(text, where, line)
            raise

    def _refuse_word(self, text: str, where: str, line: int) -> None:
        for number, words in enumerate(text.split("\n"), line):
            for word in words.split():
                if word not in self._id_of_word:
                    raise UnknownSymbolError(
                        f"{where}, line {number}: the word {word!r} is not among the {len(self)}"
                        f" of the vocabulary, and {UNK} is not one of them either",
                        f"write {UNK} for rare words in the training text, or use vocab='byte',"
                        " which takes any text",
                    )

    @functools.cached_property
    def _id_of_word(self) -> dict[str, int]:
        ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        return ids if self.unknown is None else WithUnknown(ids, ids[self.unknown])

    @functools.cached_property
    def lower_case(self) -> bool:
        """Whether text is put in lower case before it is encoded."""
        if self.kind != "word":
            return self.kind == "letter"
        return all(symbol == symbol.lower() for symbol in self.symbols)

    @functools.cached_property
    def _subwords(self) -> subword.Encoder:
        return subword.Encoder(self.tokenizer or {}, self.dtype)

    @functools.cached_property
    def _bytes_of_id(self) -> list[bytes]:
        """Of subwords."""
        return [subword.bytes_of(symbol) for symbol in self.symbols]

    @functools.cached_property
    def _byte_of_id(self) -> np.ndarray:
        """uint8 [V]."""
        return np.array([int(symbol) for symbol in self.symbols], np.uint8)

    @functools.cached_property
    def _id_of_byte(self) -> np.ndarray:
        """int16 [256]: the id of each byte, or -1."""
        table = np.full(256, -1, np.int16)
        table[self._byte_of_id] = np.arange(len(self))
        return table

    @functools.cached_property
    def _id_of_code(self) -> np.ndarray:
        """int32, one entry for each Unicode code point: its id, or -1."""
        table = np.full(0x110000, -1, np.int32)
        table[[ord(symbol) for symbol in self.symbols]] = np.arange(len(self))
        return table
