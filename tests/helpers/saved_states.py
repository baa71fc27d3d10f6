"""Untrained training states, different at each step, for tests of saving and restoring."""

import functools

import jax
import numpy as np
from tiny_runs import corpus_and_experiment

import txl_jax
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import init_state


@functools.cache
def _shapes(seed, model, train, optimizer, average):
    """The shapes of the state before the first step, from the settings that determine them."""
    sections = {"model": model, "train": train, "optimizer": optimizer, "average": average}
    exp = txl_jax.ExperimentConfig(seed=seed, **sections)
    init = lambda: init_state(exp, txl_jax.TransformerXL(model), make_optimizer(exp))
    return jax.eval_shape(init)


def zeros(folder, **changes):
    """An experiment, its state before the first step with all values 0, and the state's shapes."""
    _, exp = corpus_and_experiment(folder, **changes)
    shapes = _shapes(exp.seed, exp.model, exp.train, exp.optimizer, exp.average)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return exp, state, jax.tree.map(place, shapes)


def fresh(folder, **changes):
    """Returns the same as :func:`zeros`, but with random parameters."""
    exp, state, abstract = zeros(folder, **changes)
    rng = np.random.default_rng(exp.seed)
    draw = lambda x: rng.standard_normal(x.shape, np.float32)
    state = state.replace(params=jax.tree.map(draw, state.params))
    return exp, jax.device_put(state, jax.devices()[0]), abstract


def at_step(state, step):
    """The state with its step set, and with ``step`` added to every parameter."""
    params = jax.tree.map(lambda x: x + step, state.params)
    return state.replace(step=np.int32(step), params=params)


def restore(folder, exp, abstract):
    with Checkpoints(str(folder / "run"), exp.checkpoint) as checkpoints:
        return checkpoints.restore(abstract, exp.to_dict())
