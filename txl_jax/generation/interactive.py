"""Continues and scores the lines that a user types: ``--mode=interactive``."""

import contextlib
import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import override
from txl_jax.evaluation.any_text import score_any_text
from txl_jax.generation.text import continuations
from txl_jax.generation.write import formatted, set_stream_errors
from txl_jax.messages import one_line
from txl_jax.paths import is_remote
from txl_jax.units import UNIT_NAMES, format_value

HELP = """\
text            continue the text
:more           continue the last continuation
:score text     print the probability of each token of the text
:set KEY VALUE  change a setting of generation, such as  :set temperature 0.7
:settings       print all settings
:quit           end (also Ctrl-D); Ctrl-C stops a continuation
Put a space before a text that begins with a colon.
Write \\n for a line end, or \\r\\n for one of Windows."""


class Session:
    """An interactive session with a trained model. ``write`` prints the answers."""

    def __init__(self, trained: TrainedModel, write: Callable[[str], None]):
        self._trained, self._write = trained, write
        self._text = ""

    def answer(self, line: str) -> bool:
        """Executes a line, and prints an error as one line. Returns False to end the session."""
        command, _, rest = line.partition(" ")
        if not command.startswith(":"):
            command, rest = ":continue", line
        if command == ":quit":
            return False
        execute = {
            ":continue": self._continue,
            ":more": self._more,
            ":score": self._score,
            ":set": self._set,
            ":settings": self._settings,
            ":help": lambda _: self._write(HELP + "\n"),
        }
        try:
            if command not in execute:
                raise ValueError(f"there is no command {command}; :help lists the commands")
            execute[command](rest.replace("\\r\\n", "\r\n").replace("\\n", "\n"))
        except Exception as error:  # the session continues after any error, such as low memory
            self._write(f"error: {one_line(error) or type(error).__name__}\n")
        except KeyboardInterrupt:
            self._write("\n(stopped)\n")
        return True

    def _continue(self, prompt: str) -> None:
        if not prompt.strip(" "):
            return
        self._text = prompt.removeprefix(" ") if prompt.startswith(" :") else prompt
        self._more("")

    def _more(self, _: str) -> None:
        if not self._text:
            raise ValueError("there is nothing to continue; type a text first")
        c = dataclasses.replace(self._trained.config.generate, samples=1)
        for ((row, new),) in continuations(self._trained, [self._text], c):
            if row.text:
                self._text = row.prompt + row.text
            self._write(formatted(new, c))
        self._write("\n")

    def _score(self, text: str) -> None:
        if not text:
            raise ValueError(":score needs a text")
        vocab, found = self._trained.vocab, score_any_text(self._trained, [text], "text")
        for token, loss in zip(found.lines[0].ids, found.lines[0].nll, strict=True):
            symbol = vocab.decode([int(token)]) if vocab.kind == "byte" else vocab.symbols[token]
            self._write(f"  {symbol!r:<16} {loss:8.3f} nats  {math.exp(-loss):9.3%}\n")
        self._write(f"  {format_value(found.value, found.unit)} {UNIT_NAMES[found.unit]}\n")

    def _set(self, rest: str) -> None:
        key, _, value = rest.partition(" ")
        if not key or not value:
            raise ValueError(":set needs a setting and a value, such as  :set temperature 0.7")
        exp = override(self._trained.config, {f"generate.{key}": value})
        self._trained = dataclasses.replace(self._trained, config=exp)

    def _settings(self, _: str) -> None:
        for key, value in dataclasses.asdict(self._trained.config.generate).items():
            self._write(f"  {key} = {value!r}\n")


def run(trained: TrainedModel, workdir: str) -> str:
    """Reads and answers lines until the session ends. The workdir keeps earlier lines if it can."""
    set_stream_errors(sys.stdin, "surrogateescape")  # prompts can have bytes that are not UTF-8
    set_stream_errors(sys.stdout, "replace")
    session = Session(trained, lambda text: print(text, end="", flush=True))
    print(f"{trained.config.name}, step {trained.step:,}; :help lists the commands", flush=True)
    with _history(os.path.join(workdir, ".history")), contextlib.suppress(EOFError):
        while True:
            try:
                line = input("> ")
            except KeyboardInterrupt:
                print()
                continue
            if not session.answer(line.removeprefix("\ufeff").removesuffix("\r")):
                break
    return ""


@contextlib.contextmanager
def _history(path: str) -> Iterator[None]:
    """Makes earlier lines available with the arrow keys if Python has readline."""
    readline: Any = None
    if not is_remote(path):  # readline reads and writes local files only
        with contextlib.suppress(ImportError, OSError):  # no readline, or no history yet
            readline = importlib.import_module("readline")
            readline.set_history_length(1000)
            readline.read_history_file(path)
    try:
        yield
    finally:
        if readline:
            with contextlib.suppress(OSError):
                readline.write_history_file(path)
