"""What a run prints on standard error: lines, or a progress bar."""

import datetime
import math
import sys
from collections.abc import Mapping
from typing import Any

from txl_jax.units import Unit, format_value, in_unit


class Console:
    """Prints lines about a run; on a terminal also a progress bar.

    Args:
      total_steps: updates in all.
      step: updates done at the start.
      unit: of losses.
      label: printed before each line, for one of several runs; these have no bars.
      progress: True: a bar; False: a line for each training record; ``None``: a bar on terminals.
      silent: prints nothing, because another process does.
    """

    def __init__(
        self,
        total_steps: int,
        step: int,
        unit: Unit,
        label: str = "",
        progress: bool | None = None,
        silent: bool = False,
    ):
        self._total_steps, self._unit, self._silent = total_steps, unit, silent
        self._label = f"{label}  " if label else ""
        if progress is None:
            progress = sys.stderr.isatty() and not label
        self._bar = _progress_bar(total_steps, step) if progress and not silent else None

    def message(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._silent:
            return
        if self._bar is None:
            print(self._label + text, file=sys.stderr, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def step_message(self, step: int, text: str) -> None:
        """Prints a line about a step."""
        width = len(str(self._total_steps))
        self.message(f"step {step:>{width}}/{self._total_steps}  {text}")

    def update_bar(self, step: int, loss: float, speed: float, left: float) -> None:
        """Moves the bar to a step; ``speed`` in tokens per second, ``left`` in seconds."""
        if self._bar is not None:
            text = f"{self._loss(loss)}  {_rate(speed, left)}"
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)

    def training_record(
        self, step: int, values: Mapping[str, Any], speed: float, left: float
    ) -> None:
        """Prints the line of a training record, unless the bar shows it; see :meth:`update_bar`."""
        if self._bar is None:
            skipped = f"  skipped {values['skipped']}" if "skipped" in values else ""
            rate = f"lr {values['learning_rate']:.1e}{skipped}  {_rate(speed, left)}"
            self.step_message(step, f"{self._loss(values['loss'])}  {rate}")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Prints the line of any other record."""
        parts = [] if values.get("loss") is None else [self._loss(values["loss"])]
        for name, value in values.items():
            if name not in ("loss", self._unit):
                parts.append(
                    f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                )
        self.step_message(step, "  ".join([kind, *parts]))

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()

    def _loss(self, loss: float) -> str:
        return (
            f"loss {loss:.3f}  {self._unit} {format_value(in_unit(loss, self._unit), self._unit)}"
        )


def _progress_bar(total_steps: int, step: int) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=total_steps,
        initial=step,
        file=sys.stderr,
        dynamic_ncols=True,
        bar_format="step {n_fmt}/{total_fmt} |{bar:20}| {desc}",
    )


def _rate(speed: float, left: float) -> str:
    """Tokens per second and seconds left, in words."""
    tokens = "?" if math.isnan(speed) else f"{speed:,.0f}"
    time = "?" if math.isnan(left) else datetime.timedelta(seconds=int(left))
    return f"{tokens} tok/s  {time} left"
