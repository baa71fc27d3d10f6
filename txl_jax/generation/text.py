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
    """The prompt's ids; an empty one is a line end, or id 0 where the vocabulary has none.

    Raises:
      DataError: a symbol that the vocabulary does not have.
    """
    if not prompt and vocab.kind == "char" and "\n" not in vocab.symbols:
        return np.zeros(1, np.int32)
    try:
        ids = vocab.encode(prompt or "\n")
    except DataError as error:
        raise DataError(f"generate.prompt: {error}") from error
    return ids.astype(np.int32)


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
