"""What a run tells while it trains: records, TensorBoard files, a live line, a loss curve.

    workdir/
      metrics.jsonl    one JSON object per line, in the order of the steps
      tensorboard/     the same numbers (tensorboardX; left out where it is not installed)
      loss.png         the curve, drawn when the run ends or is stopped

A record, one line of ``metrics.jsonl``:

    {"kind": "train", "step": 100, "epoch": 0.41, "loss": 2.345, "bpc": 3.383,
     "grad_norm": 0.71, "learning_rate": 0.00025,
     "timing": {"seconds": 8.1, "tokens_per_second": 12345.6,
                "data_seconds": 0.02, "save_seconds": 0.3}}

``kind`` is train, valid or test; ``loss`` is in nats per token; ``bpc`` (bits per character)
or ``ppl`` (perplexity) is the corpus's own unit. ``skipped`` is there where updates were: so
many, of which nothing is in the means. ``data_seconds`` of ``seconds`` were spent waiting for
data; ``save_seconds``, how long saving held training up, is not in ``seconds``. What depends on
the wall clock stands under ``timing`` and nowhere else: two runs are the same run when their
records without ``timing`` are. A number that is not finite is written as ``null``.
"""

import collections
import contextlib
import dataclasses
import datetime
import math
import os
import sys
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

