"""Updates that are not made: at a gradient that is not a number, or at a spike of its norm.

A skipped update leaves parameters and optimizer as they were. The step counts all the same, and
the learning rate goes on with it: dropout and position in the data stay functions of the step,
and what is left out is what this batch would have taught. Memory goes on too, but for streams
whose new states are not finite: theirs is emptied. One NaN in it would reach every later segment,
and the states from before are not of the text just before the next one.

    train.non_finite = skip      skip where the loss or the gradient's norm is not finite
    train.skip_spikes = f        skip where the norm is above f times the mean of recent ones
    train.max_skipped = n        n in a row stop training: skipping has not helped
"""

import math

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
) -> tuple[TrainState, jax.Array]:
    """``new``, or ``old`` gone on to the next segment without an update; and which it is.

    Args:
      new, old: state after and before the update.
      nll_sum, norm: of this step, float32 []; the norm before clipping.
      t: what is skipped.

    Returns:
      The state; float32 [], 1 where the update was skipped, else 0.
    """
    finite = jnp.isfinite(nll_sum) & jnp.isfinite(norm)
    bad = jnp.zeros((), bool)
    if t.non_finite == "skip":
        bad |= ~finite
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
    return kept, bad.astype(jnp.float32)


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


def reason(nll_sum: float, norm: float) -> str:
    """Why a step with these metrics was skipped, in words."""
    for name, value in (("training loss", nll_sum), ("gradient norm", norm)):
        if not math.isfinite(value):
            return f"{name} is {value}"
    return f"gradient norm {norm:.4g} is a spike"
