"""The training loop: feed, step, log, validate, save. Thin: the step itself is pure."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from txl_jax import processes
from txl_jax.config import ConfigError, ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import training_batch, training_feed
from txl_jax.data.sentences import TrainingStreams, shuffled_streams_of, tokens_of
from txl_jax.evaluation.evaluate import Evaluator, evaluator_of
from txl_jax.model.kernels.parity import require_parity
from txl_jax.model.layout import stack_layers, unstack_layers
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.training.checkpoint import CheckpointError, Checkpoints
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.runlog import RunLog
from txl_jax.training.sharding import Placement, make_mesh
from txl_jax.training.skipping import SkippedError, reason
from txl_jax.training.start import started
from txl_jax.training.state import TrainState, init_state
from txl_jax.training.step import compiled_step
from txl_jax.training.stopping import Stop

_REMEDY = "Try a lower optimizer.learning_rate, more optimizer.warmup_steps, or model.dtype float32"


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not a number; names it, the step, and what is kept."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How training ended: the state, and whether all steps were done."""

    state: TrainState
    finished: bool


def train(exp: ExperimentConfig, corpus: Corpus, workdir: str, stop: Stop) -> Outcome:
    """Trains from the newest checkpoint of ``workdir``, or from the start, to the last step.

    A run that was killed and started again ends in the same bits as one that was not: the
    state is restored whole, data and dropout are functions of the step, and records after
    the checkpoint are made again.

    Raises:
      ConfigError, DataError: what does not fit the data, the devices or the model that is started
        from; before any work.
      CheckpointError: a checkpoint of another config, or one that cannot be written.
      NonFiniteError: a loss or gradient that is not finite; nothing is saved after it.
      SkippedError: too many updates in a row were skipped; nor is anything after this.
    """
    t = exp.train
    streams = training_streams(exp, corpus)
    mesh = make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches)
    placement = Placement(mesh)
    model = TransformerXL(exp.model, placement.for_model)
    optimizer = make_optimizer(exp.optimizer, t.steps)
    evaluator = evaluator_of(exp.model, exp.validate, corpus, mesh)

    init = lambda: init_state(exp, model, optimizer)
    abstract = _with_shardings(jax.eval_shape(init), placement)
    on_disk = _with_shardings(jax.eval_shape(unstack_layers, abstract), placement)
    with Checkpoints(workdir, exp.checkpoint) as checkpoints:
        restored = checkpoints.restore(on_disk, exp.to_dict())
        meta: dict[str, Any] = {}
        if restored is None:
            state = jax.jit(init, out_shardings=placement.state(abstract))()
            state = started(state, exp, corpus.vocab, workdir, placement)
        else:
            state, meta = restored
            if exp.model.scan_layers:
                state = jax.jit(stack_layers, out_shardings=placement.state(abstract))(state)
        start = int(state.step)
        with RunLog(
            workdir,
            total_steps=t.steps,
            unit=corpus.vocab.unit,
            resume_step=start,
            window=meta.get("window"),
            remade=None if meta.get("evaluated", True) else "valid",
            writes=processes.is_first(),
            patient=exp.checkpoint.go_on_without_saving,
        ) as log:
            _tell_start(log, exp, corpus, streams, state, mesh.size, restored is not None)
            run = _Run(exp, streams, evaluator, checkpoints, log, stop, placement)
            if start < t.steps:
                run.compile(model, optimizer, abstract)
            run.skipped = meta.get("skipped_in_a_row", 0)
            try:
                return run.go(state, evaluated=meta.get("evaluated", True))
            finally:
                log.message(log.spent.line())


