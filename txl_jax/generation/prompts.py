"""Reads the prompts of a config, or of the file that the config names."""

import functools
import json
import sys
from collections.abc import Sequence

import numpy as np

from txl_jax.config import ConfigError, DataConfig, GenerateConfig
from txl_jax.config.bounds import WORDS
from txl_jax.config.folders import data_folder
from txl_jax.data.sources.source import existing_path
from txl_jax.data.sources.tokens import read_documents
from txl_jax.data.vocab import Text
from txl_jax.files import decode_text
from txl_jax.messages import shown_path
from txl_jax.paths import path as opened_path
from txl_jax.standard_streams import check_stdin

MAX_BYTES = 1 << 30  # largest file of prompts; devices and pipes may be endless


def check_length(c: GenerateConfig) -> None:
    """Raises ConfigError if nothing would be generated."""
    if not c.length:
        raise ConfigError("config key generate.length = 0: no token is generated; give 1 or more")


def read_prompts(c: GenerateConfig) -> Sequence[Text]:
    r"""Reads the prompt or all prompts of ``prompts_file``; a ``.npy`` file has ids.

    A prompt is the text as it is, with its line ends. A line of ``prompts_file`` ends before ``\n``
    or ``\r\n``.

    Raises ConfigError for invalid files, and DataError for invalid arrays.
    """
    path = c.prompts_file or c.prompt_file or ""
    if path.lower().endswith(".npy"):
        found = existing_path(path, data_folder(), "generate.prompt_file")
        ids = read_documents(found, DataConfig(), WORDS)
        return ids if c.prompts_file else [np.concatenate(ids)]
    if c.prompts_file is None:
        return [c.prompt if c.prompt_file is None else _read_text("prompt_file", c.prompt_file)]
    # str.splitlines would also split at form feeds and U+2028, which JSON may contain.
    lines = _read_text("prompts_file", c.prompts_file).removesuffix("\n").split("\n")
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


@functools.cache
def _standard_input() -> bytes:
    """Reads standard input once. Later calls return the same bytes."""
    check_stdin()
    return sys.stdin.buffer.read(MAX_BYTES + 1)


def _parse_prompt(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON ({error}); correct the line") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: is JSON nested too deeply to be a prompt") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(f'{where}: must be a JSON string, or an object with the string "prompt"')
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: character {error.start} of the prompt is the lone surrogate"
            f" {prompt[error.start]!r}, half of a character; write the character or both surrogates"
        ) from error
    return prompt


def _read_text(key: str, path: str) -> str:
    where = f"config key generate.{key} = {shown_path(path)!r}"
    try:
        if path == "-":
            content = _standard_input()
        else:
            with opened_path(path).open("rb") as file:
                content = file.read(MAX_BYTES + 1)
    except OSError as error:
        fix = "name a text file that can be read"
        raise ConfigError(f"{where}: {error.strerror}; {fix}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{where}: has more than {MAX_BYTES:,} bytes; name a shorter file")
    try:
        return decode_text(content)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
