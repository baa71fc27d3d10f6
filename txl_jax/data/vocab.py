"""Defines vocabularies, which give each symbol of a text an id.

Bytes, letters and words that this module counts get their ids in the order of the authors' code: by
decreasing frequency, and then by first occurrence. Ids and adaptive cutoffs are therefore the same
as in that code, and its models can be converted.
"""

import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import os
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from txl_jax.config.folders import expanded_text
from txl_jax.data import codecs, tokenizer
from txl_jax.data.codecs import NEWLINE, as_letters, bytes_by_frequency, decode_utf8, whole_words
from txl_jax.data.errors import DataError
from txl_jax.data.symbols import BOUNDARY, BYTES, EOS, SENTENCE_UNK, SPACE, Kind, check_ids
from txl_jax.files import decode_text
from txl_jax.messages import short_repr
from txl_jax.units import Unit

CODECS: dict[Kind, type[codecs.Codec]] = {
    "byte": codecs.ByteCodec,
    "char": codecs.CharCodec,
    "letter": codecs.LetterCodec,
    "word": codecs.WordCodec,
    "sentence": codecs.SentenceCodec,
    "subword": tokenizer.SubwordCodec,
    "tokenizer": tokenizer.TokenizerCodec,
    "id": codecs.IdCodec,
}


