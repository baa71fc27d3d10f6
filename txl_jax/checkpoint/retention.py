"""Which checkpoints of a run are kept: the newest, and the best by validation."""

from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep
from orbax.checkpoint.options import AsyncOptions

from txl_jax.config import CheckpointConfig

METRIC = "valid_loss"
"""Under which name a checkpoint has its validation loss in nats; infinite where not measured."""


class Manager(ocp.CheckpointManager):
    """Orbax's, which leaves it to training to ask JAX about notices: each call counts there."""

    def reached_preemption(self, step: int) -> bool:
        """Never: training asks for itself, at steps that all processes agree on."""
        return False


def options(c: CheckpointConfig | None) -> ocp.CheckpointManagerOptions:
    """What Orbax is told to keep; ``None``: for reading only, nothing is ever removed."""
    if c is None:
        return ocp.CheckpointManagerOptions(read_only=True)
    loss = lambda metrics: metrics[METRIC]
    policies: list[Any] = [keep.LatestN(n=c.keep_last)]
    if c.keep_best:
        policies.append(keep.BestN(get_metric_fn=loss, reverse=True, n=c.keep_best))
    return ocp.CheckpointManagerOptions(
        preservation_policy=keep.AnyPreservationPolicy(policies),
        best_fn=loss,
        best_mode="min",
        enable_async_checkpointing=True,
        # Made in a thread, a folder that cannot be made leaves the threads of its items waiting for
        # it, five minutes at the exit of the process. A save that cannot begin raises at once.
        async_options=AsyncOptions(create_directories_asynchronously=False),
    )
