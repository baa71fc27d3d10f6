"""The output of a run on standard error: lines, or a progress bar."""

import collections
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from txl_jax.progress import is_terminal
from txl_jax.records import plain
from txl_jax.units import Unit, format_value, in_unit

_RECENT = 60
"""How many moments are kept to measure the speed. They are at least one second apart."""


class Console:
    """Prints lines about a run, each with the prefix ``label``. If ``silent``, it prints nothing.

    On a terminal and without a label, a progress bar replaces the training records.
    """

    def __init__(self, total: int, step: int, unit: Unit, label: str, silent: bool):
        self._total_steps, self._unit, self._silent = total, unit, silent
        self._label = f"{label}  " if label else ""
        self._now = (0.0, step, 0)  # seconds of training, step, tokens so far
        self._recent = collections.deque([self._now], maxlen=_RECENT)
        self._bar, self._stream = None, sys.stderr
        if is_terminal(self._stream) and not label and not silent:
            from tqdm import tqdm

            form = "step {n_fmt}/{total_fmt} |{bar}| {desc}"  # the bar takes the remaining width
            # The size is given, because the terminal of a container can report no columns or rows.
            options: Any = {"bar_format": form, "ncols": _columns(self._stream), "nrows": 24}
            self._bar = tqdm(total=total, initial=step, file=self._stream, **options)

    def message(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif not self._silent:
            print(self._label + text, file=self._stream, flush=True)

    def step_message(self, step: int, *parts: str) -> None:
        """Prints a line that begins with the step's number and contains the given parts."""
        width = len(str(self._total_steps))
        self.message("  ".join([f"step {step:>{width}}/{self._total_steps}", *parts]))

    def step_done(self, step: int, tokens: int, seconds: float, loss: float) -> None:
        """Advances the progress bar to a step.

        ``tokens`` is the number of tokens in this step, ``seconds`` is the training time so far,
        and ``loss`` is the mean loss in nats since the last training record.
        """
        self._now = seconds, step, self._now[2] + tokens
        if seconds - self._recent[-1][0] >= 1.0:
            self._recent.append(self._now)
        if self._bar is not None:
            text = f"{self._loss(loss)}  {self._speed()}"
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Prints a record of ``metrics.jsonl`` as one line."""
        parts = [kind, self._loss(values["loss"])]
        for name, value in values.items():
            if name.startswith("loss_"):  # the loss of averaged weights
                parts.append(f"{name.removeprefix('loss_')} {self._loss(value)}")
            elif name not in ("loss", self._unit):
                parts.append(_named(name, value))
        self.step_message(step, *parts)

    def training_record(self, step: int, values: Mapping[str, Any]) -> None:
        """Prints a training record as one line, unless the progress bar shows its values."""
        if self._bar is None:
            skipped = [_named("skipped", values["skipped"])] if "skipped" in values else []
            rate = f"lr {values['learning_rate']:.1e}"
            self.step_message(step, self._loss(values["loss"]), rate, *skipped, self._speed())

    def close(self) -> None:
        """Closes the progress bar."""
        if self._bar is not None:
            self._bar.close()

    def _loss(self, loss: float) -> str:
        return f"{self._unit} {format_value(in_unit(loss, self._unit), self._unit)}"

    def _speed(self) -> str:
        """Returns the tokens per second and the remaining time, from recent updates, as text."""
        seconds, updates, tokens = (
            now - before for now, before in zip(self._now, self._recent[0], strict=True)
        )
        if seconds <= 0 or updates <= 0:
            return "? tok/s  ? left"
        left = (self._total_steps - self._now[1]) * seconds / updates
        minutes, seconds_left = divmod(int(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{tokens / seconds:,.0f} tok/s  {hours}:{minutes:02}:{seconds_left:02} left"


def _columns(terminal: TextIO) -> int:
    """Returns a width, in columns, at which the progress bar never wraps to a second line."""
    try:
        return min(os.get_terminal_size(terminal.fileno()).columns or 80, 80) - 1
    except OSError:  # the stream has no file descriptor
        return 79


def _named(name: str, value: Any) -> str:
    value = plain(value)
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