@dataclasses.dataclass(frozen=True)
class Vocab:
    """A vocabulary, which encodes text to ids and decodes ids to text.

    Attributes:
      kind: the way in which text is cut into symbols, see the classes in :data:`CODECS`.
      symbols: the symbols in the order of their ids.
      tokenizer: the content of a ``tokenizer.json`` for the kinds ``subword`` and ``tokenizer``
        (data/tokenizer.py); ``None`` for other kinds.
    """

    kind: Kind
    symbols: list[str]
    tokenizer: Mapping[str, Any] | None = None

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            kinds = ", ".join(map(repr, get_args(Kind)))
            raise DataError(f"vocabulary kind {self.kind!r}: must be one of {kinds}")
        if not self.symbols:
            raise DataError(f"a {self.kind} vocabulary must have at least one symbol")
        symbol, times = collections.Counter(self.symbols).most_common(1)[0]
        if times > 1:
            raise DataError(f"{self.kind} vocabulary: the symbol {symbol!r} occurs {times} times")
        _ = self._codec  # its constructor checks the symbols

    @classmethod
    def from_symbols(cls, symbols: Iterable[str]) -> "Vocab":
        """Returns a vocabulary with the ``symbols`` of another program's model; infers its kind.

        The kind is letter, char, byte, sentence or word.
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
        """Returns the vocabulary of all 256 bytes, where the id of a byte is its value."""
        return cls("byte", list(BYTES))

    @classmethod
    def from_counted_bytes(cls, *texts: Iterable[bytes], newline: bool = True) -> "Vocab":
        """Returns a vocabulary of the bytes that occur in ``texts``, which are read in blocks.

        ``newline=False`` leaves the newline byte out of the vocabulary.
        """
        values = bytes_by_frequency(itertools.chain(*texts))
        return cls("byte", [str(value) for value in values if newline or value != NEWLINE])

    @classmethod
    def from_letters(cls, *texts: Iterable[bytes]) -> "Vocab":
        """Returns a vocabulary of the letters that occur in ``texts``, which are read in blocks.

        Raises DataError for a character that is not ASCII, and for NUL.
        """
        values = bytes_by_frequency(map(as_letters, itertools.chain(*texts)))
        if wrong := [value for value in values if not 0 < value < 128]:
            fault = f"the text has the byte {wrong[0]}, and a letter vocabulary only ASCII"
            raise DataError(f"{fault}; use data.name='text' with data.vocab='char' for other text")
        return cls("letter", list(map(chr, values)))

    @classmethod
    def from_lines(cls, path: str | os.PathLike) -> "Vocab":
        """Returns a sentence vocabulary from a file; the first word of each line is a symbol.

        Raises DataError if the file cannot be used, for example because a line is empty.
        """
        path = expanded_text(path, "path")
        try:
            text = io.StringIO(decode_text(Path(path).read_bytes()), newline=None)
            lines = [line.split(maxsplit=1) for line in text]
            if [] in lines:
                raise DataError(f"line {lines.index([]) + 1} has no symbol; write one there")
            return cls("sentence", list(dict.fromkeys(fields[0] for fields in lines)))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error

    @classmethod
    def from_chars(cls, blocks: Iterable[bytes | str]) -> "Vocab":
        """Returns a vocabulary of the characters in a text's blocks, sorted by code point."""
        return cls("char", sorted(set(itertools.chain.from_iterable(decode_utf8(blocks)))))

    @classmethod
    def from_words(cls, *texts: Iterable[bytes | str], lower_case: bool = False) -> "Vocab":
        """Returns a vocabulary of the words in ``texts``, read in blocks; id 0 is ``<eos>``."""
        counts: collections.Counter[str] = collections.Counter()
        for text in itertools.chain.from_iterable(map(whole_words, texts)):
            counts.update((text.lower() if lower_case else text).split())
        counts.pop(EOS, None)
        return cls("word", [EOS, *(word for word, _ in counts.most_common())])

    @classmethod
    def from_ids(cls, size: int, symbols: Sequence[str] | None = None) -> "Vocab":
        """Returns a vocabulary of ``size`` ids, which are written as ``symbols`` or as numbers."""
        return cls("id", list(map(str, range(size)) if symbols is None else symbols))

    @classmethod
    def from_tokenizer(cls, path: str | os.PathLike) -> "Vocab":
        """Returns the vocabulary of a ``tokenizer.json``; raises DataError for any other file."""
        return cls("tokenizer", *tokenizer.read_tokenizer(Path(expanded_text(path, "path"))))

    @classmethod
    def from_subwords(cls, *texts: Iterable[bytes | str], vocab_size: int) -> "Vocab":
        """Learns subwords from some texts, see :func:`txl_jax.data.tokenizer.train_tokenizer`."""
        learnt = tokenizer.train_tokenizer(decode_utf8(itertools.chain(*texts)), vocab_size)
        return cls("subword", tokenizer.tokenizer_symbols(learnt), learnt)

    def __len__(self) -> int:
        return len(self.symbols)

    def __repr__(self) -> str:
        return f"Vocab({self.kind!r}, {len(self):,} symbols)"

    @property
    def unit(self) -> Unit:
        """The unit for reporting a mean loss: bits per byte or character, or perplexity."""
        return self._codec.unit

    @property
    def unknown(self) -> str | None:
        """The symbol of unknown words, or ``None`` if the vocabulary has no such symbol."""
        symbol = self._codec.unknown
        return symbol if symbol in self.symbols else None

    @property
    def lower_case(self) -> bool:
        """Whether text is converted to lower case before it is encoded."""
        return self._codec.lower_case

    @property
    def writes_words(self) -> bool:
        """Whether decoded text has the user's own ids as words with spaces, such as ``C4 17``."""
        return isinstance(self._codec, codecs.IdCodec) and not self._codec.is_text

    @property
    def keeps_line_ends(self) -> bool:
        """Whether a carriage return is encoded, and not read as white space or a line end."""
        return self.kind in ("byte", "char", "subword", "tokenizer")

    @property
    def dtype(self) -> np.dtype:
        """The smallest dtype of uint8, uint16 and int32 that can represent every id."""
        return self._codec.dtype

    def encode(self, text: str | bytes) -> np.ndarray:
        """Encodes a text as 1-D ids of :attr:`dtype`; raises DataError for a symbol without an id.

        A line end becomes ``<eos>`` for words, and ``<S>`` for sentences. For sentences, the ids
        also begin with ``<S>``.
        """
        if not isinstance(text, str | bytes):
            raise DataError(f"{short_repr(text)}: must be a text, not {_kind_of(text)}")
        return np.concatenate([np.zeros(0, self.dtype), *self.encode_blocks([text])])

    def encode_blocks(
        self, blocks: Iterable[str | bytes], where: str = "text", end_last_line: bool = False
    ) -> Iterator[np.ndarray]:
        """Yields the ids of a text in arrays; only one block of the text is in memory at a time.

        ``where`` names the text in errors. If the last line of a text of words lacks a line end,
        ``end_last_line`` adds one, as the authors' code does.
        """
        return self._codec.encode_blocks(blocks, where, end_last_line)

    def encode_sentences(
        self, blocks: Iterable[str | bytes], where: str = "text", end_last_line: bool = True
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields arrays of ids, each with the positions of the boundaries ``<S>`` in the array.

        The first array has only the ``<S>`` before the first sentence. A word ``<S>`` in the text
        itself does not count as a boundary.
        """
        assert isinstance(self._codec, codecs.SentenceCodec)
        return self._codec.encode_sentences(blocks, where, end_last_line)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decodes ids to text, with U+FFFD for bytes that are not UTF-8, or raises DataError."""
        return self._codec.decode(self.checked(ids))

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """Decodes ids to bytes: exactly for ``byte`` and ``subword``, else to UTF-8 of the text."""
        return self._codec.decode_bytes(self.checked(ids))

    def checked(self, ids: Iterable[int] | np.ndarray) -> np.ndarray:
        """Returns ids as int32 [n]; raises DataError unless they are 1-D ids of this vocabulary."""
        if (array := _ids(ids)) is None:
            dtype, shape = getattr(ids, "dtype", None), getattr(ids, "shape", ())
            found = f"{dtype} of shape {list(shape)}" if dtype else short_repr(ids)
            raise DataError(f"ids must be 1-D integers, not {found}")
        check_ids("ids", array, len(self))
        return array.astype(np.int32, copy=False)

    def to_json(self) -> dict[str, Any]:
        """Returns a dict for ``json.dump``, which :meth:`from_json` reads."""
        plain = {"kind": self.kind, "symbols": self.symbols}
        return plain if self.tokenizer is None else {**plain, "tokenizer": self.tokenizer}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Vocab":
        """Returns the vocabulary that :meth:`to_json` wrote; raises DataError for other content."""
        kind: Any = stored.get("kind")
        symbols, own = stored.get("symbols"), stored.get("tokenizer")
        if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols):
            raise DataError("a stored vocabulary (vocab.json) must have symbols, a list of texts")
        if not isinstance(own, dict | None):
            raise DataError("the tokenizer of a stored vocabulary must be an object")
        return cls(kind, list(symbols), own)

    @functools.cached_property
    def _codec(self) -> codecs.Codec:
        return CODECS[self.kind](self.kind, self.symbols, self.tokenizer or {})


