"""Dynamic evaluation: after a segment is scored, the parameters learn from it.

    segment 0        segment 1        segment 2
    score(p0) ─┐     score(p1) ─┐     score(p2) …      p0: the trained parameters
               └─learn─▶ p1     └─learn─▶ p2

No segment is scored with parameters that were trained on it. Dropout is off. The parameters that
score a segment also compute its memory. Several streams adapt one set of parameters together.

With g the gradient of a segment's mean nll (nats per scored target, over all streams):

    sgd   p <- p - lr g
    rms   p <- p - lr g / (root + epsilon) - min(decay root, 1) (p - p0)
          root = sqrt(sum of g^2 over ``statistics`` segments of the training split, at p0)

Source: Krause et al. 2018, "Dynamic Evaluation of Neural Sequence Models", for the limit of 1 that
keeps the decay from passing p0, and 2019, "Dynamic Evaluation of Transformer Language Models"
(arXiv 1904.08378), whose code also sums the squares (benkrause/dynamiceval-transformer).
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import DynamicConfig
from txl_jax.data.batch import Batch
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL

Params = Any


class Learner(flax.struct.PyTreeNode):
    """The parameters of dynamic evaluation between two segments.

    ``params`` score the next segment; ``trained``, p0, and ``root``, of the summed squared
    gradients, have their shape, and are ``None`` for ``sgd``.
    """

    params: Params
    trained: Params = None
    root: Params = None


def update(state: Learner, gradient: Params, c: DynamicConfig) -> Params:
    """The parameters after one step of the rule ``sgd`` or ``rms``."""
    if c.rule == "sgd":
        return jax.tree.map(lambda p, g: p - c.learning_rate * g, state.params, gradient)

    def step(p, g, p0, root):
        decay = jnp.minimum(c.decay * root, 1.0)
        return p - c.learning_rate * g / (root + c.epsilon) - decay * (p - p0)

    return jax.tree.map(step, state.params, gradient, state.trained, state.root)


def score_and_learn(
    state: Learner, batch: Batch, mems: Memory, model: TransformerXL, c: DynamicConfig
) -> tuple[jax.Array, jax.Array, Memory, Learner]:
    """Scores a segment with ``state.params``, then updates them if it has a target.

    Returns the sum of nll in nats, the number of targets (float32 []), memory and learner after.
    """
    gradient, (nll_sum, count, after) = _gradient(state.params, batch, mems, model)
    new = update(state, gradient, c)
    new = jax.tree.map(lambda x, old: jnp.where(count > 0, x, old), new, state.params)
    return nll_sum, count, after, state.replace(params=new)


def add_squares(
    squares: Params, params: Params, batch: Batch, mems: Memory, model: TransformerXL
) -> tuple[Params, Memory]:
    """``squares`` plus the squared gradient of a segment's mean nll; memory after the segment."""
    gradient, (_, _, after) = _gradient(params, batch, mems, model)
    return jax.tree.map(lambda s, g: s + jnp.square(g), squares, gradient), after


def _gradient(params: Params, batch: Batch, mems: Memory, model: TransformerXL):
    """Gradient of the mean nll (0 without targets); nll sum, count, memory after."""
    kwargs = batch.model_kwargs(model.cfg.memory_free)

    def mean_nll(p):
        nll, after = model.apply(
            {"params": p}, batch.inputs, batch.targets, mems, method="nll", **kwargs
        )
        nll_sum, count = jnp.sum(nll * batch.weights), jnp.sum(batch.weights)
        return nll_sum / jnp.maximum(count, 1.0), (nll_sum, count, after)

    return jax.grad(mean_nll, has_aux=True)(params)
