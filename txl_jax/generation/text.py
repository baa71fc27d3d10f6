"""Text in, text out: prompts encoded, their continuations decoded as they are made."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import GenerateConfig
from txl_jax.data.prompt_ids import encode_prompts
from txl_jax.data.vocab import Vocab
from txl_jax.generation.decoder import Decoder, printable, whole_characters
from txl_jax.generation.generate import generate
from txl_jax.generation.utf8 import automaton
from txl_jax.model.footprint import of_generating
from txl_jax.parallel.device_memory import check_memory
from txl_jax.units import in_unit


@dataclasses.dataclass
class Continuation:
    """One continuation, as far as it is made.

    It ends with the token that completes a stop text. Of several stop texts the one that ends
    first in the text counts; of two that end at the same character, the longer one. So neither
    the tokens nor the sizes of the pieces that they come in change the result, and the text never
    contains a stop text.

    Attributes:
      prompt: the text that is continued, without an incomplete character at its end.
      text: the continuation; whole characters and words only, and nothing from a stop text on.
        It starts with the character that the prompt left incomplete.
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
        self._decoder = Decoder(self.vocab, self.ids)
        self._decoded = ""  # the text, and what is held back as a possible start of a stop text

    def add(self, tokens: Sequence[int], nll: Sequence[float]) -> str:
        """Takes more tokens, unless it has ended; returns the new part of the text."""
        for token, lost in zip(tokens, nll, strict=True):
            if self.ended:
                break
            self.ids.append(token)
            self.nll.append(lost)
            self._add_text(token)
        held_back = 0 if self.ended else _begun(self._decoded, self.c.stop)
        shown = self._decoded[: len(self._decoded) - held_back]
        new, self.text = shown[len(self.text) :], shown
        return new

    def _add_text(self, token: int) -> None:
        """Decodes a token; ends the continuation where it completes a stop text, or is the last."""
        last = len(self.nll) >= self.c.length
        before = len(self._decoded)
        self._decoded += self._decoder.add(token)
        if last and not self.c.valid_text:
            self._decoded += self._decoder.rest()
        found = _first_stop(self._decoded, before, self.c.stop)
        if found is not None:
            start, self.ended = found
            self._decoded = self._decoded[:start]
        elif last:
            self.ended = "length"

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return math.fsum(self.nll) / len(self.nll) if self.nll else math.nan

    def to_json(self) -> dict:
        """What is written of it."""
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
    trained: TrainedModel, prompts: Sequence[str], c: GenerateConfig
) -> Iterator[list[tuple[Continuation, str]]]:
    """Continues prompts together; at each step every one, with what came to its text.

    Each is what it would be alone, with the same seed. ``c.samples`` of each prompt are made, one
    after another in the list. It ends when all have ended.

    Raises:
      DataError: a prompt has a symbol that the vocabulary does not have.
      ConfigError: the memory of so many texts does not fit the device.
    """
    vocab, exp = trained.vocab, dataclasses.replace(trained.config, generate=c)
    check_memory("generation", of_generating(exp.model, c, len(prompts)), exp)
    rows: list[Continuation] = []
    for prompt, start in zip(prompts, encode_prompts(vocab, prompts), strict=True):
        whole = whole_characters(prompt)
        rows += [Continuation(whole, vocab, c, start.tolist(), n) for n in range(c.samples)]
    grammar = automaton(vocab) if c.valid_text and vocab.kind == "byte" else None
    ids = [np.array(row.ids, np.int32) for row in rows]
    numbers = [row.sample for row in rows]
    made = generate(trained.config.model, trained.params, ids, c, grammar, numbers)
    for tokens, nll in made:
        pairs = zip(rows, tokens.tolist(), nll.tolist(), strict=True)
        yield [(row, row.add(more, lost)) for row, more, lost in pairs]
        if all(row.ended for row in rows):
            return


def _first_stop(text: str, known: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where a stop text starts, and which: of those in the text the one that ends first.

    Only matches that end after the first ``known`` characters are looked for.
    """
    found = []
    for stop in stops:
        start = text.find(stop, max(0, known - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), start, stop))
    return min(found)[1:] if found else None


def _begun(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop text."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[len(text) - n :]) for stop in stops):
            return n
    return 0
