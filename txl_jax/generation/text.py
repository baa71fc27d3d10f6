"""Encodes prompts as tokens, and decodes the continuations token by token."""

import codecs
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import GenerateConfig
from txl_jax.data.pieces import separator_ends
from txl_jax.data.vocab import Text, Vocab, encode_prompts, separator_ids
from txl_jax.generation.generate import check_generation_memory, generate
from txl_jax.generation.utf8 import free_automaton, utf8_automaton
from txl_jax.messages import fields_repr
from txl_jax.units import in_unit


class Decoder:
    """Decodes, one by one, the tokens that follow ``before``, which has at least one token.

    If ``before`` ends within a character, the first result completes it.
    """

    def __init__(self, vocab: Vocab, before: Sequence[int]):
        self._vocab, self._last, self._new = vocab, list(before[-1:]), list[int]()
        self._utf8: codecs.IncrementalDecoder | None = None
        if vocab.kind in ("byte", "subword"):  # several tokens can form one character
            self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
            self._utf8.decode(vocab.decode_bytes(before))

    def add(self, token: int) -> str:
        """Returns the complete characters that one more token adds. The result may be empty."""
        if self._utf8 is not None:
            return self._utf8.decode(self._vocab.decode_bytes([token]))
        self._new.append(token)
        new = self._text_of_new()
        if new.endswith("\ufffd") and self._vocab.kind == "tokenizer":
            return ""  # the character is not complete yet
        self._last, self._new = self._new, []  # white space depends on the previous token
        return new

    def _text_of_new(self) -> str:
        return self._vocab.decode([*self._last, *self._new])[len(self._vocab.decode(self._last)) :]

    def flush(self) -> str:
        """Returns U+FFFD if the last character is incomplete, otherwise an empty string."""
        return self._text_of_new() if self._utf8 is None else self._utf8.decode(b"", final=True)


@dataclasses.dataclass
class Continuation:
    """A continuation of a prompt, and its text so far.

    Generation ends with the token that completes a stop text. If a token completes several stop
    texts, the one that ends first counts; of two that end at the same character, the longer one
    counts. The text never contains a stop text, and does not depend on the division into tokens and
    chunks.

    Attributes:
      prompt: the prompt's text, without an incomplete character at its end.
      ids: the tokens of the prompt and the continuation.
      sample: the index of this continuation among those of the same prompt, from 0.
      text: complete characters and words, starting with the prompt's incomplete character.
      nll: the negative log-likelihood of each new token under the model's distribution, in nats.
      ended: the reason for the end: ``length``, a stop text (``data.document_separator`` is one),
        ``separator`` for ids, or an empty string before the end.
      separator: the id that ends a document and therefore the continuation, or ``None``.
      mark: the document separator as a text, or an empty string. It is one of the stop texts, and
        can begin in the prompt.
      begun: the longest end of the prompt that is the beginning of ``mark``.
    """

    __repr__ = fields_repr

    prompt: str
    vocab: Vocab
    c: GenerateConfig
    ids: list[int]
    sample: int = 0
    text: str = ""
    nll: list[float] = dataclasses.field(default_factory=list)
    ended: str = ""
    separator: int | None = None
    mark: str = ""
    begun: str = ""

    def __post_init__(self):
        self._decoder = Decoder(self.vocab, self.ids)
        # ``begun``, then the text, then characters that might be the beginning of a stop text
        self._decoded = self.begun

    def add(self, tokens: Sequence[int], nll: Sequence[float]) -> str:
        """Appends tokens until the continuation ends. Returns the new part of the text."""
        for token, loss in zip(tokens, nll, strict=True):
            if self.ended:
                break
            self.ids.append(token)
            self.nll.append(loss)
            self._decode(token)
        held_back = 0  # the number of last characters that might begin a stop text
        if not self.ended:
            beginnings = (stop[:n] for stop in self.c.stop for n in range(1, len(stop)))
            held = (len(start) for start in beginnings if self._decoded.endswith(start))
            held_back = max(held, default=0)
        old, end = self.text, len(self._decoded) - held_back
        self.text = self._decoded[len(self.begun) : end]
        return self.text[len(old) :]

    def _decode(self, token: int) -> None:
        if token == self.separator:
            self.ended = "separator"
            return
        last, before = len(self.nll) >= self.c.length, len(self._decoded)
        self._decoded += self._decoder.add(token)
        if last and not self.c.valid_text:
            self._decoded += self._decoder.flush()
        ends = []  # (end, start, stop text) for each stop text in the new characters
        for stop in self.c.stop:
            is_mark = stop == self.mark
            words = self.vocab.writes_words or (is_mark and self.vocab.kind == "word")
            first = 0 if is_mark else len(self.begun)
            pattern = re.compile(_pattern(stop, words))
            if found := pattern.search(self._decoded, max(first, before - len(stop) + 1)):
                ends.append((found.end(), found.start(), stop))
        if ends:
            _, start, self.ended = min(ends)
            self._decoded = self._decoded[:start]
        elif last:
            self.ended = "length"

    @property
    def loss(self) -> float:
        """The mean negative log-likelihood of the new tokens in nats, or NaN without tokens."""
        return math.fsum(self.nll) / len(self.nll) if self.nll else math.nan

    def to_json(self) -> dict:
        """Returns the record of this continuation for ``samples.jsonl``."""
        unit = self.vocab.unit
        return {
            "prompt": printable(self.prompt),
            "continuation": self.text,
            "sample": self.sample,
            "tokens": len(self.nll),
            "loss": self.loss,
            unit: in_unit(self.loss, unit),
            "ended": self.ended,
        }


