"""Updates that are not made: where a number is not finite, or at a spike of the gradient's norm.

A skipped update leaves parameters and optimizer as they were. The step counts all the same, and
the learning rate goes on with it: dropout and position in the data stay functions of the step,
and what is left out is what this batch would have taught. Memory goes on too, but for streams
whose new states are not finite: theirs is emptied. One NaN in it would reach every later segment,
and the states from before are not of the text just before the next one.

    train.non_finite = skip      skip where the loss, the gradient's norm, or anything in the new
                                 parameters or the new optimizer state is not finite
    train.skip_spikes = f        skip where the norm is above f times the mean of recent ones
    train.max_skipped = n        n in a row stop training: skipping has not helped
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import TrainConfig
from txl_jax.model.memory import Memory
from txl_jax.training.optimizer import RecentNorm
from txl_jax.training.state import TrainState

FIRST_NORMS = 20
"""Before so many updates nothing is a spike: the mean is not one yet."""


class SkippedError(RuntimeError):
    """Too many updates in a row were skipped; names the last one's reason and what is kept."""


def may_skip(t: TrainConfig) -> bool:
    """Whether these settings ever skip an update; without, the step has nothing of it."""
    return t.non_finite == "skip" or t.skip_spikes > 0


def unless_bad(
    new: TrainState, old: TrainState, nll_sum: jax.Array, norm: jax.Array, t: TrainConfig
) -> tuple[TrainState, dict[str, jax.Array]]:
    """``new``, or ``old`` moved to the next segment without an update; and which of the two.

    Args:
      new, old: state after and before the update.
      nll_sum, norm: of this step, float32 []; the norm before clipping.
      t: what is skipped.

    Returns:
      The state. Metrics, float32 []: ``skipped``, 1 where the update was skipped, else 0; with
      ``train.non_finite=skip`` also ``update_finite``, 0 where it would have left parameters or
      optimizer state that are not finite, else 1.
    """
    finite = jnp.isfinite(nll_sum) & jnp.isfinite(norm)
    bad, metrics = jnp.zeros((), bool), {}
    if t.non_finite == "skip":
        update_finite = all_finite((new.params, new.opt_state))
        metrics["update_finite"] = update_finite.astype(jnp.float32)
        bad |= ~finite | ~update_finite
    if t.skip_spikes:
        bad |= finite & is_spike(norm, old.opt_state[0], t.skip_spikes)
    keep = lambda after, before: jnp.where(bad, before, after)
    kept = TrainState(
        step=new.step,
        params=jax.tree.map(keep, new.params, old.params),
        opt_state=_but_the_schedule(keep, new.opt_state, old.opt_state),
        mems=without_non_finite(new.mems),
        averages=new.averages,
    )
    return kept, {"skipped": bad.astype(jnp.float32), **metrics}


def all_finite(tree: Any) -> jax.Array:
    """Whether every floating-point number of a pytree is finite, bool []."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for _, x in _floats(tree)]))


def not_finite(tree: Any) -> str | None:
    """Name of the first array of a pytree that has a number that is not finite; ``None``: none.

    Each process looks at the parts that its own devices hold, one device at a time: no collective
    is run, and of copies on several devices one is read.
    """
    parts = [
        (path, part.data)
        for path, x in _floats(tree)
        for part in x.addressable_shards
        if part.replica_id == 0
    ]
    checked = [(path, _is_finite(data)) for path, data in parts]  # start all, then read
    bad = (path for path, finite in checked if not finite)
    return next((jax.tree_util.keystr(path, simple=True, separator="/") for path in bad), None)


_is_finite = jax.jit(lambda x: jnp.all(jnp.isfinite(x)))


def _floats(tree: Any) -> list[tuple[Any, Any]]:
    """Path and array of every leaf of floating-point numbers."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(path, x) for path, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def is_spike(norm: jax.Array, recent: RecentNorm, factor: float) -> jax.Array:
    """Whether a norm is above ``factor`` times the recent mean, bool []."""
    return (recent.seen >= FIRST_NORMS) & (norm > factor * recent.mean)


def without_non_finite(mems: Memory) -> Memory:
    """The memory, emptied for every stream with a state that is not finite."""
    finite = jnp.all(jnp.isfinite(mems.hidden), axis=(0, 2, 3))
    return Memory(
        hidden=jnp.where(finite[None, :, None, None], mems.hidden, 0),  # hidden by no mask: NaN * 0
        filled=jnp.where(finite, mems.filled, 0),
    )


def _but_the_schedule(keep, new, old):
    """``keep`` for every leaf of an optimizer's state but the count that is the schedule's step."""
    is_count = lambda node: isinstance(node, optax.ScaleByScheduleState)
    choose = lambda after, before: after if is_count(after) else keep(after, before)
    return jax.tree.map(choose, new, old, is_leaf=is_count)


def reason(metrics: Mapping[str, float]) -> str:
    """Why a step with these metrics was skipped, in words."""
    for name, key in (("training loss", "nll_sum"), ("gradient norm", "grad_norm")):
        if not math.isfinite(metrics[key]):
            return f"{name} is {metrics[key]}"
    if not metrics.get("update_finite", 1.0):
        return "the update is not finite, although loss and gradient are"
    return f"gradient norm {metrics['grad_norm']:.4g} is a spike"
