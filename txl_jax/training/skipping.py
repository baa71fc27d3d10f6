"""Skips an update or stops training if numbers are not finite or the gradient norm is a spike.

A skipped update leaves the parameters and the optimizer state unchanged. The step still counts, so
the learning rate, the dropout and the position in the data remain functions of the step. The memory
also advances. But if the new states of a stream are not finite, its memory is emptied, because NaN
would persist in it.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import TrainConfig
from txl_jax.messages import UserError
from txl_jax.model.memory import Memory
from txl_jax.parallel import processes
from txl_jax.training.state import TrainState

SPIKE_WARMUP = 20  # updates that the mean norm needs before a norm can count as a spike
REMEDY = "Try a lower optimizer.learning_rate, more optimizer.warmup_steps, or model.dtype float32"


class NonFiniteError(UserError, RuntimeError):
    """A loss, gradient or state is not finite. The message has the step and the last checkpoint."""


class SkippedError(UserError, RuntimeError):
    """Too many updates in a row were skipped. The message has the last reason and checkpoint."""


def check_finite(name: str, value: float, step: int, kept: str) -> None:
    """Raises NonFiniteError unless the value is finite. ``kept`` names the last checkpoint."""
    if not math.isfinite(value):
        what = f"{name} is {value} at step {step}"
        raise NonFiniteError(f"{what}; training stopped, and {kept}. {REMEDY}")


def check_state(state: TrainState, step: int, kept: str) -> None:
    """Raises NonFiniteError on all processes unless the whole state is finite."""
    name = non_finite_leaf(state)
    if processes.failing(name is not None):
        what = f"{name or 'a part of the state'} is not finite after step {step}"
        raise NonFiniteError(f"{what}; training stopped, and {kept}. {REMEDY}")


def skip_bad_update(
    new: TrainState, old: TrainState, nll_sum: jax.Array, norm: jax.Array, t: TrainConfig
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns the state after an update, and metrics that say whether the update was skipped.

    ``old`` and ``new`` are the states before and after the update. If the update is bad, the
    parameters and the optimizer state are those of ``old``, except the step count of the schedule.
    With ``train.non_finite=skip``, an update is bad if the loss, the gradient norm, the new
    parameters or the new optimizer state are not finite. With ``train.skip_spikes``, an update is
    bad if the norm is a spike. ``nll_sum`` and the gradient norm before clipping, ``norm``, are
    float32 []. The returned metrics are 0 or 1, float32 []. ``skipped`` tells whether the update
    was bad. ``update_finite`` tells whether the new parameters and the new optimizer state are
    finite; only ``non_finite=skip`` gives this metric.
    """
    if t.non_finite != "skip" and not t.skip_spikes:
        return new, {}
    finite = jnp.isfinite(nll_sum) & jnp.isfinite(norm)
    bad, metrics = jnp.zeros((), bool), {}
    if t.non_finite == "skip":
        leaves = _float_leaves((new.params, new.opt_state))
        update_finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for _, x in leaves]))
        metrics["update_finite"] = update_finite.astype(jnp.float32)
        bad |= ~finite | ~update_finite
    if t.skip_spikes:
        recent = old.opt_state[0]
        bad |= finite & (recent.seen >= SPIKE_WARMUP) & (norm > t.skip_spikes * recent.mean)
    keep = lambda after, before: jnp.where(bad, before, after)
    finite_stream = jnp.all(jnp.isfinite(new.mems.hidden), axis=(0, 2, 3))
    hidden = jnp.where(finite_stream[None, :, None, None], new.mems.hidden, 0)  # NaN * 0 is NaN
    # The step count of the schedule advances even if the update is skipped.
    is_count = lambda node: isinstance(node, optax.ScaleByScheduleState)
    keep_rest = lambda after, before: after if is_count(after) else keep(after, before)
    kept = new.replace(
        params=jax.tree.map(keep, new.params, old.params),
        opt_state=jax.tree.map(keep_rest, new.opt_state, old.opt_state, is_leaf=is_count),
        mems=Memory(hidden, jnp.where(finite_stream, new.mems.filled, 0)),
    )
    return kept, {"skipped": bad.astype(jnp.float32), **metrics}


def non_finite_leaf(tree: Any) -> str | None:
    """Returns the name of the first array of a pytree that is not finite, or ``None``.

    Each process checks its own shards, without communication. Of copies, only replica 0 is checked.
    """
    checked = [  # all checks are started before the first result is read
        (jax.tree_util.keystr(path, simple=True, separator="/"), _is_finite(shard.data))
        for path, x in _float_leaves(tree)
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]
    return next((name for name, finite in checked if not finite), None)


_is_finite = jax.jit(lambda x: jnp.all(jnp.isfinite(x)))


def _float_leaves(tree: Any) -> list[tuple[Any, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(path, x) for path, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def skip_reason(metrics: Mapping[str, float]) -> str:
    """Returns the reason why a step with these metrics was skipped."""
    for name, key in (("training loss", "nll_sum"), ("gradient norm", "grad_norm")):
        if not math.isfinite(metrics[key]):
            return f"{name} is {metrics[key]}"
    if not metrics.get("update_finite", 1.0):
        return "the update is not finite, although loss and gradient are"
    norm = f"{metrics['grad_norm']:.4g}"
    return f"gradient norm {norm} is over train.skip_spikes times the recent mean"
