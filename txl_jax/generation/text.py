"""Text in, text out: the prompt encoded, its continuation decoded as it is made."""

from collections.abc import Iterator

import numpy as np

from txl_jax.config import ConfigError, GenerateConfig
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab
from txl_jax.generation.generate import generate
from txl_jax.workdir import Trained


def prompt_of(c: GenerateConfig) -> str:
    """The prompt that the config gives or names.

    Raises:
      ConfigError: its file cannot be read as UTF-8 text.
    """
    if c.prompt_file is None:
        return c.prompt
    try:
        with open(c.prompt_file, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config key generate.prompt_file = {c.prompt_file!r}: {error}") from (
            error
        )


def encode_prompt(vocab: Vocab, prompt: str) -> np.ndarray:
    """The prompt's ids, at least one: where nothing is in it that has an id, a line end.

    Letters have ``_`` for a line end, and sentences the ``<S>`` that all prompts begin with. A
    vocabulary without any line end gives id 0.

    Raises:
      DataError: a symbol that the vocabulary does not have.
    """
    try:
        ids = vocab.encode(prompt)
    except DataError as error:
        raise DataError(f"generate.prompt: {error}") from error
    return (ids if len(ids) else _line_end(vocab)).astype(np.int32)


def _line_end(vocab: Vocab) -> np.ndarray:
    try:
        ids = vocab.encode("\n")
    except DataError:  # characters without a newline
        ids = np.zeros(0, vocab.dtype)
    return ids if len(ids) else np.zeros(1, vocab.dtype)


def continue_text(trained: Trained, c: GenerateConfig) -> Iterator[str]:
    """Pieces of the continuation of the config's prompt; whole characters and words only."""
    prompt = encode_prompt(trained.vocab, prompt_of(c))
    ids, shown = prompt.tolist(), trained.vocab.decode(prompt)
    whole_length = len(ids) + c.length
    for piece in generate(trained.config.model, trained.params, [prompt], c):
        ids += piece[0].tolist()
        text = trained.vocab.decode(ids)
        if len(ids) < whole_length:  # a character may be half made
            text = text.rstrip("\ufffd")
        if text.startswith(shown):
            yield text[len(shown) :]
            shown = text
