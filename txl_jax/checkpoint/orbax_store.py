"""Saves and restores named items of a step with Orbax, and converts a training state to items."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep
from orbax.checkpoint.options import AsyncOptions

from txl_jax.checkpoint.checkpoint_folder import METRIC, TEMPORARY, write_manifest
from txl_jax.config import CheckpointConfig
from txl_jax.parallel import processes

RAW = "raw"  # the parameters as the last update left them, without averaging


class OrbaxStore:
    """Saves and restores the items of a step; opens Orbax's manager at its first use."""

    def __init__(self, folder: str, c: CheckpointConfig | None):
        self._folder, self._options = folder, _options(c, self._before_commit)
        self._manager: ocp.CheckpointManager | None = None
        self._step = 0

    def _opened(self) -> ocp.CheckpointManager:
        if self._manager is None:
            logging.set_stderrthreshold("error")
            self._manager = _Manager(self._folder, options=self._options)
        return self._manager

    def save(self, step: int, items: dict[str, Any], valid_loss: float | None) -> bool:
        """Starts to save, and returns once arrays are copied; False if Orbax refuses the step."""
        metrics = {METRIC: float("inf") if valid_loss is None else valid_loss}
        args = ocp.args.Composite(**items)
        self.wait()  # _before_commit of the save before this one needs its step
        self._step = step
        return self._opened().save(step, args=args, metrics=metrics)

    def _before_commit(self) -> None:
        """Writes the manifest; Orbax calls this method on process 0 when all items are on disk."""
        write_manifest(os.path.join(self._folder, f"{self._step}{TEMPORARY}"))

    def restore(self, step: int, shapes: dict[str, Any]) -> Any:
        """Returns the items of a step by name, with the given shapes, dtypes and shardings."""
        items = {name: ocp.args.StandardRestore(shape) for name, shape in shapes.items()}
        return self._opened().restore(step, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Waits until all saves have ended; raises the error, of any type, that a save raised."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Closes the manager; the next use opens a new manager, which reads the folder again."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def discard(self) -> None:
        """Closes the manager after a failed save, and ignores the error that closing raises."""
        with contextlib.suppress(Exception):
            self.close()
        self._manager = None


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which does not ask JAX about preemption; JAX counts each such call."""

    def reached_preemption(self, step: int) -> bool:
        return False  # training asks at steps on which all processes agree


def _options(
    c: CheckpointConfig | None, before_commit: Callable[[], None]
) -> ocp.CheckpointManagerOptions:
    if c is None:
        # As Orbax sets them itself for a folder that is only read, with a warning each.
        return ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0, create=False)
    loss = lambda metrics: metrics[METRIC]
    policies: list[Any] = [keep.LatestN(n=c.keep_last)]
    if c.keep_best:
        policies.append(keep.BestN(get_metric_fn=loss, reverse=True, n=c.keep_best))
    return ocp.CheckpointManagerOptions(
        preservation_policy=keep.AnyPreservationPolicy(policies),
        best_fn=loss,
        best_mode="min",
        enable_async_checkpointing=True,
        # Created synchronously: threads would wait five minutes for a folder that cannot be made.
        async_options=AsyncOptions(
            create_directories_asynchronously=False, post_finalization_callback=before_commit
        ),
    )


def params_item(weights: str) -> str:
    """The name of the item that holds the raw parameters or one of their averages."""
    return "params" if weights == RAW else f"average_{weights}"


def state_items(state: Any) -> dict[str, Any]:
    """Returns the arrays of a training state by item, without the empty arrays of the memory."""
    mems = {"hidden": state.mems.hidden, "filled": state.mems.filled}
    return {
        "params": state.params,
        "optimizer": state.opt_state,
        "mems": {name: array for name, array in mems.items() if array.size},
        **{params_item(name): average for name, average in state.averages.items()},
    }


def state_from_items(step: int, items: Any, abstract: Any) -> Any:
    """Returns the training state of a step, with the shapes and shardings of ``abstract``."""
    hidden = items["mems"].get("hidden")
    if hidden is None:  # M = 0: nothing was stored
        shape = abstract.mems.hidden
        hidden = processes.placed(np.zeros(shape.shape, shape.dtype), shape.sharding)
    return abstract.replace(
        step=processes.placed(np.asarray(step, "int32"), abstract.step.sharding),
        params=items["params"],
        opt_state=items["optimizer"],
        mems=abstract.mems.replace(hidden=hidden, filled=items["mems"]["filled"]),
        averages={name: items[params_item(name)] for name in abstract.averages},
    )
