"""The result of generating text in Python."""

import dataclasses

import numpy as np

from txl_jax.messages import fields_repr, short_repr


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """A continuation of a prompt.

    Attributes:
      text: the prompt and the continuation. ``str()`` gives this text.
      continuation: the new text alone.
      prompt: the text of the prompt.
      sample: the index of this continuation among the samples of the prompt, from 0.
      ids: the tokens of the prompt and the continuation, int32 [n].
      nll: the negative log-likelihood of each new token in nats at temperature 1, float32.
      loss: the mean of ``nll``, or NaN without new tokens.
      ended: the reason for the end: ``length``, the stop text, or ``separator`` (a model of ids
        generated the id that ends a document).
    """

    text: str
    continuation: str
    prompt: str
    sample: int
    ids: np.ndarray
    nll: np.ndarray
    loss: float
    ended: str

    __repr__ = fields_repr

    def __str__(self) -> str:
        return self.text


class Generation(tuple[Generated, ...]):
    """The continuations in the order of the prompts. The samples of one prompt are adjacent."""

    @property
    def text(self) -> str:
        """The texts of all continuations, joined by newlines. ``str()`` returns the same text."""
        return "\n".join(one.text for one in self)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Generation({len(self)} continuations: {short_repr(self.text)})"
