"""Logs, validates and saves the run of one seed, and makes its state, program and inputs.

The loop is in loop.py. A dispatch is one call of the compiled program, which makes one or several
updates. Its metrics are read after the next dispatch, so the device does not wait for the host.
"""

import collections
import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax.checkpoint.checkpoints import RAW, Checkpoints
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.checkpoint.trained_model import parameter_count
from txl_jax.checkpoint.workdir_files import AUTOTUNED
from txl_jax.config import ConfigError, optax_rules
from txl_jax.config.changes import changed_validation
from txl_jax.data.feed import training_batch, training_feed
from txl_jax.data.on_device import DeviceText, device_text, training_position
from txl_jax.evaluation.evaluator import Score
from txl_jax.messages import shown_path
from txl_jax.model.layout import stack_layers, unstack_layers
from txl_jax.model.precision import describe
from txl_jax.parallel import processes
from txl_jax.parallel.autotuning import kept_choices
from txl_jax.parallel.device_memory import TRAINING, check_program
from txl_jax.parallel.mesh import idle_devices
from txl_jax.progress import waiting_for
from txl_jax.training.distil import soft_targets
from txl_jax.training.events import Logger
from txl_jax.training.fine_tuning import load_initial_params
from txl_jax.training.goodput import GoodputTimer
from txl_jax.training.plan import Plan, SeedRun
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.run_log import RunLog
from txl_jax.training.skipping import (
    REMEDY,
    SkippedError,
    check_finite,
    check_state,
    skip_reason,
)
from txl_jax.training.state import TrainState, candidates, choose_weights, state_shardings
from txl_jax.training.step import Metrics, dispatch_shapes

Program = Callable[[Any, Any], tuple[Any, Metrics]]


class Outcome(NamedTuple):
    """The result of training: the final state, and whether all steps were done and validated."""

    state: TrainState
    finished: bool


