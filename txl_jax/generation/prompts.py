"""The prompts that a config gives or names."""

import errno
import functools
import io
import json
import sys

from txl_jax.config import ConfigError, GenerateConfig

MOST_BYTES = 1 << 30
"""Of a file of prompts; it ends the reading of devices and pipes that have no end."""


def prompts_of(c: GenerateConfig) -> list[str]:
    """Every prompt: one, or those of ``prompts_file``. A file's byte-order mark is left out.

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
def _standard_input() -> bytes:
    """Standard input; it is read once, and later calls give the same."""
    if sys.stdin is None:
        raise OSError(errno.EBADF, "standard input is closed")
    return sys.stdin.buffer.read(MOST_BYTES + 1)


def _of_json(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: is JSON nested too deeply to be a prompt") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(f'{where}: must be a text, or an object with one as "prompt"')
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        wrong = prompt[error.start]
        raise ConfigError(
            f"{where}: character {error.start} of the prompt is the lone surrogate {wrong!r}, which"
            " is half of a character; write the character itself, or both halves"
        ) from error
    return prompt


def _text(key: str, path: str) -> str:
    where = f"config key generate.{key} = {path!r}"
    try:
        content = _standard_input() if path == "-" else _content(path)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{where}: has more than {MOST_BYTES:,} bytes; name a shorter file")
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x});"
            " save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{where}: {error.strerror}; name a file of text that is there"
        ) from error
    return io.StringIO(text.removeprefix("\ufeff"), newline=None).getvalue()  # line ends as \n


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MOST_BYTES + 1)
