"""Weight averaging: averages of the parameters over updates.

For parameters w_1, w_2, .. after each update, with n = ``average.swa_start`` and
d = ``average.ema_decay``:

    swa            (w_{n+1} + .. + w_t) / (t - n)                     once t > n
    ema            e_t = e_{t-1} + (w_t - e_{t-1}) / min(t, 1/(1-d))

The exponential average begins as the plain one, without weight on the initial parameters.
Validation (``average.use``) decides which of them is the model; all are saved.
"""

from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.checkpoint.checkpoints import RAW
from txl_jax.config import AverageConfig
from txl_jax.training.state import TrainState


def update_averages(state: TrainState, c: AverageConfig) -> TrainState:
    """The state after an update, with the new parameters in its averages."""
    if not state.averages:
        return state
    step = state.step.astype(jnp.float32)
    counts = {"swa": step - c.swa_start}
    if c.ema_decay:
        counts["ema"] = jnp.minimum(step, 1 / (1 - c.ema_decay))
    averages = {}
    for name, average in state.averages.items():
        weight = jnp.where(counts[name] >= 1, 1 / jnp.maximum(counts[name], 1), 0)
        move = lambda mean, new: mean + weight * (new - mean)  # noqa: B023  (used at once)
        averages[name] = jax.tree.map(move, average, state.params)
    return state.replace(averages=averages)


def candidates(state: TrainState, c: AverageConfig, step: int) -> dict[str, Any]:
    """The parameters of the state of ``step``, ``raw``, and the averages that have begun."""
    begun = {k: v for k, v in sorted(state.averages.items()) if k != "swa" or step > c.swa_start}
    return {RAW: state.params, **begun}


def choose_weights(losses: dict[str, float], c: AverageConfig) -> str:
    """The model among candidates: the best, or the one named; ``raw`` if that has not begun."""
    if c.use == "best":
        return min(losses, key=lambda name: losses[name])
    return c.use if c.use in losses else RAW