from txl_jax.records import append, keep_until, plain
from txl_jax.training.events import Events
from txl_jax.training.goodput import Activity, GoodputTimer
from txl_jax.training.loss_curve import draw
from txl_jax.units import Unit, format_value, in_unit


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
    """The records of one run, shown while they are made and kept in ``workdir``.

    A resumed run writes what the uninterrupted run would have written, bit for bit outside
    ``timing``: the checkpoint keeps :attr:`window`, and records after it are made again.
    For that a checkpoint of step s is saved after the records of step s are written.

    Also a context manager, which closes itself, so that a run that is stopped leaves a curve.

    Attributes:
      spent: where the seconds go.

    Args:
      workdir: folder of the run; made if it is not there.
      total_steps: updates in all, for the bar and the time left.
      unit: ``bpc`` or ``ppl``.
      resume_step: step of the checkpoint that training goes on from. Records after it are
        removed. 0: training starts at the beginning and so do the records.
      window: :attr:`window` as that checkpoint kept it.
      remade: kind of record that is made again at ``resume_step`` itself, so removed there too.
      patient: a record that cannot be written is kept and written with a later one. At the start
        and at the end what cannot be written raises all the same.
      writes: False: nothing is written or shown, only summed up, as another process writes.
      label: stands before each line, of one of several runs; they have no bars.
      progress: a live bar (True) or one line per training record (False), both on standard
        error; ``None``: a bar if that is a terminal.

    Raises:
      OSError: a file cannot be written (here and from every method that records); the text
        names the file.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        total_steps: int,
        unit: Unit,
        resume_step: int = 0,
        window: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        remade: str | None = None,
        writes: bool = True,
        patient: bool = False,
        label: str = "",
    ):
        self.workdir = os.fspath(workdir)
        self.metrics_path = os.path.join(self.workdir, "metrics.jsonl")
        self.figure_path = os.path.join(self.workdir, "loss.png")
        self._total_steps, self._unit = total_steps, unit
        self._window = Window(**(window or {}))
        self._closed = False

        self._writes, self._patient = writes, patient
        self._unwritten: list[dict[str, Any]] = []
        if writes:
            os.makedirs(self.workdir, exist_ok=True)
            keep_until(self.metrics_path, resume_step, remade)

        if progress is None:
            progress = sys.stderr.isatty() and not label
        self._label = f"{label}  " if label else ""
        self._bar = _bar(total_steps, resume_step) if progress and writes else None
        self._events = self._open_events(resume_step) if writes else None

        self._clock = _Clock()
        self.goodput = GoodputTimer()
        self._window_start, self._window_tokens = self._clock.seconds(), 0
        self._window_spent = dict(self.goodput.seconds)
        # (seconds, step, tokens so far), about one a second: the rate of the recent steps.
        self._tokens = 0
        self._recent = collections.deque([(self._window_start, resume_step, 0)], maxlen=30)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
            return
        with contextlib.suppress(OSError):  # of the same full disk, which the first error explains
            self.close()

    @property
    def window(self) -> dict[str, Any]:
        """Exact state of the partial window, ready for JSON; ``window=`` takes it back."""
        return dataclasses.asdict(self._window)

    @contextlib.contextmanager
    def pause(self, activity: Activity) -> Iterator[None]:
        """Time in this context is no training time but that of ``compile``, ``evaluate``, .."""
        self._clock.stop()
        try:
            with self.goodput.on(activity):
                yield
        finally:
            self._clock.start()

    def train_step(
        self,
        step: int,
        nll_sum: float,
        weight_sum: float,
        grad_norm: float,
        learning_rate: float,
        tokens: int,
    ) -> None:
        """Adds one update to the window; nothing is written.

        Args:
          step: number of updates done, this one included.
          nll_sum: sum of -log p over the step's targets, nats.
          weight_sum: how many targets that were.
          grad_norm: norm of the gradient before clipping.
          learning_rate: of this update.
          tokens: how many tokens the step read, for the speed.
        """
        w = self._window
        w.nll_sum += float(nll_sum)
        w.weight_sum += float(weight_sum)
        w.grad_norm_sum += float(grad_norm)
        w.steps += 1
        w.learning_rate = float(learning_rate)
        self._advance(step, tokens)

    def skipped_step(self, step: int, why: str, learning_rate: float, tokens: int) -> None:
        """Counts a step without an update in the window, and prints why there was none."""
        self._window.skipped += 1
        self._window.learning_rate = float(learning_rate)
        self.message(f"{self._at(step)}  skipped: {why}")
        self._advance(step, tokens)

    def _advance(self, step: int, tokens: int) -> None:
        """Step done, tokens read: the speed and the bar."""
        w = self._window
        self._tokens += int(tokens)
        self._window_tokens += int(tokens)
        now = self._clock.seconds()
        if now - self._recent[-1][0] >= 1.0:
            self._recent.append((now, int(step), self._tokens))
        if self._bar is not None:
            speed, left = self._recent_speed(step)
            text = f"{_numbers(w.loss(), self._unit)}  {_speed(speed)}  {_left(left)}"
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)

    def flush_window(self, step: int, *, epoch: float | None = None) -> None:
        """Writes the training record of the window and empties it; an empty one writes none.

        Called at log steps and after the last update. A run that is stopped early does not
        flush: its window goes into the checkpoint.
        """
        w = self._window
        if not w.steps and not w.skipped:
            return
        loss = w.loss()
        now = self._clock.seconds()
        seconds = now - self._window_start
        speed = self._window_tokens / seconds if seconds > 0 else math.nan
        values = {
            "loss": loss,
            self._unit: in_unit(loss, self._unit),
            "grad_norm": w.grad_norm_sum / w.steps if w.steps else math.nan,
            "learning_rate": w.learning_rate,
            **({"skipped": w.skipped} if w.skipped else {}),
        }
        timing = {"seconds": seconds, "tokens_per_second": speed}
        lost: tuple[Activity, ...] = ("data", "save")
        for activity in lost:
            since = self.goodput.seconds[activity] - self._window_spent[activity]
            timing[f"{activity}_seconds"] = since
        self.record("train", step, values, timing, epoch=epoch)
        if self._bar is None:
            _, left = self._recent_speed(step)
            rate = f"lr {w.learning_rate:.1e}" + (f"  skipped {w.skipped}" if w.skipped else "")
            self.message(
                f"{self._at(step)}  {_numbers(loss, self._unit)}  {rate}"
                f"  {_speed(speed)}  {_left(left)}"
            )
        self._window = Window()
        self._window_start, self._window_tokens = now, 0
        self._window_spent = dict(self.goodput.seconds)

    def record(
        self,
        kind: str,
        step: int,
        values: Mapping[str, Any],
        timing: Mapping[str, Any] | None = None,
        *,
        epoch: float | None = None,
    ) -> None:
        """Writes one record and, unless it is a training record, prints it as a line.

        Args:
          kind: ``train``, ``valid``, ``test`` or a name of the caller's.
          step: number of updates done.
          values: what was measured. A ``loss`` (nats per token) without a ``bpc`` or ``ppl``
            gets it.
          timing: whatever of it depends on the wall clock.
          epoch: passes over the training split so far.
        """
        values = plain(values)
        assert isinstance(values, dict)
        loss = values.get("loss")
        if loss is not None and self._unit not in values:
            values[self._unit] = plain(in_unit(loss, self._unit))
        record: dict[str, Any] = {"kind": kind, "step": int(step)}
        if epoch is not None:
            record["epoch"] = float(epoch)
        record |= values
        if timing:
            record["timing"] = plain(timing)
        if not self._writes:
            return
        self._unwritten.append(record)
        try:
            append(self.metrics_path, *self._unwritten)
            self._unwritten.clear()
            if self._events is not None:
                self._events.add(kind, int(step), values | record.get("timing", {}))
        except OSError as error:
            if not self._patient:
                raise
            self.message(f"{error}; going on, the records wait and TensorBoard's are lost")
        if kind != "train":
            self.message(f"{self._at(step)}  {kind}  {_numbers_of(values, self._unit)}")

    def message(self, text: str) -> None:
        """Prints a line on standard error, above the bar if there is one."""
        if not self._writes:
            return
        if self._bar is None:
            print(self._label + text, file=sys.stderr, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Ends the bar, completes the TensorBoard files and draws the curve; once is enough."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.close()
        if self._events is not None:
            self._events.close()
        if self._writes:
            self._draw()

    # ----------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draws the curve; a failure is logged and does not end the run."""
        try:
            draw(self.metrics_path, self.figure_path, self._unit, self.message)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            self.message(f"{self.figure_path}: the loss curve cannot be drawn ({why})")

    def _at(self, step: int) -> str:
        return f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"

    def _recent_speed(self, step: int) -> tuple[float, float]:
        """Tokens per second lately, and the seconds that the steps to come take at that rate."""
        now = self._clock.seconds()
        then, step_then, tokens_then = self._recent[0]
        if now <= then or step <= step_then:
            return math.nan, math.nan
        left = (self._total_steps - step) * (now - then) / (step - step_then)
        return (self._tokens - tokens_then) / (now - then), left

    def _open_events(self, resume_step: int) -> "Events | None":
        try:
            return Events(os.path.join(self.workdir, "tensorboard"), resume_step)
        except ImportError:
            self.message(
                "tensorboardX is not installed: no TensorBoard files; metrics.jsonl has the"
                " same numbers"
            )
            return None


