"""A vocabulary: what a token is, with one id for each symbol.

Bytes, letters and words that are counted here have the authors' order: by falling frequency, and
as first seen among equals. So ids, adaptive cutoffs and converted models mean the same as theirs.
"""

import collections
import dataclasses
import functools
import itertools
import os
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from txl_jax.data import codecs, subword
from txl_jax.data.codecs import NEWLINE, as_letters, bytes_by_frequency, decode_utf8, whole_words
from txl_jax.data.errors import DataError
from txl_jax.data.symbols import (
    BOUNDARY,
    BYTES,
    EOS,
    SENTENCE_UNK,
    SPACE,
    Kind,
    check_ids,
    check_symbols,
)

CODECS: dict[Kind, type[codecs.Codec]] = {
    "byte": codecs.ByteCodec,
    "char": codecs.CharCodec,
    "letter": codecs.LetterCodec,
    "word": codecs.WordCodec,
    "sentence": codecs.SentenceCodec,
    "subword": subword.SubwordCodec,
}


@dataclasses.dataclass(frozen=True)
class Vocab:
    """Text to ids and back.

    Attributes:
      kind: how text becomes symbols, see the classes in :data:`CODECS`.
      symbols: in id order.
      tokenizer: of ``subword``: how text is cut into symbols (data/subword.py), as JSON.
    """

    kind: Kind
    symbols: list[str]
    tokenizer: Mapping[str, Any] | None = None

    def __post_init__(self):
        check_symbols(self.kind, self.symbols)
        _ = self._codec  # which checks its symbols

    @classmethod
    def from_symbols(cls, symbols: Iterable[str]) -> "Vocab":
        """The vocabulary of a model from elsewhere; its symbols decide its kind, never subword."""
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
        """The bytes of some texts, each in blocks; ``newline=False`` leaves that byte out."""
        values = bytes_by_frequency(itertools.chain(*texts))
        return cls("byte", [str(value) for value in values if newline or value != NEWLINE])

    @classmethod
    def from_letters(cls, *texts: Iterable[bytes]) -> "Vocab":
        """The letters of some texts, each in blocks; DataError for a character not in ASCII."""
        symbols = [chr(v) for v in bytes_by_frequency(map(as_letters, itertools.chain(*texts)))]
        if wrong := [symbol for symbol in symbols if not symbol.isascii()]:
            raise DataError(
                f"the text has the byte {ord(wrong[0])}: a letter vocabulary is of a to z and white"
                " space; use data.name='text' with vocab='char' for other text"
            )
        return cls("letter", symbols)

    @classmethod
    def from_lines(cls, path: str | os.PathLike) -> "Vocab":
        """The sentence vocabulary in a file, or DataError.

        As the authors read it: the first field of a line; one that occurred before is skipped.
        """
        try:
            with open(path, encoding="utf-8") as file:
                lines = [line.split(maxsplit=1) for line in file]
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 ({error.reason})") from error
        if [] in lines:
            raise DataError(f"{path}, line {lines.index([]) + 1}: has no symbol")
        try:
            return cls("sentence", list(dict.fromkeys(fields[0] for fields in lines)))
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    @classmethod
    def from_chars(cls, blocks: Iterable[bytes | str]) -> "Vocab":
        """The sorted characters of a text, given in blocks."""
        return cls("char", sorted(set(itertools.chain.from_iterable(decode_utf8(blocks)))))

    @classmethod
    def from_words(cls, *texts: Iterable[bytes | str], lower_case: bool = False) -> "Vocab":
        """The words of some texts, each in blocks, ``<eos>`` first."""
        counts: collections.Counter[str] = collections.Counter()
        for text in itertools.chain.from_iterable(map(whole_words, texts)):
            counts.update((text.lower() if lower_case else text).split())
        counts.pop(EOS, None)
        return cls("word", [EOS, *(word for word, _ in counts.most_common())])

    @classmethod
    def from_subwords(cls, *texts: Iterable[bytes | str], vocab_size: int) -> "Vocab":
        """Subwords learnt from some texts, see :func:`txl_jax.data.subword.train_tokenizer`."""
        tokenizer = subword.train_tokenizer(itertools.chain(*texts), vocab_size)
        return cls("subword", subword.tokenizer_symbols(tokenizer), tokenizer)

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def unit(self) -> Literal["bpc", "ppl"]:
        """How a mean loss is reported: bits per byte or character, or perplexity per token."""
        return CODECS[self.kind].unit

    @property
    def unknown(self) -> str | None:
        """The symbol that stands for unknown words; ``None`` where there is none."""
        symbol = CODECS[self.kind].unknown
        return symbol if symbol in self.symbols else None

    @property
    def lower_case(self) -> bool:
        """Whether text is put in lower case before it is encoded."""
        return self._codec.lower_case

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint8, uint16 and int32 that holds every id."""
        return self._codec.dtype

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, 1-D, of :attr:`dtype`; DataError for a symbol without an id.

        A line end is ``<eos>`` among words, and ``<S>`` among sentences, with one before all.
        """
        return np.concatenate([np.zeros(0, self.dtype), *self.encode_blocks([text])])

    def encode_blocks(
        self, blocks: Iterable[str | bytes], where: str = "text", end_last_line: bool = False
    ) -> Iterator[np.ndarray]:
        """Arrays of ids of a text in blocks; only one block is in memory at a time.

        ``end_last_line``: a last line of words without an end gets one, as in the authors' code.
        """
        return self._codec.encode_blocks(blocks, where, end_last_line)

    def encode_sentences(
        self, blocks: Iterable[str | bytes], where: str = "text", end_last_line: bool = True
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of ``sentence``: ids as :meth:`encode_blocks`, and the positions of boundaries in them.

        The first array is the ``<S>`` before the first sentence. The text may have a word ``<S>``.
        """
        assert isinstance(self._codec, codecs.SentenceCodec)
        return self._codec.encode_sentences(blocks, where, end_last_line)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of some ids, or DataError; bytes that are not UTF-8 show as U+FFFD."""
        return self._codec.decode(self._checked(ids))

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """The bytes of some ids: of :meth:`decode`, and exactly for ``byte`` and ``subword``."""
        return self._codec.decode_bytes(self._checked(ids))

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``, read again by :meth:`from_json`."""
        plain = {"kind": self.kind, "symbols": self.symbols}
        return plain if self.tokenizer is None else {**plain, "tokenizer": self.tokenizer}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Vocab":
        """The vocabulary that :meth:`to_json` wrote; raises DataError where it is not one."""
        if missing := [key for key in ("kind", "symbols") if key not in stored]:
            raise DataError(f"a stored vocabulary (vocab.json) without {' and '.join(missing)}")
        symbols, tokenizer = stored["symbols"], stored.get("tokenizer")
        if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols):
            raise DataError("the symbols of a stored vocabulary must be a list of texts")
        if not isinstance(tokenizer, dict | None):
            raise DataError("the tokenizer of a stored vocabulary must be an object")
        return cls(stored["kind"], list(symbols), tokenizer)

    @functools.cached_property
    def _codec(self) -> codecs.Codec:
        return CODECS[self.kind](self.kind, self.symbols, self.tokenizer or {})

    def _checked(self, ids: Iterable[int] | np.ndarray) -> np.ndarray:
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        check_ids(array, len(self), "ids")
        return array


def encode_prompt(vocab: Vocab, prompt: str, name: str = "generate.prompt") -> np.ndarray:
    """A prompt's ids, int32; an empty prompt becomes a line end, see :func:`line_end`.

    DataError, beginning with ``name``, for a symbol that the vocabulary does not have.
    """
    try:
        ids = vocab.encode(prompt)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    return (ids if len(ids) else line_end(vocab)).astype(np.int32)


def encode_prompts(vocab: Vocab, prompts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each prompt, see :func:`encode_prompt`; errors name it by its number."""
    if len(prompts) == 1:
        return [encode_prompt(vocab, prompts[0])]
    return [encode_prompt(vocab, text, f"prompt {n}") for n, text in enumerate(prompts, 1)]


def line_end(vocab: Vocab) -> np.ndarray:
    """The id of a line's end, [1]: of ``_`` for letters, of ``<S>`` for sentences; 0 if none."""
    try:
        ids = vocab.encode("\n")
    except DataError:  # characters without a newline
        ids = np.zeros(0, vocab.dtype)
    return ids[-1:] if len(ids) else np.zeros(1, vocab.dtype)