def continuations(
    trained: TrainedModel, prompts: Sequence[Text], c: GenerateConfig
) -> Iterator[list[tuple[Continuation, str]]]:
    """Continues prompts (texts or ids). Yields all continuations, each with its newest text.

    It yields after each chunk of new tokens. A continuation does not depend on the other prompts.
    The ``c.samples`` continuations of a prompt are adjacent. Raises DataError if a symbol is not in
    the vocabulary, and ConfigError if the device has too little memory.
    """
    vocab, exp = trained.vocab, dataclasses.replace(trained.config, generate=c)
    check_generation_memory(exp.model, c, len(prompts))
    encoded, separator = encode_prompts(vocab, prompts), exp.data.document_separator
    end, mark = None, separator_ids(vocab, separator)
    if separator and vocab.kind == "id":
        end = int(mark[-1])
    elif separator and len(mark):
        # A word vocabulary can change line ends and capitals, so its tokens give the stop text.
        separator = vocab.decode(mark) if vocab.kind == "word" else separator
        c = dataclasses.replace(c, stop=(*c.stop, separator))
    rows: list[Continuation] = []
    for prompt, ids in zip(prompts, encoded, strict=True):
        first = ids if len(prompt) or not len(mark) else mark[-1:]
        about = prompt_text(vocab, prompt), vocab, c
        more: dict[str, Any] = {"separator": end}
        if separator and end is None and len(mark):
            text = vocab.decode(ids) if len(prompt) else ""
            more = {"mark": separator, "begun": _begun(text, separator, vocab.kind == "word")}
        rows += [Continuation(*about, first.tolist(), n, **more) for n in range(c.samples)]
    grammar = None
    if vocab.kind == "byte":  # with a grammar in both cases, so that they share a program
        grammar = utf8_automaton(vocab) if c.valid_text else free_automaton(vocab)
    whole = [np.array(row.ids, np.int32) for row in rows]
    # Tokens attend to nothing before the last token of the last separator, so it is not read.
    read = [ids[max(separator_ends(ids, mark), default=0) :] for ids in whole]
    samples = [row.sample for row in rows]
    for chunk in generate(trained.config.model, trained.params, read, c, grammar, samples):
        new = zip(rows, chunk.tokens.tolist(), chunk.nll.tolist(), strict=True)
        yield [(row, row.add(tokens, nll)) for row, tokens, nll in new]
        if all(row.ended for row in rows):
            return


def _pattern(text: str, words: bool) -> str:
    """Returns a pattern that finds a text. With ``words``, it finds only whole words."""
    begins, ends = (words and not character.isspace() for character in (text[0], text[-1]))
    return r"(?<!\S)" * begins + re.escape(text) + r"(?!\S)" * ends


def _begun(text: str, separator: str, words: bool) -> str:
    """Returns the longest end of a text that is an incomplete beginning of a separator."""
    rest = re.split(_pattern(separator, words), text)[-1]
    beginnings = (separator[:n] for n in range(len(separator) - 1, 0, -1))
    at_end = lambda start: re.search(_pattern(start, words) + r"\Z", rest)
    return next(filter(at_end, beginnings), "")


def prompt_text(vocab: Vocab, prompt: Text) -> str:
    """Returns the text of a prompt without the bytes of an incomplete last character.

    Other bytes that are not UTF-8 become ``surrogateescape`` characters if the prompt is a text,
    and U+FFFD if the prompt has ids.
    """
    if isinstance(prompt, str):
        raw, errors = prompt.encode("utf-8", "surrogateescape"), "surrogateescape"
    else:
        raw, errors = vocab.decode_bytes(prompt), "replace"
    return codecs.getincrementaldecoder("utf-8")(errors).decode(raw)


def printable(text: str) -> str:
    """Replaces each byte that is not UTF-8 (``surrogateescape``) by U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
