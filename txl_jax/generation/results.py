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
      sample: the number of this continuation among the samples of the prompt.
      ids: the tokens of the prompt and the continuation, int32 [n].
      nll: the negative log-likelihood of each new token in nats at temperature 1, float32.
      loss: the mean of ``nll``, or NaN without new tokens.
      ended: the reason for the end: ``length``, the stop text, or ``separator`` (of texts).
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
    """The continuations of all prompts and samples in order, those of one prompt side by side."""

    @property
    def text(self) -> str:
        """The texts of all continuations, joined by newlines. ``str()`` gives it too."""
        return "\n".join(one.text for one in self)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Generation({len(self)} continuations: {short_repr(self.text)})"