class _Clock:
    """Seconds that have passed, those between ``stop`` and ``start`` left out; they nest."""

    def __init__(self):
        self._left_out, self._depth, self._stopped_at = 0.0, 0, 0.0

    def seconds(self) -> float:
        return (self._stopped_at if self._depth else perf_counter()) - self._left_out

    def stop(self) -> None:
        if not self._depth:
            self._stopped_at = perf_counter()
        self._depth += 1

    def start(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._left_out += perf_counter() - self._stopped_at


def _bar(total_steps: int, resume_step: int) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=total_steps,
        initial=resume_step,
        file=sys.stderr,
        dynamic_ncols=True,
        bar_format="step {n_fmt}/{total_fmt} |{bar:20}| {desc}",
    )


def _numbers(loss: float, unit: Unit) -> str:
    return f"loss {loss:.3f}  {unit} {format_value(in_unit(loss, unit), unit)}"


def _numbers_of(values: Mapping[str, Any], unit: Unit) -> str:
    parts = [] if values.get("loss") is None else [_numbers(values["loss"], unit)]
    for name, value in values.items():
        if name not in ("loss", unit):
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return "  ".join(parts)


def _speed(tokens_per_second: float) -> str:
    return "? tok/s" if math.isnan(tokens_per_second) else f"{tokens_per_second:,.0f} tok/s"


def _left(seconds: float) -> str:
    return "? left" if math.isnan(seconds) else f"{datetime.timedelta(seconds=int(seconds))} left"
