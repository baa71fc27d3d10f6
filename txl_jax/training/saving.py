"""Checkpoints of a training run: restoring, saving, and whether a failed save stops training."""

from collections.abc import Callable
from typing import Any

import jax

from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.config import ExperimentConfig
from txl_jax.model.layout import stack_layers, unstack_layers
from txl_jax.parallel import processes
from txl_jax.training.setup import TrainSetup
from txl_jax.training.skipping import check_state
from txl_jax.training.state import TrainState, state_shardings


class CheckpointSaver:
    """Saves and restores the state of a run, and applies ``checkpoint.tolerate_save_errors``.

    Checkpoints have unstacked layers, whatever layout the run itself has. ``steps``, those with a
    checkpoint, are known after :meth:`restore`.
    """

    def __init__(self, checkpoints: Checkpoints, exp: ExperimentConfig):
        self.checkpoints, self._exp = checkpoints, exp
        self._unstack = jax.jit(unstack_layers) if exp.model.scan_layers else lambda state: state
        self.steps: set[int] = set()

    def restore(
        self, setup: TrainSetup, last_step: int | None
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """State and metadata of the newest intact checkpoint, up to ``last_step``."""
        restored = self.checkpoints.restore(setup.on_disk, self._exp.to_dict(), last_step)
        self.steps = set(self.checkpoints.steps())
        if restored is None or not self._exp.model.scan_layers:
            return restored
        layout = state_shardings(setup.shardings, setup.abstract)
        return jax.jit(stack_layers, out_shardings=layout)(restored[0]), restored[1]

    def save(
        self,
        step: int,
        state: TrainState,
        meta: dict[str, Any],
        valid_loss: float | None,
        warn: Callable[[str], None],
        *,
        replace: bool,
        required: bool,
    ) -> None:
        """Waits for the previous save, then starts to save the state, or to ``replace`` it.

        ``warn`` prints a failure that is tolerated; one that is ``required`` never is. Raises
        CheckpointError if the state cannot be written, NonFiniteError if it is not finite.
        """
        if not replace and step <= max(self.steps, default=0):
            return  # of several seeds, this one was ahead of the others when they were stopped
        check_state(state, step, self.newest())
        save = self.checkpoints.replace if replace else self.checkpoints.save
        start = lambda: save(step, self._unstack(state), meta, valid_loss)
        tolerant = self._exp.checkpoint.tolerate_save_errors and not processes.many()
        for work, needed in ((self.checkpoints.wait, False), (start, required)):
            try:
                work()
                self.steps |= {step} if work is start else set()
            except CheckpointError as error:
                if needed or not tolerant:  # other processes wait inside their own save
                    raise
                warn(f"{error}; training continues without this checkpoint")
                self.steps &= set(self.checkpoints.steps())

    def newest(self) -> str:
        """Names the checkpoint that a failed run can resume from."""
        if not self.steps:
            return "no checkpoint was saved yet"
        return f"checkpoint {max(self.steps)} is kept"
