"""The prompts that a config gives or names."""

import functools
import json
import sys

from txl_jax.config import ConfigError, GenerateConfig


def prompts_of(c: GenerateConfig) -> list[str]:
    """Every prompt: one, or those of ``prompts_file``.

    Raises:
      ConfigError: a file cannot be read as UTF-8 text, has no prompt, or a line that is none.
    """
    if c.prompts_file is None:
        return [c.prompt if c.prompt_file is None else _text("prompt_file", c.prompt_file)]
    lines = lines_of(_text("prompts_file", c.prompts_file))
    if c.prompts_file.endswith(".jsonl"):
        numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
        prompts = [_of_json(line, f"{c.prompts_file}, line {n}") for n, line in numbered]
    else:
        prompts = lines
    if not prompts:
        raise ConfigError(
            f"config key generate.prompts_file = {c.prompts_file!r}: has no prompt; write one a"
            " line"
        )
    return prompts


def lines_of(text: str) -> list[str]:
    """The lines of a text as an editor counts them, without their ends.

    ``str.splitlines`` would also cut at form feeds and at U+2028, which JSON may have in a text.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


@functools.cache
def _standard_input() -> str:
    """Read once; who asks again, after a check, has the same."""
    return sys.stdin.buffer.read().decode("utf-8")


def _of_json(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(f'{where}: must be a text, or an object with one as "prompt"')
    return prompt


def _text(key: str, path: str) -> str:
    where = f"config key generate.{key} = {path!r}"
    try:
        if path == "-":
            return _standard_input()
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x});"
            " save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{where}: {error.strerror}; name a file of text that is there"
        ) from error
