"""Parameters and gradients for tests of an optimizer's rule, and the updates it computes."""

import copy
from typing import Any

import jax
import numpy as np
import optax
import tiny_models
from jax.sharding import NamedSharding, PartitionSpec

from txl_jax.config import ExperimentConfig, TrainConfig
from txl_jax.training.optimizer import make_optimizer

STEPS = 4
FORMS: dict[str, dict[str, Any]] = {
    "relative": {},
    "untied u and v": {"untie_r": True},
    "gtrxl": tiny_models.GTRXL,
    "adaptive": {"cutoffs": (4, 9), "div_val": 2, "tie_projs": (False, True)},
    "shaw": {"attention": "shaw", "n_positions": 5},
    "absolute_per_layer": {"attention": "absolute_per_layer", "n_positions": 5, "d_head": 4},
}


def flat(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def edge_cases(form):
    """Returns parameters, and ``STEPS`` gradients for them, that include edge cases of the rules.

    One array of parameters has a norm above 10, and another one is all zeros. The gradient of a
    third array is 0.
    """
    params = copy.deepcopy(tiny_models.variables(tiny_models.config(**FORMS[form]))["params"])
    layer = params["layer_0"]
    layer["feed_forward"]["inner"]["kernel"] *= 30
    layer["feed_forward"]["outer"]["bias"] *= 0
    rng = np.random.default_rng(1)
    sizes = jax.tree.map(lambda _: float(rng.uniform(0.01, 3)), params)
    draw = lambda w, size: (size * rng.standard_normal(w.shape)).astype(np.float32)
    gradients = [jax.tree.map(draw, params, sizes) for _ in range(STEPS)]
    for gradient in gradients:
        gradient["layer_0"]["norm_attention"]["bias"] *= 0
    return params, gradients


def by_optimizer(params, gradients, c, place=lambda tree: tree):
    """Yields the parameters after each gradient, from the jitted optimizer with settings ``c``.

    ``place`` puts a tree of arrays onto devices.
    """
    exp = ExperimentConfig(optimizer=c, train=TrainConfig(steps=STEPS))
    optimizer = make_optimizer(exp)
    params = place(params)
    state = optimizer.init(params)
    step = tiny_models.quick(optimizer.update)
    for gradient in gradients:
        updates, state = step(place(gradient), state, params)
        params = optax.apply_updates(params, updates)
        yield params


def spread(tree):
    """Shards each array over eight devices on its first axis divisible by 8, or replicates it."""
    mesh = jax.make_mesh((8,), ("any",), (jax.sharding.AxisType.Auto,))

    def put(x):
        axis = next((axis for axis, size in enumerate(x.shape) if size % 8 == 0), None)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "any")
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)
