"""What a token is: bytes, characters or words, with one id each."""

import codecs
import collections
import dataclasses
import functools
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np

from txl_jax.data.errors import DataError

Kind = Literal["byte", "char", "word"]

EOS = "<eos>"
"""The symbol of a line's end in a word vocabulary; always id 0."""
UNK = "<unk>"
"""The symbol that stands for unknown words, where the counted text itself has it."""


@dataclasses.dataclass(frozen=True)
class Vocab:
    """Text to ids and back.

    Attributes:
      kind: ``byte``: the value of the byte is its id, always 256 symbols. ``char``: Unicode
        characters. ``word``: what stands between white space, and ``<eos>`` at each line's end.
      symbols: in id order. Of a byte vocabulary the values as decimal strings, the form in which
        the authors wrote the bytes of enwik8.
    """

    kind: Kind
    symbols: list[str]

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            raise DataError(f"vocabulary kind {self.kind!r}: must be 'byte', 'char' or 'word'")
        if self.kind == "byte" and len(self.symbols) != 256:
            raise DataError(f"a byte vocabulary has 256 symbols, not {len(self.symbols)}")
        if len(set(self.symbols)) != len(self.symbols):
            twice = collections.Counter(self.symbols).most_common(1)[0][0]
            raise DataError(f"{self.kind} vocabulary: the symbol {twice!r} stands in it twice")
        if self.kind == "word" and EOS not in self.symbols:
            raise DataError(f"a word vocabulary must have the symbol {EOS}")
        if self.kind == "char" and any(len(symbol) != 1 for symbol in self.symbols):
            raise DataError("a char vocabulary's symbols must be single characters")

    @classmethod
    def of_bytes(cls) -> "Vocab":
        """The byte vocabulary; there is only one."""
        return cls("byte", [str(value) for value in range(256)])

    @classmethod
    def of_chars(cls, blocks: Iterable[bytes | str]) -> "Vocab":
        """The sorted characters of a text, given in blocks cut anywhere."""
        seen: set[str] = set()
        for text in _decoded(blocks):
            seen.update(text)
        return cls("char", sorted(seen))

    @classmethod
    def of_words(cls, *texts: Iterable[bytes | str]) -> "Vocab":
        """The words of some texts by falling frequency, ``<eos>`` first.

        Words of equal frequency stand as they first appear. This is the authors' order, so
        adaptive cutoffs mean the same words.

        Args:
          *texts: each one in blocks cut anywhere.
        """
        counts: collections.Counter[str] = collections.Counter()
        for blocks in texts:
            for text in _whole_words(blocks):
                counts.update(text.split())
        counts.pop(EOS, None)
        return cls("word", [EOS, *(word for word, _ in counts.most_common())])

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def unit(self) -> Literal["bpc", "ppl"]:
        """How a mean loss is reported: bits per byte or character, or perplexity per word."""
        return "ppl" if self.kind == "word" else "bpc"

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
        without one, such as a prompt, gets none.

        Raises:
          DataError: a symbol that is not in the vocabulary (a word only where the vocabulary has
            no ``<unk>``), or bytes that are not UTF-8 for ``char`` and ``word``.
        """
        return np.concatenate([np.zeros(0, self.dtype), *self.encode_blocks([text])])

    def encode_blocks(
        self, blocks: Iterable[str | bytes], where: str = "text", end_last_line: bool = False
    ) -> Iterator[np.ndarray]:
        """Arrays of ids, to be read one after another; only one block is in memory at a time.

        Args:
          blocks: the text, cut anywhere (inside of a word or of a character too).
          where: the name of the text for errors.
          end_last_line: ``word`` only: a last line without a line end gets ``<eos>`` too, as
            the authors do with files.
        """
        if self.kind == "byte":
            return self._encode_bytes(blocks)
        if self.kind == "char":
            return self._encode_chars(blocks, where)
        return self._encode_words(blocks, where, end_last_line)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of some ids. Bytes that are not UTF-8 show as U+FFFD; words are joined with
        a space, ``<eos>`` becomes a line end.

        Raises:
          DataError: an id that is not in the vocabulary.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        check_ids(array, len(self), "ids")
        if self.kind == "byte":
            return array.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        if self.kind == "char":
            return "".join(self.symbols[i] for i in array)
        words = (self.symbols[i] for i in array)
        text = "".join("\n" if word == EOS else word + " " for word in words)
        return text.replace(" \n", "\n").removesuffix(" ")

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``, read again by :meth:`from_json`."""
        return {"kind": self.kind, "symbols": self.symbols}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Vocab":
        """The vocabulary that :meth:`to_json` wrote."""
        return cls(stored["kind"], list(stored["symbols"]))

    # ----------------------------------------------------------------------------------

    def _encode_bytes(self, blocks: Iterable[str | bytes]) -> Iterator[np.ndarray]:
        for block in blocks:
            # surrogateescape: bytes of a command line that were not UTF-8 come back as they were
            raw = block.encode("utf-8", "surrogateescape") if isinstance(block, str) else block
            yield np.frombuffer(raw, np.uint8)

    def _encode_chars(self, blocks: Iterable[str | bytes], where: str) -> Iterator[np.ndarray]:
        position, line = 0, 1
        for text in _decoded(blocks, where):
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
        id_of, unknown, line = self._id_of_word, self._id_of_word.get(UNK), 1
        for text in _whole_words(blocks, where, end_last_line):
            ids = [id_of.get(word, unknown) for word in text.replace("\n", f" {EOS} ").split()]
            if unknown is None and None in ids:
                self._refuse_word(text, where, line)
            yield np.array(ids, self.dtype)
            line += text.count("\n")

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
        return {symbol: i for i, symbol in enumerate(self.symbols)}

    @functools.cached_property
    def _id_of_code(self) -> np.ndarray:
        """int32, one entry for each Unicode code point: its id, or -1."""
        table = np.full(0x110000, -1, np.int32)
        table[[ord(symbol) for symbol in self.symbols]] = np.arange(len(self))
        return table


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


