"""The training state: one pytree with everything that training changes, and parameter averages.

Let w_1, w_2, .. be the parameters after each update, n = ``average.swa_start``, and
d = ``average.ema_decay``:

    swa            (w_{n+1} + .. + w_t) / (t - n)                     once t > n
    ema            e_t = e_{t-1} + (w_t - e_{t-1}) / min(t, 1/(1-d))

The exponential average begins as an arithmetic mean, without weight on the initial parameters.
All averages are saved. ``average.use`` selects the parameters of the trained model at validation.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from txl_jax.checkpoint.checkpoints import RAW
from txl_jax.config import AverageConfig, ExperimentConfig
from txl_jax.messages import fields_repr
from txl_jax.model.memory import Memory, memory_shardings
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.shardings import Shardings


class TrainState(flax.struct.PyTreeNode):
    """The complete state of a run between two steps."""

    __repr__ = fields_repr

    step: jax.Array  # updates so far, int32 []; determines dropout and the position in the data
    params: Any  # float32 pytree
    opt_state: Any
    mems: Memory
    averages: dict[str, Any] = flax.struct.field(default_factory=dict)  # values like ``params``


def init_state(
    exp: ExperimentConfig,
    model: TransformerXL,
    optimizer: optax.GradientTransformation,
    seed: jax.Array | None = None,
) -> TrainState:
    """Returns the state before the first update, with parameters drawn from a seed.

    The function is pure, so it can run under ``jit`` and ``eval_shape``. ``seed`` is uint32 [], or
    ``None`` for the seed of the experiment.
    """
    t = exp.train
    mems = model.init_mems(t.batch_size, t.mem_len)
    tokens = jnp.zeros((t.batch_size, 1), jnp.int32)
    model = model.clone(cfg=dataclasses.replace(model.cfg, kernel="xla"))  # accepts any length
    init_key, _ = jax.random.split(jax.random.key(exp.seed if seed is None else seed))
    params = model.init(init_key, tokens, mems)["params"]
    enabled = (("swa", exp.average.swa_start), ("ema", exp.average.ema_decay))
    averages = {name: jax.tree.map(jnp.copy, params) for name, used in enabled if used}
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), mems, averages)


def state_shardings(shardings: Shardings, abstract: TrainState) -> TrainState:
    """Returns the shardings of a training state on a mesh, given its shapes."""
    return TrainState(
        step=shardings.replicated(),  # type: ignore[arg-type]
        params=shardings.parameters(abstract.params),
        opt_state=shardings.parameters(abstract.opt_state),
        mems=memory_shardings(shardings),
        averages=shardings.parameters(abstract.averages),
    )


def with_shardings(shapes: TrainState, shardings: Shardings) -> TrainState:
    """Adds the shardings on a mesh to the shapes of a state."""
    place = lambda x, sharding: x.update(sharding=sharding)
    return jax.tree.map(place, shapes, state_shardings(shardings, shapes))


def update_averages(state: TrainState, c: AverageConfig) -> TrainState:
    """Adds the new parameters to the averages of the state after an update."""
    if not state.averages:
        return state
    step = state.step.astype(jnp.float32)
    counts = {"swa": step - c.swa_start}
    if c.ema_decay:
        counts["ema"] = jnp.minimum(step, 1 / (1 - c.ema_decay))

    def updated(average, count):
        weight = jnp.where(count >= 1, 1 / jnp.maximum(count, 1), 0)
        return jax.tree.map(lambda mean, new: mean + weight * (new - mean), average, state.params)

    averages = {name: updated(average, counts[name]) for name, average in state.averages.items()}
    return state.replace(averages=averages)


def candidates(state: TrainState, c: AverageConfig, step: int) -> dict[str, Any]:
    """Returns the parameters after ``step``, named ``raw``, and the averages that have begun."""
    begun = {k: v for k, v in sorted(state.averages.items()) if k != "swa" or step > c.swa_start}
    return {RAW: state.params, **begun}


def choose_weights(losses: dict[str, float], c: AverageConfig) -> str:
    """Returns the name of the parameters that ``average.use`` selects.

    ``best`` selects the parameters with the lowest loss. ``raw`` replaces an average that has not
    begun.
    """
    if c.use == "best":
        return min(losses, key=lambda name: losses[name])
    return c.use if c.use in losses else RAW