class Trainer:
    """Logs, validates and saves the run of one seed, and holds its variables between steps.

    A trainer starts at the newest checkpoint of the workdir, ignoring those after ``last_step`` if
    it is a number. ``step`` is the step of this checkpoint, or 0 without one. :class:`RunLog`
    explains ``logger`` and ``goodput``. ``validated`` tells whether the most recent scheduled
    validation was completed. The training loop calls ``load_text``, ``program``, ``make_state``,
    ``feed`` and ``part``. With several seeds, it calls the methods with these names of
    ``StackedSeeds`` (multi_seed.py).
    """

    def __init__(
        self,
        plan: Plan,
        run: SeedRun,
        checkpoints: Checkpoints,
        guard: PreemptionGuard,
        logger: Logger,
        last_step: int | None,
        goodput: GoodputTimer,
    ):
        self.exp, workdir, self.streams = run
        self.corpus, self.setup, self.evaluator = plan.corpus, plan.setup, plan.validation
        self.checkpoints, self.guard = checkpoints, guard
        self.text: DeviceText | None = None
        # make_state empties this list: a remaining reference would keep a second state in memory.
        found = checkpoints.restore(self.setup.on_disk, self.exp.to_dict(), last_step)
        self._restored, meta = ([found[0]], found[1]) if found else ([], {})
        self._resumed = found is not None
        self.step = int(found[0].step) if found else 0
        self._saved = set(checkpoints.steps())
        scanned = self.exp.model.scan_layers
        self._unstack = jax.jit(unstack_layers) if scanned else lambda state: state
        self.validated: bool = meta.get("evaluated", True)
        self._skipped_in_a_row: int = meta.get("skipped_in_a_row", 0)
        self._pending: collections.deque[tuple[int, Metrics]] = collections.deque()
        self.log = RunLog(
            workdir,
            total_steps=self.exp.train.steps,
            unit=self.corpus.vocab.unit,
            resume_step=self.step,
            window=meta.get("window"),
            rewritten=None if self.validated else "valid",
            writes=processes.is_process_zero(),
            tolerate_errors=self.exp.checkpoint.tolerate_save_errors,
            label=f"seed {self.exp.seed}" if len(plan.runs) > 1 else "",
            goodput=goodput,
            logger=logger,
            config=self.exp.to_dict(),
            attention=self.setup.attention.name,
        )
        if changed := changed_validation(meta.get("config", {}), self.exp):
            self.log.message(
                f"note: since checkpoint {self.step} validation has changed ({'; '.join(changed)});"
                " the best checkpoint is chosen from losses before and after the change"
            )

    @property
    def trainers(self) -> list["Trainer"]:
        """A list of this trainer alone; the list of ``StackedSeeds`` has one for each seed."""
        return [self]

    def remove_later_checkpoints(self) -> None:
        """Removes this seed's checkpoints after ``step``, the newest step that all seeds have.

        While later checkpoints exist, the run cannot save an earlier step.
        """
        if later := sorted(step for step in self._saved if step > self.step):
            steps = ", ".join(map(str, later))
            self.log.message(f"removed checkpoints {steps}, by which this seed was ahead of others")
            self.checkpoints.remove_after(self.step)
            self._saved -= set(later)

    def close(self) -> None:
        """Prints how long each activity took, and closes the log."""
        self.log.message(self.log.goodput.line())
        self.log.close()

    def log_start(self) -> None:
        """Prints the sizes of model and text, devices, precision, kernel and starting point."""
        exp, corpus, t = self.exp, self.corpus, self.exp.train
        mesh, attention = self.setup.shardings.mesh, self.setup.attention
        n_params = parameter_count(self.setup.abstract.params)
        about = "about " if t.seg_len_std else ""
        lines = [
            f"{exp.name}: {n_params:,} parameters, {mesh.size} {jax.default_backend()} device(s);"
            f" {corpus.name}: {corpus.info['tokens']['train']:,} training tokens, vocabulary"
            f" {len(corpus.vocab):,}; an epoch is {about}{self.streams.n_segments:,} steps",
            idle_devices(mesh, exp.mesh, t.batch_size, t.micro_batches),
            *describe(exp.model, mesh),
            optax_rules.own_rate(exp.optimizer.name, exp.optimizer.learning_rate),
            f"{'warning: ' * attention.falls_back}attention by {attention.describe()}",
        ]
        if self._resumed:
            doing = "finished" if self.step == t.steps else "resuming"
            lines.append(f"{doing} at step {self.step:,} of {t.steps:,}")
        elif t.start_from:
            lines.append(f"starting from the parameters of {shown_path(t.start_from)}")
        for line in filter(None, lines):
            self.log.message(line)

    def load_text(self) -> None:
        """Loads soft targets, and places the text on the devices if ``train.text_on_device``."""
        report, stop = self.log.message, self.guard.requested
        soft = soft_targets(self.exp, self.corpus, self.log.workdir, report, stop)
        if self.exp.train.text_on_device:
            text = device_text(self.streams, soft)
            self.text = jax.device_put(text, self.setup.shardings.rows())

    def make_state(self) -> TrainState:
        """Returns the restored state, or draws the initial state. Call this method only once."""
        exp, setup = self.exp, self.setup
        if not self._resumed:
            if exp.train.start_from is None:
                return setup.initial_state(exp)
            where = self.log.workdir, setup.shardings
            return load_initial_params(setup.initial_state(exp), setup.optimizer, exp, *where)
        if not exp.model.scan_layers:  # the layers in checkpoints are never stacked
            return self._restored.pop()
        layout = state_shardings(setup.shardings, setup.abstract)
        return jax.jit(stack_layers, out_shardings=layout)(self._restored.pop())

    def program(self) -> Program:
        """Compiles one dispatch: a function of a state and of the inputs of the dispatch."""
        text = () if self.text is None else (self.text,)
        compiled = self.compile(self.setup.abstract, self.input_shapes(), *text)
        return lambda state, inputs: compiled(state, inputs, *text)

    def compile(self, *shapes: Any) -> Callable[..., Any]:
        """Compiles a dispatch for these shapes. The time does not count as training time."""
        start, file = time.perf_counter(), os.path.join(self.log.workdir, AUTOTUNED)
        with self.log.goodput.pause("compile"), waiting_for("compiling the step"):
            lowered = self.setup.update(self.text).lower(*shapes)
            with kept_choices(lowered, self.setup.shardings.mesh, file) as options:
                program = check_program(TRAINING, lowered, self._resumed, options)
        self.log.message(f"compiled the step in {time.perf_counter() - start:.1f} s")
        return program

    def feed(self, step: int, sharded: bool = True) -> Generator[Any, None, None]:
        """Yields the inputs of every dispatch from ``step`` on, sharded or on one device."""
        t, shardings = self.exp.train, self.setup.shardings
        read: Callable[..., Any] = training_batch
        sharding = shardings.rows(t.steps_per_dispatch > 1)
        if self.text is not None:
            read, sharding = training_position, shardings.replicated()
        settings = (t.epoch_memory, t.steps_per_dispatch, sharding if sharded else None)
        return training_feed(self.streams, step, t.steps, *settings, t.reset_every, read)

    def input_shapes(self) -> Any:
        """Returns the shapes of the input of a dispatch: batches, or positions in the text."""
        return dispatch_shapes(self.exp.train, self.streams)

    def part(self, tree: Any, seed: int) -> Any:
        """Returns the whole state or the whole metrics, because this trainer has only one seed."""
        return tree

    def step_done(self, step: int, metrics: Metrics, state: Callable[[], TrainState]) -> None:
        """Logs the previous dispatch, then validates or saves the state if due after ``step``."""
        self._pending.append((step, metrics))
        self._flush_metrics(keep=1)
        t = self.exp.train
        if step == t.steps or (t.eval_every > 0 and step % t.eval_every == 0):
            self.validated = self.validate(step, state())
        elif step % self.exp.checkpoint.every == 0:
            self._save(step, state())

    def finish(self, step: int, state: TrainState) -> Outcome:
        """Saves the state if the run was asked to stop, and waits until the save is complete."""
        self._flush_metrics()
        if self.guard.requested() and step and step not in self._saved:
            self._save(step, state)
        with self.log.goodput.pause("save"):
            self.checkpoints.wait()
        return Outcome(state, finished=step == self.exp.train.steps and self.validated)

    def validate(self, step: int, state: TrainState, replace: bool = False) -> bool:
        """Computes and logs the validation loss, and saves the state with this loss.

        Returns False if the run was asked to stop. The state is then saved without a loss, and the
        resumed run calls this method with ``replace``: its checkpoint replaces the one without a
        loss.
        """
        self._flush_metrics()
        if step == self.exp.train.steps:
            self.log.flush_window(step, epoch=self.streams.epochs(step))
        scores: dict[str, Score] = {}
        try:
            with self.log.goodput.pause("evaluate"):
                for name, params in candidates(state, self.exp.average, step).items():
                    score = self.evaluator.run(params, stop=self.guard.requested)
                    if score is None:
                        break
                    scores[name] = score
        except ConfigError:  # the devices have too little memory
            if not replace:
                self._save(step, state, evaluated=False)
            raise
        if score is None:
            if not replace:
                self._save(step, state, evaluated=False)
            return False
        losses = {name: score.loss for name, score in scores.items()}
        for value in losses.values():
            check_finite("validation loss", value, step, self._newest())
        best = choose_weights(losses, self.exp.average)
        values = {"loss": losses[best], "targets": scores[best].targets}
        if state.averages:
            values |= {f"loss_{name}": loss for name, loss in losses.items()}
        timing = {"seconds": sum(score.seconds for score in scores.values())}
        self.log.record("valid", step, values, timing, epoch=self.streams.epochs(step))
        self._save(step, state, losses[best], replace, weights=best)
        return True

    def _save(
        self, step: int, state: TrainState, loss: float | None = None, replace: bool = False, **more
    ) -> None:
        """Starts to save a checkpoint with the validation ``loss`` and ``more`` metadata.

        By default, the metadata say that no validation is pending, and that ``average.use`` selects
        the model. Raises CheckpointError if a save fails. With one process and
        ``checkpoint.tolerate_save_errors``, it is raised only for the last save of a run.
        """
        self._flush_metrics()  # raises an error if an earlier loss or gradient is not finite
        names, use = list(candidates(state, self.exp.average, step)), self.exp.average.use
        meta = {
            "config": self.exp.to_dict(),
            "window": self.log.window,
            "evaluated": True,
            "skipped_in_a_row": self._skipped_in_a_row,
            "weights": use if use in names else RAW,
            "candidates": names,
            **more,
        }
        save = self.checkpoints.replace if replace else self.checkpoints.save
        last = step == self.exp.train.steps or self.guard.signal is not None
        tolerant = self.exp.checkpoint.tolerate_save_errors and not processes.many()
        with self.log.goodput.pause("save"):
            check_state(state, step, self._newest())
            with self._failing(tolerant):
                self.checkpoints.wait()  # for the save before this one
            with self._failing(tolerant and not last):
                save(step, self._unstack(state), meta, loss)
                self._saved.add(step)

    @contextlib.contextmanager
    def _failing(self, tolerated: bool) -> Iterator[None]:
        """Logs that a save failed, or raises CheckpointError if that is not tolerated.

        With several processes, no failure is tolerated: each process waits for all others to save.
        """
        try:
            yield
        except CheckpointError as error:
            if not tolerated:
                raise
            self.log.message(f"{error}; training continues without this checkpoint")
            self._saved &= set(self.checkpoints.steps())

    def _newest(self) -> str:
        """Returns a clause that names the checkpoint from which a failed run can resume."""
        if not self._saved:
            return "no checkpoint was saved yet"
        return f"checkpoint {max(self._saved)} is kept"

    def _flush_metrics(self, keep: int = 0) -> None:
        """Logs the pending metrics of all dispatches except the newest ``keep``."""
        t = self.exp.train
        while len(self._pending) > keep:
            last, metrics = self._pending.popleft()
            values = {k: np.atleast_1d(np.asarray(v)) for k, v in metrics.items()}
            for i, step in enumerate(range(last - t.steps_per_dispatch + 1, last + 1)):
                self._log_step(step, {k: float(v[i]) for k, v in values.items()})
                if step % t.log_every == 0:
                    self.log.flush_window(step, epoch=self.streams.epochs(step))

    def _log_step(self, step: int, metrics: dict[str, float]) -> None:
        kept = self._newest()
        if metrics.get("skipped"):
            self._skipped_in_a_row += 1
            reason, n = skip_reason(metrics), self._skipped_in_a_row
            self.log.skipped_step(step, reason, metrics)
            if n >= self.exp.train.max_skipped:
                raise SkippedError(
                    f"{n} updates in a row were skipped, the last at step {step}: {reason};"
                    f" training stopped, and {kept}. {REMEDY}, or raise train.max_skipped"
                )
        else:
            self._skipped_in_a_row = 0
            check_finite("training loss", metrics["nll_sum"], step, kept)
            check_finite("gradient norm", metrics["grad_norm"], step, kept)
            self.log.train_step(step, metrics)