def _decoded(blocks: Iterable[bytes | str], where: str = "text") -> Iterator[str]:
    """The same blocks as text; a character cut by a block's end comes with the next block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    for block in blocks:
        if isinstance(block, str):
            yield block
            continue
        kept = len(decoder.getstate()[0])
        yield _decode(decoder, block, False, read - kept, where)
        read += len(block)
    _decode(decoder, b"", True, read - len(decoder.getstate()[0]), where)


def _decode(
    decoder: codecs.IncrementalDecoder, block: bytes, final: bool, start: int, where: str
) -> str:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}, byte {start + error.start}: not UTF-8 ({error.reason}); convert the text"
            " to UTF-8, or use vocab='byte', which takes any bytes"
        ) from None


def _whole_words(
    blocks: Iterable[bytes | str], where: str = "text", end_last_line: bool = False
) -> Iterator[str]:
    """The text in pieces that never end inside of a word.

    Line ends are ``\\n``, ``\\r\\n`` and ``\\r`` alike, as for a text file in Python.
    """
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    kept, last = "", "\n"
    for block in _decoded(blocks, where):
        text = newlines.decode(block)
        cut = max(text.rfind(" "), text.rfind("\n")) + 1
        if cut:
            yield kept + text[:cut]
            kept, last = "", text[cut - 1]
        kept += text[cut:]
    kept += newlines.decode("", final=True)
    if end_last_line and (kept or last)[-1] != "\n":
        kept += "\n"
    if kept:
        yield kept


def check_utf8(blocks: Iterable[bytes], where: str) -> None:
    """Raises DataError, naming the byte offset, where the blocks together are not UTF-8."""
    for _ in _decoded(blocks, where):
        pass
