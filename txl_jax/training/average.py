"""Weight averaging: averages of the parameters over updates.

For parameters w_1, w_2, .. after each update, with n = ``average.swa_start`` and
d = ``average.ema_decay``:

    swa            (w_{n+1} + .. + w_t) / (t - n)                     once t > n
    ema            e_t = e_{t-1} + (w_t - e_{t-1}) / min(t, 1/(1-d))

so that the exponential mean begins as the plain one and has no weight on where training began.
Which of them is the model is decided on validation (``average.use``); all are saved.
"""

from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.checkpoint.checkpoints import RAW
from txl_jax.config import AverageConfig
from txl_jax.training.state import TrainState


def averaged(state: TrainState, c: AverageConfig) -> TrainState:
    """The state after an update with its means brought up to it."""
    if not state.averages:
        return state
    step = state.step.astype(jnp.float32)
    seen = {"swa": step - c.swa_start}
    if c.ema_decay:
        seen["ema"] = jnp.minimum(step, 1 / (1 - c.ema_decay))
    means = {
        name: jax.tree.map(_towards(seen[name]), mean, state.params)
        for name, mean in state.averages.items()
    }
    return state.replace(averages=means)


def _towards(seen: jax.Array):
    """A mean of ``seen`` values with its newest; what it was where there is none yet."""
    weight = jnp.where(seen >= 1, 1 / jnp.maximum(seen, 1), 0)
    return lambda mean, new: mean + weight * (new - mean)


def candidates(state: TrainState, c: AverageConfig, step: int) -> dict[str, Any]:
    """The parameters of a state by name, ``raw`` and the means that have begun; of ``step``."""
    begun = {k: v for k, v in sorted(state.averages.items()) if k != "swa" or step > c.swa_start}
    return {RAW: state.params, **begun}


def chosen(losses: dict[str, float], c: AverageConfig) -> str:
    """Which of the candidates is the model, by validation losses or by name.

    One that is named and has not begun is ``raw`` until then.
    """
    if c.use == "best":
        return min(losses, key=lambda name: losses[name])
    return c.use if c.use in losses else RAW
