"""Text in, text out: prompts encoded, their continuations decoded as they are made."""

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from txl_jax.config import GenerateConfig
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab
from txl_jax.generation.generate import generate
from txl_jax.generation.utf8 import automaton
from txl_jax.units import in_unit
from txl_jax.workdir import Trained


def encode_prompt(vocab: Vocab, prompt: str, name: str = "generate.prompt") -> np.ndarray:
    """The prompt's ids, at least one: where nothing is in it that has an id, a line end.

    Letters have ``_`` for a line end, and sentences the ``<S>`` that all prompts begin with. A
    vocabulary without any line end gives id 0.

    Raises:
      DataError: a symbol that the vocabulary does not have; ``name`` is the prompt's in it.
    """
    try:
        ids = vocab.encode(prompt)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    return (ids if len(ids) else line_end(vocab)).astype(np.int32)


def encode_prompts(vocab: Vocab, prompts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each prompt, see :func:`encode_prompt`; the error names it by its number."""
    names = (
        ["generate.prompt"]
        if len(prompts) == 1
        else [f"prompt {n + 1}" for n in range(len(prompts))]
    )
    return [encode_prompt(vocab, *pair) for pair in zip(prompts, names, strict=True)]


def line_end(vocab: Vocab) -> np.ndarray:
    """The id of a line's end, [1]; 0 where the vocabulary has none."""
    try:
        ids = vocab.encode("\n")
    except DataError:  # characters without a newline
        ids = np.zeros(0, vocab.dtype)
    return ids[-1:] if len(ids) else np.zeros(1, vocab.dtype)


@dataclasses.dataclass
class Continuation:
    """One continuation, as far as it is made.

    Attributes:
      prompt: the text that is continued.
      text: the continuation; whole characters and words only, and nothing from a stop text on.
      nll: nats of each of its tokens under the model as it is.
      ended: "", or ``length``, or the stop text that ended it.
      sample: its number among those of the prompt.
    """

    prompt: str
    vocab: Vocab
    c: GenerateConfig
    ids: list[int]
    sample: int = 0
    text: str = ""
    nll: list[float] = dataclasses.field(default_factory=list)
    ended: str = ""

    def __post_init__(self):
        self._start = len(self.ids)
        self._shown = self.vocab.decode(self.ids)

    def add(self, tokens: Sequence[int], nll: Sequence[float]) -> str:
        """Takes more tokens in, unless it has ended; what is now known of the text."""
        if self.ended:
            return ""
        self.ids += tokens
        self.nll += nll
        whole = len(self.nll) >= self.c.length
        text = self._decoded(len(self.ids))
        found = [(text.find(stop), stop) for stop in self.c.stop if stop in text]
        if found:
            at, self.ended = min(found)
            text = text[:at]
            self._forget_after(self.ended)
        elif whole:
            self.ended = "length"
        else:
            text = text[: len(text) - _begun(text, self.c.stop)]
        new, self.text = text[len(self.text) :], text
        return new

    def _forget_after(self, stop: str) -> None:
        """Drops the tokens after the first one with which the text has the stop."""
        counts = range(self._start, len(self.ids) + 1)
        has = lambda n: stop in self._decoded(n)
        made = counts[bisect.bisect_left(counts, True, key=has)]
        self.ids, self.nll = self.ids[:made], self.nll[: made - self._start]

    def _decoded(self, n: int) -> str:
        """The continuation that the first n ids are; a character that is half made is left out."""
        text = self.vocab.decode(self.ids[:n])
        if n < len(self.ids) or len(self.nll) < self.c.length or self.c.valid_text:
            text = text.rstrip("\ufffd")
        return text[len(self._shown) :] if text.startswith(self._shown) else self.text

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return math.fsum(self.nll) / len(self.nll) if self.nll else math.nan

    def to_json(self) -> dict:
        """What is written of it."""
        unit = self.vocab.unit
        return {
            "prompt": self.prompt,
            "continuation": self.text,
            "sample": self.sample,
            "tokens": len(self.nll),
            "loss": self.loss,
            unit: in_unit(self.loss, unit),
            "ended": self.ended,
        }


def continuations(
    trained: Trained, prompts: Sequence[str], c: GenerateConfig
) -> Iterator[list[tuple[Continuation, str]]]:
    """Continues prompts together; at each step every one, with what came to its text.

    Each is what it would be alone, with the same seed. ``c.samples`` of each prompt are made, one
    after another in the list. It ends when all have ended.

    Raises:
      DataError: a prompt has a symbol that the vocabulary does not have.
    """
    vocab = trained.vocab
    rows: list[Continuation] = []
    for prompt, start in zip(prompts, encode_prompts(vocab, prompts), strict=True):
        rows += [Continuation(prompt, vocab, c, start.tolist(), n) for n in range(c.samples)]
    grammar = automaton(vocab) if c.valid_text and vocab.kind == "byte" else None
    ids = [np.array(row.ids, np.int32) for row in rows]
    numbers = [row.sample for row in rows]
    made = generate(trained.config.model, trained.params, ids, c, grammar, numbers)
    for tokens, nll in made:
        pairs = zip(rows, tokens.tolist(), nll.tolist(), strict=True)
        yield [(row, row.add(more, lost)) for row, more, lost in pairs]
        if all(row.ended for row in rows):
            return


def _begun(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop text."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[len(text) - n :]) for stop in stops):
            return n
    return 0
