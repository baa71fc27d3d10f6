"""Records of a run: means over the steps of a window, written and printed during training.

    workdir/
      metrics.jsonl    one JSON object per line, in the order of the steps
      tensorboard/     the same numbers, if tensorboardX is installed
      loss.png         the loss curve, drawn when the run ends or is stopped

    {"kind": "train", "step": 100, "epoch": 0.41, "loss": 2.345, "bpc": 3.383,
     "grad_norm": 0.71, "learning_rate": 0.00025,
     "timing": {"seconds": 8.1, "tokens_per_second": 12345.6,
                "data_seconds": 0.02, "save_seconds": 0.3}}

``kind`` is train, valid or test. ``loss`` is in nats per token; ``bpc`` (bits per character) or
``ppl`` (perplexity) is the corpus's own unit. ``skipped`` counts skipped updates, if any, which the
means leave out. ``data_seconds``, a part of ``seconds``, is spent waiting for data;
``save_seconds``, not a part of it, is how long saves held training up. Two runs are the same if
their records without ``timing`` are. A number that is not finite is written as ``null``.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from txl_jax.records import append, plain, truncate
from txl_jax.training.console import Console
from txl_jax.training.events import TensorBoardEvents
from txl_jax.training.goodput import GoodputTimer
from txl_jax.training.loss_curve import draw_loss_curve
from txl_jax.units import Unit, in_unit


@dataclasses.dataclass
class Window:
    """Sums over the updates since the last training record; floats add up in step order."""

    nll_sum: float = 0.0
    weight_sum: float = 0.0
    grad_norm_sum: float = 0.0
    steps: int = 0
    learning_rate: float = 0.0
    skipped: int = 0

    def loss(self) -> float:
        """Mean nats per token of the window; NaN while there is no token."""
        return self.nll_sum / self.weight_sum if self.weight_sum else math.nan


class RunLog:
    """The records of one run, printed and kept in its workdir.

    A resumed run writes what the uninterrupted run would have written, bit for bit outside
    ``timing``: the checkpoint holds :attr:`window`, and later records are written again. So the
    records of a step must be written before its checkpoint is saved. The context closes the files.

    Args:
      workdir: folder of the run, created if needed.
      resume_step: step of the restored checkpoint; later records are removed, all if it is 0.
      window: :attr:`window` from that checkpoint.
      rewritten: kind of record that is written again at ``resume_step`` itself.
      tolerate_errors: keep a record that cannot be written, and write it with a later one. Errors
        at the start and at the end are raised in any case.
      writes: False: only sum up; another process writes and prints.
      label, progress: as in :class:`~txl_jax.training.console.Console`.
      goodput: a timer that several runs share; ``None``: a new one.

    An OSError, here and where records are written, names the file that cannot be written.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        total_steps: int,
        unit: Unit,
        resume_step: int = 0,
        window: Mapping[str, Any] | None = None,
        rewritten: str | None = None,
        tolerate_errors: bool = False,
        writes: bool = True,
        label: str = "",
        progress: bool | None = None,
        goodput: GoodputTimer | None = None,
    ):
        self.workdir = os.fspath(workdir)
        self.metrics_path = os.path.join(self.workdir, "metrics.jsonl")
        self._unit, self._writes, self._tolerate_errors = unit, writes, tolerate_errors
        self._window = Window(**(window or {}))
        self._unwritten: list[dict[str, Any]] = []
        self._closed = False
        if writes:
            os.makedirs(self.workdir, exist_ok=True)
            truncate(self.metrics_path, resume_step, rewritten)
        self._console = Console(total_steps, resume_step, unit, label, progress, not writes)
        self._events = self._open_events(resume_step) if writes else None
        self.goodput = goodput or GoodputTimer()
        self._start_window()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, error_type: type | None, *error: object) -> None:
        ignored = (OSError,) if error_type else ()  # the same full disk that caused the first error
        with contextlib.suppress(*ignored):
            self.close()

    @property
    def window(self) -> dict[str, Any]:
        """Exact state of the partial window, ready for JSON; the argument ``window`` takes it."""
        return dataclasses.asdict(self._window)

    def message(self, text: str) -> None:
        """Prints a line."""
        self._console.message(text)

    def train_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds update number ``step``, from 1, to the window; writes nothing.

        ``metrics``: as :func:`~txl_jax.training.step.train_step` gives them.
        """
        self._window.nll_sum += float(metrics["nll_sum"])
        self._window.weight_sum += float(metrics["count"])
        self._window.grad_norm_sum += float(metrics["grad_norm"])
        self._window.steps += 1
        self._step_done(step, metrics)

    def skipped_step(self, step: int, reason: str, metrics: Mapping[str, float]) -> None:
        """Counts a step without an update in the window, and prints the reason."""
        self._window.skipped += 1
        self._console.step_message(step, f"skipped: {reason}")
        self._step_done(step, metrics)

    def _step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        self._window.learning_rate = float(metrics["learning_rate"])
        tokens, seconds = int(metrics["tokens"]), self.goodput.training_seconds()
        self._window_tokens += tokens
        self._console.step_done(step, tokens, seconds, self._window.loss())

    def flush_window(self, step: int, *, epoch: float | None = None) -> None:
        """Writes the training record of the window, if it is not empty, and empties it.

        A run that is stopped early does not call it: the checkpoint holds its window.
        """
        w = self._window
        if not w.steps and not w.skipped:
            return
        values = {
            "loss": w.loss(),
            self._unit: in_unit(w.loss(), self._unit),
            "grad_norm": w.grad_norm_sum / w.steps if w.steps else math.nan,
            "learning_rate": w.learning_rate,
            **({"skipped": w.skipped} if w.skipped else {}),
        }
        now = self.goodput.training_seconds()
        seconds = now - self._window_start
        speed = self._window_tokens / seconds if seconds > 0 else math.nan
        lost = {k: v - self._window_lost[k] for k, v in self.goodput.seconds.items()}
        timing = {"seconds": seconds, "tokens_per_second": speed}
        timing |= {"data_seconds": lost["data"], "save_seconds": lost["save"]}
        self.record("train", step, values, timing, epoch=epoch)
        self._console.training_record(step, values, now)
        self._window = Window()
        self._start_window()

    def _start_window(self) -> None:
        self._window_start, self._window_tokens = self.goodput.training_seconds(), 0
        self._window_lost = dict(self.goodput.seconds)

    def record(
        self,
        kind: str,
        step: int,
        values: Mapping[str, Any],
        timing: Mapping[str, Any] | None = None,
        *,
        epoch: float | None = None,
    ) -> None:
        """Writes and prints one record; ``bpc`` or ``ppl`` is added to a ``loss`` in ``values``."""
        if not self._writes:
            return
        if values.get("loss") is not None:
            values = {**values, self._unit: in_unit(values["loss"], self._unit)}
        passed = {} if epoch is None else {"epoch": float(epoch)}
        timed = {"timing": plain(timing)} if timing else {}
        self._write({"kind": kind, "step": int(step), **passed, **plain(values), **timed})
        if kind != "train":  # flush_window prints it, with the speed
            self._console.record(kind, step, values)

    def _write(self, record: dict[str, Any]) -> None:
        """Writes a record, after those that could not be written before."""
        self._unwritten.append(record)
        try:
            append(self.metrics_path, *self._unwritten)
            self._unwritten.clear()
            if self._events is not None:
                self._events.add(record)
        except OSError as error:
            if not self._tolerate_errors:
                raise
            self.message(
                f"{error}; training continues: the records are written later, those of"
                " TensorBoard are lost"
            )

    def close(self) -> None:
        """Completes the files and draws the loss curve, once."""
        if self._closed:
            return
        self._closed = True
        self._console.close()
        if self._events is not None:
            self._events.close()
        if not self._writes:
            return
        figure_path = os.path.join(self.workdir, "loss.png")
        try:
            draw_loss_curve(self.metrics_path, figure_path, self._unit, self.message)
        except Exception as error:  # of any type; a missing picture must not end the run
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self.message(f"{figure_path}: the loss curve cannot be drawn ({reason})")

    def _open_events(self, resume_step: int) -> TensorBoardEvents | None:
        try:
            return TensorBoardEvents(os.path.join(self.workdir, "tensorboard"), resume_step)
        except ImportError:
            self.message(
                "tensorboardX is not installed: no TensorBoard files; metrics.jsonl has the"
                " same numbers"
            )
            return None