class _Run:
    """The parts of a run and what must be remembered from one step to the next."""

    def __init__(self, exp, streams, evaluator, checkpoints, log, stop, placement):
        self.exp: ExperimentConfig = exp
        self.streams: TrainingStreams = streams
        self.evaluator: Evaluator = evaluator
        self.checkpoints: Checkpoints = checkpoints
        self.log: RunLog = log
        self.stop: Stop = stop
        self.placement: Placement = placement
        self.pending: collections.deque = collections.deque()
        self.skipped = 0  # updates, in a row, up to the last one logged
        self.saved: set[int] = set(checkpoints.steps())
        # One layout on disk: layers one by one. A tree that has them so stays as it is.
        self.unstack = jax.jit(unstack_layers) if exp.model.scan_layers else lambda state: state

    def compile(self, model, optimizer, abstract: TrainState) -> None:
        """Compiles the step before the clock of training runs."""
        t, c = self.exp.train, self.exp.model
        require_parity(c.kernel, c.d_head, c.dtype, c.dropatt)
        none = training_batch(self.streams, 0, t.epoch_memory, t.reset_every, slice(0))
        lead = (t.steps_per_dispatch,) if t.steps_per_dispatch > 1 else ()
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*lead, t.batch_size, *x.shape[1:]), x.dtype), none
        )
        start = time.perf_counter()
        with self.log.pause("compile"):
            step = compiled_step(self.exp, model, optimizer, self.placement, abstract)
            self.step = step.lower(abstract, shapes).compile()  # type: ignore[attr-defined]
        self.log.message(f"compiled the step in {time.perf_counter() - start:.1f} s")

    def go(self, state: TrainState, evaluated: bool) -> Outcome:
        """All steps that are left, or those until the run is told to stop."""
        t, step = self.exp.train, int(state.step)
        if not evaluated:  # the last run was stopped while it validated
            evaluated = self.validate_and_save(step, state, again=True)
        sharding = self.placement.batch(steps_axis=t.steps_per_dispatch > 1)
        feed = training_feed(
            self.streams,
            step,
            t.steps,
            t.epoch_memory,
            t.steps_per_dispatch,
            sharding,
            t.reset_every,
        )
        try:
            for batch in self.log.spent.waiting(feed):
                if self.stop.requested():
                    break
                state, metrics = self.step(state, batch)
                step += t.steps_per_dispatch
                self.pending.append((step, metrics))
                self.settle(keep=1)
                last = step == t.steps
                if last or (t.eval_every and step % t.eval_every == 0):
                    evaluated = self.validate_and_save(step, state)
                elif step % self.exp.checkpoint.every == 0:
                    self.save(step, state, evaluated=True, loss=None)
        finally:
            feed.close()
        self.settle(keep=0)
        if self.stop.requested() and step and step not in self.saved:
            self.save(step, state, evaluated=True, loss=None)
        with self.log.pause("save"):
            self.checkpoints.wait()
        return Outcome(state, finished=step == t.steps and evaluated)

    def validate_and_save(self, step: int, state: TrainState, again: bool = False) -> bool:
        """Logs the validation loss and saves it with the state; whether it was measured.

        Told to stop meanwhile, the state is saved without it, and the next run comes back here
        with ``again``.
        """
        self.settle(keep=0)
        if step == self.exp.train.steps:
            self.log.flush_window(step, epoch=self.epoch(step))
        with self.log.pause("evaluate"):
            score = self.evaluator.run(state.params, stop=self.stop.requested)
        loss = None
        if score is not None:
            loss = score.loss
            self.check_finite("validation loss", loss, step)
            values = {"loss": loss, "targets": score.targets}
            timing = {"seconds": score.seconds}
            self.log.record("valid", step, values, timing, epoch=self.epoch(step))
        if not again or score is not None:
            self.save(step, state, evaluated=score is not None, loss=loss, again=again)
        return score is not None

    def save(
        self,
        step: int,
        state: TrainState,
        evaluated: bool,
        loss: float | None,
        again: bool = False,
    ) -> None:
        """A checkpoint of this step, in place of an earlier one if ``again``."""
        self.settle(keep=0)  # what led to it was finite
        meta = {
            "config": self.exp.to_dict(),
            "window": self.log.window,
            "evaluated": evaluated,
            "skipped_in_a_row": self.skipped,
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
            if needed or many or not self.exp.checkpoint.go_on_without_saving:
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
        """Counts and tells a skipped update; raises SkippedError at too many in a row."""
        why = reason(one["nll_sum"], one["grad_norm"])
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

    def epoch(self, step: int) -> float:
        """Passes over the training split after a step."""
        return self.streams.epochs(step)


def check_fit(exp: ExperimentConfig, corpus: Corpus) -> None:
    """Raises ConfigError or DataError where the corpus or the devices cannot serve the config."""
    training_streams(exp, corpus)
    t = exp.train
    mesh = make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches)
    for protocol in (exp.validate, exp.evaluate):
        evaluator_of(exp.model, protocol, corpus, mesh)


def training_streams(exp: ExperimentConfig, corpus: Corpus) -> TrainingStreams:
    """The streams of the training split, checked against batch, memory and vocabulary."""
    t = exp.train
    streams = shuffled_streams_of(
        corpus.train,
        t.batch_size,
        t.seg_len,
        seed=exp.seed,
        name="the train split",
        vocab_size=exp.model.vocab_size,
        context_len=t.context_len,
        seg_len_std=t.seg_len_std,
        roll=t.roll_streams,
    )
    longest = len(tokens_of(corpus.train)) // t.batch_size
    for key, what in (("mem_len", "memory"), ("context_len", "context")):
        if getattr(t, key) > longest:
            raise ConfigError(
                f"config key train.{key} = {getattr(t, key)}: a stream of the train split has only"
                f" {longest} tokens at train.batch_size {t.batch_size}; use a shorter {what} or"
                " fewer streams"
            )
    return streams


def _with_shardings(abstract: TrainState, placement: Placement) -> TrainState:
    def place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, abstract, placement.state(abstract))


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
