"""What a model reads before it continues or scores a text: the ids of a prompt or a line end."""

from collections.abc import Sequence

import numpy as np

from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab


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
