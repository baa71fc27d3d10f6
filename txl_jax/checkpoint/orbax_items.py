"""Sets up Orbax for checkpoints of named items, and converts a training state to items and back.

An item is a part of a checkpoint with its own folder, such as ``params`` or ``optimizer``.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep
from orbax.checkpoint.options import AsyncOptions

from txl_jax.checkpoint.checkpoint_folder import METRIC
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.config import CheckpointConfig
from txl_jax.parallel import processes
from txl_jax.paths import BUCKETS, is_remote

RAW = "raw"  # the parameters as the last update left them, without averaging


logging.getLogger("absl").addFilter(
    lambda record: not record.getMessage().startswith("Given directory is read only")
)


class Manager(ocp.CheckpointManager):
    """Orbax's manager, but it never asks JAX about preemption, because JAX counts these calls."""

    def reached_preemption(self, step: int) -> bool:
        """Always false; training checks for preemption itself, at equal steps in all processes."""
        return False


def options(
    c: CheckpointConfig | None, before_commit: Callable[[], None]
) -> ocp.CheckpointManagerOptions:
    """Returns Orbax's options: to keep checkpoints as ``c`` says, or only to read if it is None."""
    if c is None:
        # For a read-only folder, Orbax would set the last two options itself, and warn about each.
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
        # If a folder cannot be made, Orbax's threads would otherwise wait for five minutes.
        async_options=AsyncOptions(
            create_directories_asynchronously=False, post_finalization_callback=before_commit
        ),
    )


def check_listed(folder: str, counts: Mapping[str, int]) -> None:
    """Raises CheckpointError unless each item has ``counts[item]`` arrays on disk.

    Orbax gives no error if it has not merged the files of its processes.
    """
    for item, expected in counts.items():
        base = _key_value_store(os.path.join(folder, item, ""))
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        found = sum(key.endswith(b"/.zarray") for key in store.list().result())
        if found != expected:
            raise CheckpointError(f"{item} has {found} arrays on disk instead of {expected}")


def _key_value_store(folder: str) -> dict[str, str]:
    if not is_remote(folder):
        return {"driver": "file", "path": folder}
    bucket, _, name = folder.removeprefix(BUCKETS).partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": name}


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
    if hidden is None:  # a memory of length 0 is not stored
        shape = abstract.mems.hidden
        hidden = processes.placed(np.zeros(shape.shape, shape.dtype), shape.sharding)
    return abstract.replace(
        step=processes.placed(np.asarray(step, "int32"), abstract.step.sharding),
        params=items["params"],
        opt_state=items["optimizer"],
        mems=abstract.mems.replace(hidden=hidden, filled=items["mems"]["filled"]),
        averages={name: items[params_item(name)] for name in abstract.averages},
    )
