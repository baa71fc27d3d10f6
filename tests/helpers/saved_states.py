"""States that are saved without training, each step's different, and read again."""

import jax
import numpy as np
from tiny_runs import corpus_and_experiment

import txl_jax
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import init_state


def fresh(folder, **changes):
    """An experiment and its state before the first step."""
    _, exp = corpus_and_experiment(folder, **changes)
    model = txl_jax.TransformerXL(exp.model)
    state = init_state(exp, model, make_optimizer(exp))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state
    )
    return exp, state, abstract


def at_step(state, step):
    """A state that differs from step to step."""
    params = jax.tree.map(lambda x: x + step, state.params)
    return state.replace(step=np.int32(step), params=params)


def restore(folder, exp, abstract):
    with Checkpoints(str(folder / "run"), exp.checkpoint) as checkpoints:
        return checkpoints.restore(abstract, exp.to_dict())


def zeros(folder):
    """As ``fresh``, of 13 MB and without the work of initial weights."""
    _, exp = corpus_and_experiment(folder, **{"model.d_inner": 32768})
    model = txl_jax.TransformerXL(exp.model)
    optimizer = make_optimizer(exp)
    shapes = jax.eval_shape(lambda: init_state(exp, model, optimizer))
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
    return exp, state, jax.tree.map(place, shapes)