Text = str | np.ndarray
"""A text, or its ids, which are integers [n]."""


def texts_of(value: Any, name: str) -> list[Text]:
    """Returns one text, or several, as a list; each text can be a string, bytes or ids.

    An array or a list of integers is one text. Bytes become a string, in which a byte that is not
    UTF-8 is a surrogate (``surrogateescape``).
    Raises DataError, with ``name`` and the type, for any other value.
    """
    if isinstance(value, Iterator):
        value = list(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "USO" and value.ndim == 1:
        value = value.tolist()  # an array of texts is treated as a list of texts
    if not isinstance(value, list | tuple | range) or (value and _ids(value) is not None):
        return [_text_of(value, name)]
    if not value:
        fix = "give a text, the ids of a text, or a list of texts"
        raise DataError(f"{name} = {value!r}: has no text; {fix}")
    return [_text_of(one, f"{name} {n} of {len(value)}") for n, one in enumerate(value, 1)]


def _text_of(value: Any, name: str) -> Text:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        without_mark = bytes(value).removeprefix("\ufeff".encode())  # reading a file drops it too
        return without_mark.decode("utf-8", "surrogateescape")
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return np.asarray(value)
    if isinstance(value, list | tuple | range) and (ids := _ids(value)) is not None:
        return ids.astype(np.int64)
    fix = "; read the file first" if isinstance(value, os.PathLike) else ""
    rule = f"must be a text, bytes or ids (1-D integers), not {_kind_of(value)}{fix}"
    raise DataError(f"{name} = {short_repr(value)}: {rule}")


def _ids(value: Any) -> np.ndarray | None:
    """Returns integers of Python, NumPy or JAX as an array [n], or ``None`` for anything else."""
    try:
        if not hasattr(value, "dtype"):
            value = list(value)
            if any(isinstance(one, str | bytes) for one in value):  # NumPy would pad short ones
                return None
        array = np.asarray(value if len(value) else np.zeros(0, int))
    except (TypeError, ValueError):  # not a sequence, or lists of different lengths
        return None
    return array if array.ndim == 1 and array.dtype.kind in "iu" else None


def _kind_of(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def encode_text(vocab: Vocab, text: Text, name: str) -> np.ndarray:
    """Returns the ids of a text, or checks ids that are given. Errors call the text ``name``."""
    try:
        if isinstance(text, str):
            check_text(vocab, text)
        return vocab.encode(text) if isinstance(text, str) else vocab.checked(text)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def check_text(vocab: Vocab, text: str) -> None:
    """Raises DataError for text in another encoding than UTF-8, except for a byte vocabulary."""
    if vocab.kind != "byte":
        collections.deque(decode_utf8([text]), maxlen=0)


def encode_prompts(
    vocab: Vocab, prompts: Sequence[Text], key: str = "generate.prompt"
) -> list[np.ndarray]:
    """Encodes each prompt as int32 ids; an empty prompt becomes a line end, see :func:`line_end`.

    Raises DataError for a symbol or an id that the vocabulary does not have. The error names the
    number of the prompt, or, if there is only one prompt, the setting ``key``.
    """
    name = lambda n: key if len(prompts) == 1 else f"prompt {n}"
    encoded = [encode_text(vocab, text, name(n)) for n, text in enumerate(prompts, 1)]
    return [(ids if len(ids) else line_end(vocab)).astype(np.int32) for ids in encoded]


def separator_ids(vocab: Vocab, separator: str | None) -> np.ndarray:
    """Returns the ids of ``data.document_separator``, integers [k]; k is 0 for ``None``."""
    if separator is None:
        return np.zeros(0, vocab.dtype)
    if vocab.kind == "id" and separator in vocab.symbols:  # it may have white space in it
        return np.array([vocab.symbols.index(separator)], vocab.dtype)
    words = separator.lower() if vocab.lower_case else separator
    if vocab.kind == "word" and not set(words.split()) <= set(vocab.symbols):
        fix = "write it between spaces or lines in the text, or give one of known words"
        fault = "has a word that is not in the vocabulary"
        raise DataError(f"data.document_separator = {separator!r}: {fault}; {fix}")
    return encode_text(vocab, separator, "data.document_separator")


def line_end(vocab: Vocab) -> np.ndarray:
    """Returns the id of the token for a line end, [1], or 0 if there is no such token.

    The token is ``<eos>`` for words, ``_`` for letters and ``<S>`` for sentences.
    """
    with contextlib.suppress(DataError):  # characters without a newline
        if len(ids := vocab.encode("\n")):
            return ids[-1:]
    return np.zeros(1, vocab.dtype)
