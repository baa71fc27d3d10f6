"""The training loop: feed, step, log, validate, save. Thin: the step itself is pure."""

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from txl_jax.checkpoint.checkpoints import RAW, Checkpoints
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.config import ExperimentConfig
from txl_jax.data.batch import Batch
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import training_batch, training_feed
from txl_jax.data.on_device import BatchPosition, DeviceText, training_position
from txl_jax.data.sentences import TrainingStreams
from txl_jax.evaluation.evaluate import Evaluator, Score
from txl_jax.model.kernels.parity import require_parity
from txl_jax.model.layout import stack_layers, unstack_layers
from txl_jax.parallel import processes
from txl_jax.parallel.shardings import Shardings
from txl_jax.training.average import candidates, chosen
from txl_jax.training.distil import soft_targets
from txl_jax.training.parts import Parts, parts_of, text_on_device, training_streams
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.runlog import RunLog
from txl_jax.training.skipping import SkippedError, not_finite, reason
from txl_jax.training.start import started
from txl_jax.training.state import TrainState, state_shardings
from txl_jax.training.step import Metrics, compiled_step

_REMEDY = "Try a lower optimizer.learning_rate, more optimizer.warmup_steps, or model.dtype float32"


class NonFiniteError(RuntimeError):
    """A loss, gradient or state that is not finite; names it, the step, and what is kept."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How training ended: the state, and whether all steps were done."""

    state: TrainState
    finished: bool


def train(exp: ExperimentConfig, corpus: Corpus, workdir: str, stop: PreemptionGuard) -> Outcome:
    """Trains from the newest checkpoint of ``workdir``, or from the start, to the last step.

    A run that was killed and started again ends in the same bits as one that was not: the
    state is restored whole, data and dropout are functions of the step, and records after
    the checkpoint are made again.

    Raises:
      ConfigError, DataError: what does not fit the data, the devices or the model that is started
        from; before any work.
      CheckpointError: a checkpoint of another config, or one that cannot be written.
      NonFiniteError: a loss, a gradient or a state to be saved is not finite; it is not saved.
      SkippedError: too many updates in a row were skipped; nor is anything after this.
    """
    parts = parts_of(exp, corpus)
    with opened(exp, corpus, workdir, stop, parts) as (run, state):
        if int(state.step) < exp.train.steps:
            soft = soft_targets(exp, corpus, workdir, run.log.message, stop.requested)
            run.text = text_on_device(exp, run.streams, parts.shardings, soft)
            if not stop.requested():
                run.compile(parts)
        return run.go(state)


@contextlib.contextmanager
def opened(
    exp: ExperimentConfig,
    corpus: Corpus,
    workdir: str,
    stop: PreemptionGuard,
    parts: Parts,
    upto: int | None = None,
    label: str = "",
) -> Iterator[tuple["Run", TrainState]]:
    """A run in its workdir, and the state it goes on from; closed at the end.

    ``upto``: later checkpoints are passed over. ``label``: stands before each line it prints.
    """
    shardings, scanned = parts.shardings, exp.model.scan_layers
    with Checkpoints(workdir, exp.checkpoint) as checkpoints:
        restored = checkpoints.restore(parts.on_disk, exp.to_dict(), upto)
        meta: dict[str, Any] = {}
        if restored is None:
            state = parts.first_state(exp)
            state = started(state, exp, corpus.vocab, workdir, shardings)
        else:
            state, meta = restored
            if scanned:
                of_state = state_shardings(shardings, parts.abstract)
                state = jax.jit(stack_layers, out_shardings=of_state)(state)
        evaluated = meta.get("evaluated", True)
        with RunLog(
            workdir,
            total_steps=exp.train.steps,
            unit=corpus.vocab.unit,
            resume_step=int(state.step),
            window=meta.get("window"),
            remade=None if evaluated else "valid",
            writes=processes.is_process_zero(),
            patient=exp.checkpoint.tolerate_save_errors,
            label=label,
        ) as log:
            streams = training_streams(exp, corpus)
            devices = shardings.mesh.size
            _tell_start(log, exp, corpus, streams, state, devices, restored is not None)
            run = Run(exp, streams, parts.evaluator, checkpoints, log, stop, shardings)
            run.evaluated, run.skipped = evaluated, meta.get("skipped_in_a_row", 0)
            try:
                yield run, state
            finally:
                log.message(log.goodput.line())


