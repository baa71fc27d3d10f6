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
from typing import Any, Literal, get_args

import numpy as np

from txl_jax.data.blocks import NEWLINE, SPACE, counted_bytes, decoded, lettered, whole_words
from txl_jax.data.errors import DataError

Kind = Literal["byte", "char", "letter", "word", "sentence"]

EOS = "<eos>"
"""The symbol of a line's end in a word vocabulary; id 0 of those counted here."""
UNK = "<unk>"
"""The symbol that stands for unknown words, where the counted text itself has it."""
BOUNDARY = "<S>"
"""The symbol between two sentences: the first one's end and the next one's start."""
SENTENCE_UNK = "<UNK>"
"""The symbol of unknown words in a sentence vocabulary."""


@dataclasses.dataclass(frozen=True)
class Vocab:
    """Text to ids and back.

    Attributes:
      kind: how text becomes symbols, see below.
      symbols: in id order.

    ``byte``: the bytes of UTF-8; symbols are their values as decimal strings, the form in which
      the authors wrote enwik8. A vocabulary without the newline drops newlines (their protocol).
    ``char``: Unicode characters.
    ``letter``: a to z in lower case, and ``_`` for white space: text8.
    ``word``: what stands between white space, and ``<eos>`` at each line's end. Where no symbol
      has a capital, text is put in lower case first (Penn Treebank).
    ``sentence``: words too, every line a sentence between ``<S>`` and ``<S>``; ``<UNK>`` for words
      that are not known (One Billion Word).
    """

    kind: Kind
    symbols: list[str]

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            kinds = ", ".join(repr(kind) for kind in get_args(Kind))
            raise DataError(f"vocabulary kind {self.kind!r}: must be one of {kinds}")
        if not self.symbols:
            raise DataError(f"a {self.kind} vocabulary without symbols")
        if len(set(self.symbols)) != len(self.symbols):
            twice = collections.Counter(self.symbols).most_common(1)[0][0]
            raise DataError(f"{self.kind} vocabulary: the symbol {twice!r} stands in it twice")
        if self.kind == "byte" and (wrong := [s for s in self.symbols if s not in _BYTES]):
            raise DataError(
                f"a byte vocabulary's symbols must be the numbers 0 to 255, not {wrong[0]!r}"
            )
        if self.kind in ("char", "letter") and any(len(symbol) != 1 for symbol in self.symbols):
            raise DataError(f"a {self.kind} vocabulary's symbols must be single characters")
        needed = {"word": (EOS,), "sentence": (BOUNDARY, SENTENCE_UNK)}.get(self.kind, ())
        for symbol in needed:
            if symbol not in self.symbols:
                raise DataError(f"a {self.kind} vocabulary must have the symbol {symbol}")

    @classmethod
    def of_symbols(cls, symbols: Iterable[str]) -> "Vocab":
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
        if found <= _BYTES.keys():
            return cls("byte", listed)
        is_sentence = {BOUNDARY, SENTENCE_UNK} <= found and EOS not in found
        return cls("sentence" if is_sentence else "word", listed)

    @classmethod
    def of_bytes(cls) -> "Vocab":
        """All 256 bytes; the value of a byte is its id."""
        return cls("byte", list(_BYTES))

    @classmethod
    def of_counted_bytes(cls, *texts: Iterable[bytes], newline: bool = True) -> "Vocab":
        """The bytes of some texts; without ``newline`` that one is left out.

        Args:
          *texts: each one in blocks cut anywhere.
          newline: False for the authors' enwik8.
        """
        values = counted_bytes(itertools.chain(*texts))
        return cls("byte", [str(value) for value in values if newline or value != NEWLINE])

    @classmethod
    def of_letters(cls, *texts: Iterable[bytes]) -> "Vocab":
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
    def of_lines(cls, path: str | os.PathLike) -> "Vocab":
        """The sentence vocabulary in a file, a symbol a line, in id order.

        Of a line with several fields the first is the symbol; one that was there before is passed
        over. Both as the authors read ``1b_word_vocab.txt``.

        Raises:
          DataError: an empty line, text that is not UTF-8, or no ``<S>`` or ``<UNK>``.
        """
        symbols: dict[str, None] = {}
        try:
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    fields = line.split(maxsplit=1)
                    if not fields:
                        raise DataError(f"{path}, line {number}: has no symbol")
                    symbols.setdefault(fields[0])
            return cls("sentence", list(symbols))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 ({error.reason})") from error
        except DataError as error:
            raise error if str(path) in str(error) else DataError(f"{path}: {error}") from None

    @classmethod
    def of_chars(cls, blocks: Iterable[bytes | str]) -> "Vocab":
        """The sorted characters of a text, given in blocks cut anywhere."""
        seen: set[str] = set()
        for text in decoded(blocks):
            seen.update(text)
        return cls("char", sorted(seen))

    @classmethod
    def of_words(cls, *texts: Iterable[bytes | str], lower_case: bool = False) -> "Vocab":
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

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def unit(self) -> Literal["bpc", "ppl"]:
        """How a mean loss is reported: bits per byte or character, or perplexity per word."""
        return "ppl" if self.kind in ("word", "sentence") else "bpc"

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
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        check_ids(array, len(self), "ids")
        if self.kind == "byte":
            return self._byte_of_id[array].tobytes().decode("utf-8", errors="replace")
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

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``, read again by :meth:`from_json`."""
        return {"kind": self.kind, "symbols": self.symbols}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Vocab":
        """The vocabulary that :meth:`to_json` wrote."""
        return cls(stored["kind"], list(stored["symbols"]))

    # ----------------------------------------------------------------------------------

    def _encode_bytes(self, blocks: Iterable[str | bytes], where: str) -> Iterator[np.ndarray]:
        position, table = 0, self._id_of_byte
        every, drops = not (table < 0).any(), table[NEWLINE] < 0
        for block in blocks:
            # surrogateescape: bytes of a command line that were not UTF-8 come back as they were
            raw = block.encode("utf-8", "surrogateescape") if isinstance(block, str) else block
            values = np.frombuffer(raw, np.uint8)
            ids = table[values]
            if not every:
                if drops:
                    kept = values != NEWLINE
                    values, ids = values[kept], ids[kept]
                if ids.size and ids.min() < 0:
                    at = int(np.argmax(ids < 0))
                    start = position + raw.index(values[at].tobytes())
                    raise DataError(
                        f"{where}, byte {start}: the value {values[at]} is not among the"
                        f" {len(self)} bytes of the vocabulary; remove it, or train on a text that"
                        " has it"
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
                raise DataError(
                    f"{where}, line {line + text.count(chr(10), 0, at)}, character"
                    f" {position + at}: {text[at]!r} (U+{ord(text[at]):04X}) is not among the"
                    f" {len(self)} characters of the vocabulary, which are those of the training"
                    " text; remove it, or use vocab='byte', which takes any text"
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
                    raise DataError(
                        f"{where}, line {number}: the word {word!r} is not among the {len(self)}"
                        f" of the vocabulary, and {UNK} is not one of them either; write {UNK} for"
                        " rare words in the training text, or use vocab='byte', which takes any"
                        " text"
                    )

    @functools.cached_property
    def _id_of_word(self) -> dict[str, int]:
        ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        return ids if self.unknown is None else _WithUnknown(ids, ids[self.unknown])

    @functools.cached_property
    def lower_case(self) -> bool:
        """Whether text is put in lower case before it is encoded."""
        if self.kind != "word":
            return self.kind == "letter"
        return all(symbol == symbol.lower() for symbol in self.symbols)

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


class _WithUnknown(dict):
    """Ids of words; a word that is not there has that of the unknown ones."""

    def __init__(self, ids: Mapping[str, int], unknown: int):
        super().__init__(ids)
        self._unknown = unknown

    def __missing__(self, word: str) -> int:
        return self._unknown


_BYTES = {str(value): value for value in range(256)}
"""Symbol to value."""


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
