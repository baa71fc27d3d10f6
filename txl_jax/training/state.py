"""The training state: everything that training changes, in one pytree; averages of parameters.

For parameters w_1, w_2, .. after each update, with n = ``average.swa_start`` and
d = ``average.ema_decay``:

    swa            (w_{n+1} + .. + w_t) / (t - n)                     once t > n
    ema            e_t = e_{t-1} + (w_t - e_{t-1}) / min(t, 1/(1-d))

The exponential average begins as the plain one, without weight on the initial parameters.
Validation (``average.use``) decides which of them is the model; all are saved.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from txl_jax.checkpoint.checkpoints import RAW
from txl_jax.config import AverageConfig, ExperimentConfig
from txl_jax.model.memory import Memory, memory_shardings
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.shardings import Shardings
from txl_jax.training.optimizer import with_recent_norm


class TrainState(flax.struct.PyTreeNode):
    """State of a run; nothing else is carried from step to step."""

    step: jax.Array  # int32 [], updates done; gives dropout and the position in the data
    params: Any  # float32 pytree
    opt_state: Any
    mems: Memory
    averages: dict[str, Any] = flax.struct.field(default_factory=dict)  # each like ``params``


def init_state(
    exp: ExperimentConfig, model: TransformerXL, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state before the first update; pure, to be called under ``jit`` or ``eval_shape``."""
    t = exp.train
    mems = model.init_mems(t.batch_size, t.mem_len)
    tokens = jnp.zeros((t.batch_size, 1), jnp.int32)
    init_key, _ = jax.random.split(jax.random.key(exp.seed))
    params = model.init(init_key, tokens, mems)["params"]
    opt_state = with_recent_norm(optimizer, t).init(params)
    enabled = (("swa", exp.average.swa_start), ("ema", exp.average.ema_decay))
    averages = {name: jax.tree.map(jnp.copy, params) for name, used in enabled if used}
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, mems, averages)


def state_shardings(shardings: Shardings, abstract: TrainState) -> TrainState:
    """The shardings of a training state on a mesh, given its shapes."""
    return TrainState(
        step=shardings.replicated(),  # type: ignore[arg-type]
        params=shardings.parameters(abstract.params),
        opt_state=shardings.parameters(abstract.opt_state),
        mems=memory_shardings(shardings),
        averages=shardings.parameters(abstract.averages),
    )


def abstract_state(
    exp: ExperimentConfig,
    model: TransformerXL,
    optimizer: optax.GradientTransformation,
    shardings: Shardings,
) -> TrainState:
    """The shapes of :func:`init_state` with their shardings."""
    shapes = jax.eval_shape(lambda: init_state(exp, model, optimizer))
    return with_shardings(shapes, shardings)


def with_shardings(shapes: TrainState, shardings: Shardings) -> TrainState:
    """The shapes of a state with its shardings on a mesh."""
    place = lambda x, sharding: x.update(sharding=sharding)
    return jax.tree.map(place, shapes, state_shardings(shardings, shapes))


def dropout_key(seed: int | jax.Array, step: jax.Array) -> jax.Array:
    """The dropout key of a step, a function of seed and step alone."""
    _, run_key = jax.random.split(jax.random.key(seed))
    return jax.random.fold_in(run_key, step)


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
