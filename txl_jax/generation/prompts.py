"""Reads the prompts of a config, or of the file that the config names."""

import functools
from collections.abc import Sequence

import numpy as np

from txl_jax.config import ConfigError, DataConfig, GenerateConfig
from txl_jax.config.bounds import WORDS
from txl_jax.config.folders import data_folder
from txl_jax.data.sources.source import existing_path
from txl_jax.data.sources.tokens import read_documents
from txl_jax.data.vocab import Text
from txl_jax.evaluation.any_text import read_text
from txl_jax.files import parse_json
from txl_jax.messages import shown_path


def check_length(c: GenerateConfig) -> None:
    """Raises ConfigError if nothing would be generated."""
    if not c.length:
        raise ConfigError("config key generate.length = 0: no token is generated; give 1 or more")


def read_prompts(c: GenerateConfig) -> Sequence[Text]:
    r"""Reads the single prompt, or all prompts of ``prompts_file``. A ``.npy`` file has ids.

    A single prompt is the unchanged text with its line ends. In ``prompts_file``, each line is a
    prompt without its line end, ``\n`` or ``\r\n``.

    Raises ConfigError for invalid files, and DataError for invalid arrays.
    """
    path = c.prompts_file or c.prompt_file or ""
    if path.lower().endswith(".npy"):
        found = existing_path(path, data_folder(), "generate.prompt_file")
        ids = read_documents(found, DataConfig(), WORDS)
        return ids if c.prompts_file else [np.concatenate(ids)]
    if c.prompts_file is None:
        return [c.prompt if c.prompt_file is None else _read("prompt_file", c.prompt_file)]
    # str.splitlines would also split at form feeds and U+2028, which JSON may contain.
    lines = _read("prompts_file", c.prompts_file).removesuffix("\n").split("\n")
    prompts = [line.removesuffix("\r") for line in lines]
    if c.prompts_file.lower().endswith(".jsonl"):
        numbered = [(n, line) for n, line in enumerate(prompts, 1) if line.strip()]
        prompts = [_parse_prompt(line, f"{shown_path(path)}, line {n}") for n, line in numbered]
    elif prompts == [""]:
        prompts = []
    if not prompts:
        raise ConfigError(
            f"config key generate.prompts_file = {shown_path(path)!r}: has no prompt; write one per"
            " line"
        )
    return prompts


def prompt_key(c: GenerateConfig) -> str:
    """Returns the key of the setting that :func:`read_prompts` reads."""
    files = [key for key in ("prompts_file", "prompt_file") if getattr(c, key) is not None]
    return f"generate.{files[0] if files else 'prompt'}"


_standard_input = functools.cache(read_text)
"""Reads standard input once, because the check of the prompts and generation both need its text."""


def _read(key: str, path: str) -> str:
    read = _standard_input if path == "-" else read_text
    return read(f"generate.{key}", path, binary=True)  # a prompt can have control characters


def _parse_prompt(line: str, where: str) -> str:
    try:
        value = parse_json(line.encode())
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str):
            raise ValueError('must be a JSON string, or an object with the string "prompt"')
        prompt.encode()  # fails for half of a surrogate pair
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; correct the line") from error
    return prompt