class Run:
    """The parts of a run and what must be remembered from one step to the next."""

    def __init__(self, exp, streams, evaluator, checkpoints, log, stop, shardings):
        self.exp: ExperimentConfig = exp
        self.streams: TrainingStreams = streams
        self.evaluator: Evaluator = evaluator
        self.checkpoints: Checkpoints = checkpoints
        self.log: RunLog = log
        self.stop: PreemptionGuard = stop
        self.shardings: Shardings = shardings
        self.text: DeviceText | None = None  # the training text, where it lies on the device
        self.pending: collections.deque = collections.deque()
        self.evaluated = True  # the last state that was due
        self.skipped = 0  # updates, in a row, up to the last one logged
        self.saved: set[int] = set(checkpoints.steps())
        # One layout on disk: layers one by one. A tree that has them so stays as it is.
        self.unstack = jax.jit(unstack_layers) if exp.model.scan_layers else lambda state: state

    def compile(self, parts: Parts) -> None:
        """Compiles the step before the clock of training runs."""
        step = compiled_step(
            self.exp, parts.model, parts.optimizer, parts.shardings, parts.abstract, self.text
        )
        self.step = self.compiled(step, parts.abstract, self.fed_shapes(), *self.with_text())

    def compiled(self, step: Callable[..., Any], *shapes: Any) -> Callable[..., Any]:
        """A jitted step compiled for these shapes; the time is told, and no time of training."""
        c = self.exp.model
        require_parity(c.kernel, c.d_head, c.dtype, c.dropatt)
        start = time.perf_counter()
        with self.log.pause("compile"):
            program = step.lower(*shapes).compile()  # type: ignore[attr-defined]
        self.log.message(f"compiled the step in {time.perf_counter() - start:.1f} s")
        return program

    def fed_shapes(self) -> Batch | BatchPosition:
        """Shapes of what a dispatch is sent: batches, or their places in the text."""
        t = self.exp.train
        none = self.of_step(self.streams, 0, t.epoch_memory, t.reset_every, slice(0))
        lead = (t.steps_per_dispatch,) if t.steps_per_dispatch > 1 else ()
        rows = lambda x: (t.batch_size, *x.shape[1:]) if x.ndim else ()
        shape = lambda x: jax.ShapeDtypeStruct((*lead, *rows(x)), x.dtype)
        return jax.tree.map(shape, none)

    @property
    def of_step(self) -> Callable[..., Batch | BatchPosition]:
        """What the feed reads for a step."""
        return training_batch if self.text is None else training_position

    def with_text(self) -> tuple[DeviceText, ...]:
        """What a dispatch takes besides."""
        return () if self.text is None else (self.text,)

    def go(self, state: TrainState) -> Outcome:
        """All steps that are left, or those until the run is told to stop."""
        t, step = self.exp.train, int(state.step)
        self.begin(step, state)
        sharding: Any = self.shardings.rows(t.steps_per_dispatch > 1)
        if self.text is not None:
            sharding = self.shardings.replicated()
        feed = training_feed(
            self.streams,
            step,
            t.steps,
            t.epoch_memory,
            t.steps_per_dispatch,
            sharding,
            t.reset_every,
            self.of_step,
        )
        try:
            for batch in self.log.goodput.waiting(feed):
                if self.stop.requested():
                    break
                state, metrics = self.step(state, batch, *self.with_text())
                step += t.steps_per_dispatch
                self.dispatched(step, metrics)
                if self.due(step):
                    self.keep(step, state)
        finally:
            feed.close()
        return self.end(step, state)

    def begin(self, step: int, state: TrainState) -> None:
        """The validation that the last run was stopped in is done first."""
        if not self.evaluated:
            self.evaluated = self.validate_and_save(step, state, again=True)

    def dispatched(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a dispatch that ends in ``step``; logs those of the one before."""
        self.pending.append((step, metrics))
        self.settle(keep=1)

    def due(self, step: int) -> bool:
        """Whether the state after a step is to be kept."""
        return self.validates(step) or step % self.exp.checkpoint.every == 0

    def validates(self, step: int) -> bool:
        """Whether it is to be validated."""
        t = self.exp.train
        return step == t.steps or (t.eval_every > 0 and step % t.eval_every == 0)

    def keep(self, step: int, state: TrainState) -> None:
        """Saves the state after a step, validated where that is due."""
        if self.validates(step):
            self.evaluated = self.validate_and_save(step, state)
        else:
            self.save(step, state, evaluated=True, loss=None)

    def end(self, step: int, state: TrainState) -> Outcome:
        """Saves what a run that was told to stop has done, and waits for the disk."""
        self.settle(keep=0)
        if self.stop.requested() and step and step not in self.saved:
            self.save(step, state, evaluated=True, loss=None)
        with self.log.pause("save"):
            self.checkpoints.wait()
        return Outcome(state, finished=step == self.exp.train.steps and self.evaluated)

    def validate_and_save(self, step: int, state: TrainState, again: bool = False) -> bool:
        """Logs the validation loss and saves it with the state; whether it was measured.

        Told to stop meanwhile, the state is saved without it, and the next run comes back here
        with ``again``.
        """
        self.settle(keep=0)
        if step == self.exp.train.steps:
            self.log.flush_window(step, epoch=self.epoch(step))
        with self.log.pause("evaluate"):
            scores = self.scores(step, state)
        loss, weights = None, None
        if scores is not None:
            losses = {name: score.loss for name, score in scores.items()}
            for value in losses.values():
                self.check_finite("validation loss", value, step)
            weights = chosen(losses, self.exp.average)
            loss = losses[weights]
            values = {"loss": loss, "targets": scores[weights].targets}
            if state.averages:
                values |= {f"loss_{name}": value for name, value in losses.items()}
            timing = {"seconds": sum(score.seconds for score in scores.values())}
            self.log.record("valid", step, values, timing, epoch=self.epoch(step))
        if not again or scores is not None:
            self.save(step, state, scores is not None, loss, again, weights)
        return scores is not None

    def scores(self, step: int, state: TrainState) -> dict[str, Score] | None:
        """Of the parameters and of each mean that has begun; ``None`` if told to stop meanwhile."""
        found = {}
        for name, params in candidates(state, self.exp.average, step).items():
            score = self.evaluator.run(params, stop=self.stop.requested)
            if score is None:
                return None
            found[name] = score
        return found

    def save(
        self,
        step: int,
        state: TrainState,
        evaluated: bool,
        loss: float | None,
        again: bool = False,
        weights: str | None = None,
    ) -> None:
        """A checkpoint of this step, in place of an earlier one if ``again``.

        ``weights``: which of its parameters are the model; ``None``: those that the config names.
        """
        self.settle(keep=0)  # raises where a loss or gradient that led to it is not finite
        if not again and step <= max(self.saved, default=0):
            return  # a run side by side that was ahead of the others has it
        self.check_state(step, state)
        names, use = list(candidates(state, self.exp.average, step)), self.exp.average.use
        meta = {
            "config": self.exp.to_dict(),
            "window": self.log.window,
            "evaluated": evaluated,
            "skipped_in_a_row": self.skipped,
            "weights": weights or (use if use in names else RAW),
            "candidates": names,
        }
        save = self.checkpoints.replace if again else self.checkpoints.save
        last = step == self.exp.train.steps or self.stop.signal is not None
        with self.log.pause("save"):
            self.write(self.checkpoints.wait)  # for the one before
            if self.write(lambda: save(step, self.unstack(state), meta, loss), needed=last):
                self.saved.add(step)

    def write(self, work: Callable[[], None], needed: bool = False) -> bool:
        """Whether what may fail on a full disk was done; raises, unless told to go on without."""
        try:
            work()
        except CheckpointError as error:
            many = processes.many()  # the others wait inside their own save
            if needed or many or not self.exp.checkpoint.tolerate_save_errors:
                raise
            self.log.message(f"{error}; going on without it")
            self.saved &= set(self.checkpoints.steps())
            return False
        return True

    def settle(self, keep: int) -> None:
        """Logs the metrics of all but the newest ``keep`` dispatches: the device runs ahead."""
        t = self.exp.train
        while len(self.pending) > keep:
            last, metrics = self.pending.popleft()
            values = {k: np.atleast_1d(np.asarray(v)) for k, v in metrics.items()}
            first = last - t.steps_per_dispatch + 1
            for i, step in enumerate(range(first, last + 1)):
                self.log_step(step, {k: float(v[i]) for k, v in values.items()})
                if step % t.log_every == 0:
                    self.log.flush_window(step, epoch=self.epoch(step))

    def log_step(self, step: int, one: dict[str, float]) -> None:
        """Adds a step's metrics to the log; raises where they or the skipped ones forbid more."""
        if one.get("skipped"):
            self.log_skipped(step, one)
            return
        self.skipped = 0
        self.check_finite("training loss", one["nll_sum"], step)
        self.check_finite("gradient norm", one["grad_norm"], step)
        self.log.train_step(
            step,
            one["nll_sum"],
            one["count"],
            one["grad_norm"],
            one["learning_rate"],
            int(one["tokens"]),
        )

    def log_skipped(self, step: int, one: dict[str, float]) -> None:
        """Counts and logs a skipped update; raises SkippedError at too many in a row."""
        why = reason(one)
        self.log.skipped_step(step, why, one["learning_rate"], int(one["tokens"]))
        self.skipped += 1
        if self.skipped >= self.exp.train.max_skipped:
            raise SkippedError(
                f"{self.skipped} updates in a row were skipped, the last at step {step}: {why};"
                f" stopped, {self.kept()}. {_REMEDY}; train.max_skipped is how many may be"
            )

    def kept(self) -> str:
        """Which checkpoint there is to go back to, in words."""
        newest = max(self.saved, default=None)
        return "no checkpoint was saved yet" if newest is None else f"checkpoint {newest} is kept"

    def check_finite(self, name: str, value: float, step: int) -> None:
        """Raises NonFiniteError, with what is kept, unless the value is finite."""
        if math.isfinite(value):
            return
        raise NonFiniteError(f"{name} is {value} at step {step}; stopped, {self.kept()}. {_REMEDY}")

    def check_state(self, step: int, state: TrainState) -> None:
        """Raises NonFiniteError unless the state is finite: an update can overflow by itself."""
        name = not_finite(state)
        if processes.failing(name is not None):
            what = f"{name or 'a part of the state'} is not finite after step {step}"
            raise NonFiniteError(f"{what}; stopped, {self.kept()}. {_REMEDY}")

    def epoch(self, step: int) -> float:
        """Passes over the training split after a step."""
        return self.streams.epochs(step)


def _tell_start(log, exp, corpus, streams, state, devices, resumed) -> None:
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    about = ", others are near it" if exp.train.seg_len_std else ""
    log.message(
        f"{exp.name}: {parameters:,} parameters, {devices} {jax.default_backend()} device(s);"
        f" {corpus.name}: {corpus.info['tokens']['train']:,} training tokens, vocabulary"
        f" {len(corpus.vocab):,}; an epoch is {streams.n_segments:,} steps{about}"
    )
    if exp.train.start_from and not resumed:
        log.message(f"starting from the parameters of {exp.train.start_from}")
    if resumed:
        log.message(f"resuming at step {int(state.step):,} of {exp.train.steps:,}")
