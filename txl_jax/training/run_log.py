"""Writes and prints the records of a run. A training record has means over a window of steps.

    workdir/
      metrics.jsonl    one JSON object per line, in the order of the steps
      tensorboard/     the same numbers, settings and sample
      loss.png         the loss curve, drawn when the run ends or is stopped

    {"kind": "train", "step": 100, "epoch": 0.41, "loss": 2.345, "bpc": 3.383,
     "grad_norm": 0.71, "learning_rate": 0.00025,
     "timing": {"seconds": 8.1, "tokens_per_second": 12345.6,
                "data_seconds": 0.02, "save_seconds": 0.3, "attention": "xla"}}

``kind`` is train or valid. ``loss`` is in nats per token; the next key has the same loss in the
unit of the text: ``bpb`` (bits per byte), ``bpc`` (bits per character) or ``ppl`` (perplexity).
``skipped`` counts skipped updates, which the means exclude. ``seconds`` includes ``data_seconds``,
the wait for data, but not ``save_seconds``, the time for which saves blocked training.
``attention`` names the implementation of attention (model/kernels). Two identical runs have
identical records, except for ``timing``. A number that is not finite is ``null``.
"""

import collections
import dataclasses
import io
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from txl_jax.files import atomic_write
from txl_jax.paths import absolute, make_folder
from txl_jax.records import append, plain, read_counted, skipped_lines, truncate
from txl_jax.training.console import Console
from txl_jax.training.events import Logger
from txl_jax.training.goodput import GoodputTimer
from txl_jax.units import UNIT_NAMES, Unit, format_value, in_unit


@dataclasses.dataclass
class Window:
    """Sums over the updates since the last training record, added in the order of the steps."""

    nll_sum: float = 0.0
    weight_sum: float = 0.0
    grad_norm_sum: float = 0.0
    steps: int = 0
    learning_rate: float = 0.0
    skipped: int = 0

    def loss(self) -> float:
        """Returns the mean loss of the window in nats per token, or NaN without a token."""
        return self.nll_sum / self.weight_sum if self.weight_sum else math.nan


