"""The output of a run on standard error: lines, or a progress bar."""

import bisect
import collections
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from txl_jax.progress import has_width
from txl_jax.records import plain
from txl_jax.standard_streams import stderr
from txl_jax.units import Unit, format_value, in_unit

_LONGEST_SILENCE = 300.0
"""The seconds of training after which a line is printed although no record is due."""
_WINDOWS = 120
"""The number of windows, of at least one second each, that speed and remaining time depend on."""


class _Window(NamedTuple):
    """Successive updates: their seconds of training, their number, and their tokens."""

    seconds: float
    updates: int
    tokens: int

    def since(self, before: "_Window") -> "_Window":
        seconds, updates, tokens = before
        return _Window(self.seconds - seconds, self.updates - updates, self.tokens - tokens)


class Console:
    """Prints lines about a run, each with the prefix ``label``. If ``silent``, it prints nothing.

    If ``progress`` is True, a progress bar replaces the training records. ``None`` chooses the bar
    if standard error is a terminal and there is no label. Without a bar, a line shows the progress
    if records are more than five minutes apart.
    """

    def __init__(
        self, total: int, step: int, unit: Unit, label: str, progress: bool | None, silent: bool
    ):
        self._total_steps, self._unit, self._silent = total, unit, silent
        self._label = f"{label}  " if label else ""
        self._windows = collections.deque[_Window](maxlen=_WINDOWS)
        self._start = self._last = self._done = _Window(0.0, step, 0)  # _last: end of a window
        self._bar, self._stream = None, stderr()
        self._last_line = 0.0  # training seconds
        if progress is None:
            progress = self._stream.isatty() and not label
        if progress and not silent:
            from tqdm import tqdm

            form = "step {n_fmt}/{total_fmt} |{bar}| {desc}"  # the bar takes the remaining width
            dynamic = has_width(self._stream)
            size: dict[str, Any] = {"dynamic_ncols": True} if dynamic else {"ncols": 79}
            self._bar = tqdm(total=total, initial=step, file=self._stream, bar_format=form, **size)

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

        ``tokens`` is the number in this step, ``seconds`` is the training time so far, and ``loss``
        is the mean loss in nats since the last training record.
        """
        self._done = _Window(seconds, step, self._done.tokens + tokens)
        if seconds - self._last.seconds >= 1.0:
            self._windows.append(self._done.since(self._last))
            self._last = self._done
        if self._bar is not None:
            text = f"{self._loss(loss)}  {self._speed()}"
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif seconds - self._last_line >= _LONGEST_SILENCE:
            self._last_line = seconds
            self.step_message(step, self._loss(loss), self._speed())

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Prints a record of ``metrics.jsonl`` as one line."""
        loss = [] if values.get("loss") is None else [self._loss(values["loss"])]
        rest = []
        for name, value in values.items():
            if name.startswith("loss_"):  # of averaged weights
                rest.append(f"{name.removeprefix('loss_')} {self._loss(value)}")
            elif name not in ("loss", self._unit):
                rest.append(_named(name, value))
        self.step_message(step, kind, *loss, *rest)

    def training_record(self, step: int, values: Mapping[str, Any], seconds: float) -> None:
        """Prints a training record as one line, unless the progress bar shows its values."""
        if self._bar is None:
            skipped = [_named("skipped", values["skipped"])] if "skipped" in values else []
            rate, self._last_line = f"lr {values['learning_rate']:.1e}", seconds
            speed = self._speed()
            self.step_message(step, self._loss(values["loss"]), rate, *skipped, speed)

    def close(self) -> None:
        """Closes the progress bar."""
        if self._bar is not None:
            self._bar.close()

    def _loss(self, loss: float) -> str:
        return f"{self._unit} {format_value(in_unit(loss, self._unit), self._unit)}"

    def _speed(self) -> str:
        """Returns the tokens per second and the remaining time, as text.

        Both come from the window with the median time per update. So a pause, such as a laptop's
        sleep, changes neither. The first window can be a single update, which loads the program;
        so if there are fewer than two windows, both come from all updates.
        """
        recent = self._windows if len(self._windows) > 1 else [self._done.since(self._start)]
        windows = [w for w in recent if w.updates > 0]
        if not windows or windows[0].seconds <= 0:
            return "? tok/s  ? left"
        windows.sort(key=lambda w: w.seconds / w.updates)
        up_to = list(itertools.accumulate(w.updates for w in windows))
        took, updates, tokens = windows[bisect.bisect_left(up_to, up_to[-1] / 2)]
        left = (self._total_steps - self._done.updates) * took / updates
        minutes, seconds = divmod(int(left), 60)
        return f"{tokens / took:,.0f} tok/s  {minutes // 60}:{minutes % 60:02}:{seconds:02} left"


def _named(name: str, value: Any) -> str:
    value = plain(value)
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
