"""What a model reads before it continues or scores a text: the ids of a prompt or a line end."""

from collections.abc import Sequence

import numpy as np

from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab


def encode_prompt(vocab: Vocab, prompt: str, name: str = "generate.prompt") -> np.ndarray:
    """The prompt's ids, at least one: an empty prompt becomes a line end, see :func:`line_end`.

    Raises:
      DataError: a symbol that the vocabulary does not have; the message begins with ``name``.
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