class RunLog:
    """Prints the records of one run and writes them into its workdir.

    A resumed run writes the same records as an uninterrupted run, bit for bit except ``timing``.
    Therefore the caller must write the records of a step before it saves the step's checkpoint.

    Args:
      resume_step: the step of the restored checkpoint. Later records are removed; 0 removes all.
      window: the value of :attr:`window` from the restored checkpoint.
      rewritten: a kind of record that is also removed at ``resume_step``, because the resumed run
        writes it again.
      tolerate_errors: whether training continues if a record cannot be written. The log then writes
        this record together with a later one. Errors at the start of a run are always raised.
      writes: whether to write and print. Otherwise, the log only computes sums.
      label: the prefix of printed lines (:class:`~txl_jax.training.console.Console`).
      goodput: a timer, which several runs can share.
      logger: receives the settings ``config`` and the numbers of the records. The log does not
        close the logger.
      attention: the implementation of attention, which training records name.

    Raises OSError, which names the file, if a file cannot be written.
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
        goodput: GoodputTimer | None = None,
        logger: Logger | None = None,
        config: Mapping[str, Any] | None = None,
        attention: str = "",
    ):
        self.workdir = os.fsdecode(workdir)
        self.metrics_path = os.path.join(self.workdir, "metrics.jsonl")
        self._unit, self._writes, self._tolerate_errors = unit, writes, tolerate_errors
        self._attention = {"attention": attention} if attention else {}
        self._window = Window(**(window or {}))
        self._unwritten: list[dict[str, Any]] = []
        if writes:
            make_folder(self.workdir)
            truncate(self.metrics_path, resume_step, rewritten)
        self._logger = (logger or Logger()) if writes else Logger()
        self._logger.start(self.workdir, config or {}, resume_step)
        self._console = Console(total_steps, resume_step, unit, label, not writes)
        self.goodput = goodput or GoodputTimer()
        self._start_window()

    @property
    def window(self) -> dict[str, Any]:
        """The exact state of the current window, as a JSON object for the argument ``window``."""
        return dataclasses.asdict(self._window)

    def message(self, text: str) -> None:
        """Prints a line on the console."""
        self._console.message(text)

    def train_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of :func:`~txl_jax.training.step.train_step` to the window."""
        self._window.nll_sum += float(metrics["nll_sum"])
        self._window.weight_sum += float(metrics["count"])
        self._window.grad_norm_sum += float(metrics["grad_norm"])
        self._window.steps += 1
        self._step_done(step, metrics)

    def skipped_step(self, step: int, reason: str, metrics: Mapping[str, float]) -> None:
        """Counts a step with a skipped update in the window, and prints the reason."""
        self._window.skipped += 1
        self._console.step_message(step, f"skipped: {reason}")
        self._step_done(step, metrics)

    def _step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        self._window.learning_rate = float(metrics["learning_rate"])
        tokens, seconds = int(metrics["tokens"]), self.goodput.training_seconds()
        self._window_tokens += tokens
        self._console.step_done(step, tokens, seconds, self._window.loss())

    def flush_window(self, step: int, *, epoch: float | None = None) -> None:
        """Writes the training record of the window and starts a new window.

        An empty window gives no record. A run that stops early saves its window in a checkpoint.
        """
        w = self._window
        if not w.steps and not w.skipped:
            return
        norm = w.grad_norm_sum / w.steps if w.steps else math.nan
        values = {"loss": w.loss(), "grad_norm": norm, "learning_rate": w.learning_rate}
        if w.skipped:
            values["skipped"] = w.skipped
        seconds = self.goodput.training_seconds() - self._window_start
        speed = self._window_tokens / seconds if seconds > 0 else math.nan
        lost = {k: v - self._window_lost[k] for k, v in self.goodput.seconds.items()}
        timing: dict[str, Any] = {"seconds": seconds, "tokens_per_second": speed}
        timing |= {"data_seconds": lost["data"], "save_seconds": lost["save"], **self._attention}
        self.record("train", step, values, timing, epoch=epoch)
        self._console.training_record(step, values)
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
        """Writes and prints one record, with the ``loss`` also in the unit of the text."""
        if not self._writes:
            return
        loss = values["loss"]
        values = {"loss": loss, self._unit: in_unit(loss, self._unit), **values}
        passed = {} if epoch is None else {"epoch": float(epoch)}
        timed = {"timing": plain(timing)} if timing else {}
        self._write({"kind": kind, "step": int(step), **passed, **plain(values), **timed})
        if kind != "train":  # flush_window prints training records
            self._console.record(kind, step, values)

    def _write(self, record: dict[str, Any]) -> None:
        """Writes a record, preceded by earlier records that could not be written at their time."""
        self._unwritten.append(record)
        numbers = {
            f"{record['kind']}/{name}": value
            for name, value in {**record, **record.get("timing", {})}.items()
            if isinstance(value, int | float) and name not in ("step", "epoch")
        }
        try:
            append(self.metrics_path, *self._unwritten)
            self._unwritten.clear()
            self._logger.metrics(record["step"], numbers)
        except OSError as error:
            if not self._tolerate_errors:
                raise
            self.message(
                f"{error}; training continues: metrics.jsonl gets all records as soon as it can be"
                " written, but other loggers may lose the record of this step"
            )

    def close(self) -> None:
        """Ends the progress bar and draws the loss curve."""
        self._console.close()
        if not self._writes:
            return
        figure_path = os.path.join(self.workdir, "loss.png")
        try:
            draw_loss_curve(self.metrics_path, figure_path, self._unit, self.message)
        except Exception as error:  # a failed figure must not end the run
            self.message(f"{figure_path}: the loss curve cannot be drawn ({error!r})")


def draw_loss_curve(
    metrics_path: str, figure_path: str, unit: Unit, message: Callable[[str], None]
) -> None:
    """Draws the training loss as a line and the validation loss as points, in a PNG file.

    Without records, no file is written. ``message`` prints a warning if lines cannot be read.
    """
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
    records, skipped = read_counted(metrics_path)
    if skipped:
        message(skipped_lines(metrics_path, skipped))
    for record in records:
        if record.get(unit) is not None:
            points[record["kind"]].append((record["step"], record[unit]))
    train, valid = points["train"], points["valid"]
    if not train and not valid:
        return

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=f"{UNIT_NAMES[unit]} ({unit})")
    if train:
        label = f"training: {format_value(train[-1][1], unit)} at the end"
        axes.plot(*zip(*train, strict=True), color="C0", linewidth=1, label=label)
    if valid:
        axes.plot(*zip(*valid, strict=True), "o-", color="C1", markersize=4, label="validation")
        step, value = min(valid, key=lambda point: point[1])
        label = f"best validation: {format_value(value, unit)} at step {step}"
        axes.plot(step, value, "*", color="C3", markersize=14, label=label)
    if unit == "ppl":
        axes.set_yscale("log")
    run = os.path.basename(os.path.dirname(absolute(figure_path)))
    axes.set_title(run, parse_math=False, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png")
    atomic_write(figure_path, png.getvalue())
