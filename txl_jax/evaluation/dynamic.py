"""Dynamic evaluation: after a segment is scored, the parameters are updated with its gradient.

    segment 0        segment 1        segment 2
    score(p0) ─┐     score(p1) ─┐     score(p2) …      p0: the trained parameters
               └─learn─▶ p1     └─learn─▶ p2

No segment is scored with parameters that were updated on this segment. Dropout is off. A segment's
memory is computed with the parameters that score the segment. All streams update one set of
parameters. Let g be the gradient of the mean loss of a segment (nats per target, all streams):

    sgd   p <- p - lr g
    rms   p <- p - lr g / (root + epsilon) - min(decay root, 1) (p - p0)
          root = sqrt(sum of g^2 over ``statistics`` segments of the training split, at p0)

The limit of 1 prevents the decay from overshooting p0 (Krause et al. 2018, "Dynamic Evaluation of
Neural Sequence Models"). The sum of squares is as in the code (benkrause/dynamiceval-transformer)
of Krause et al. 2019, "Dynamic Evaluation of Transformer Language Models" (arXiv 1904.08378).
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import DynamicConfig
from txl_jax.data.batch import Batch
from txl_jax.messages import fields_repr
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL

Params = Any


class Learner(flax.struct.PyTreeNode):
    """The parameters of dynamic evaluation between two segments.

    ``params`` score the next segment. ``trained`` are the trained parameters p0. ``root`` is the
    root of the sum of squared gradients. ``trained`` and ``root`` are ``None`` for ``sgd``.
    """

    __repr__ = fields_repr

    params: Params
    trained: Params = None
    root: Params = None


class Rates(flax.struct.PyTreeNode):
    """The settings of an update as an argument of a compiled program, with float32 scalars."""

    __repr__ = fields_repr

    rule: str = flax.struct.field(pytree_node=False)
    learning_rate: Any
    decay: Any
    epsilon: Any


def rates_of(c: DynamicConfig) -> Rates:
    """Returns the settings of an update, with numbers as float32 scalars."""
    return Rates(c.rule, *map(np.float32, (c.learning_rate, c.decay, c.epsilon)))


def update(state: Learner, gradient: Params, c: DynamicConfig | Rates) -> Params:
    """Returns the parameters after one update with the rule ``sgd`` or ``rms``."""
    if c.rule == "sgd":
        return jax.tree.map(lambda p, g: p - c.learning_rate * g, state.params, gradient)

    def step(p, g, p0, root):
        decay = jnp.minimum(c.decay * root, 1.0)
        return p - c.learning_rate * g / (root + c.epsilon) - decay * (p - p0)

    return jax.tree.map(step, state.params, gradient, state.trained, state.root)


def score_and_learn(
    state: Learner, batch: Batch, mems: Memory, model: TransformerXL, c: DynamicConfig | Rates
) -> tuple[jax.Array, jax.Array, Memory, Learner]:
    """Scores a segment with ``state.params``, then updates the parameters if there is a target.

    Returns the sum of losses in nats, the number of targets (both float32 []), and the memory and
    the learner after the segment.
    """
    gradient, (nll_sum, count, after) = _gradient(state.params, batch, mems, model)
    new = update(state, gradient, c)
    new = jax.tree.map(lambda x, old: jnp.where(count > 0, x, old), new, state.params)
    return nll_sum, count, after, state.replace(params=new)


def add_squares(
    squares: Params, params: Params, batch: Batch, mems: Memory, model: TransformerXL
) -> tuple[Params, Memory]:
    """Adds a segment's squared gradient to ``squares``. Returns the sum and the new memory."""
    gradient, (_, _, after) = _gradient(params, batch, mems, model)
    return jax.tree.map(lambda s, g: s + jnp.square(g), squares, gradient), after


def _gradient(params: Params, batch: Batch, mems: Memory, model: TransformerXL):
    """Returns the gradient of the mean loss, and a tuple: loss sum, target count, new memory."""
    kwargs = batch.model_kwargs(model.cfg.memory_free)

    def mean_nll(p):
        nll, after = model.apply(
            {"params": p}, batch.inputs, batch.targets, mems, method="nll", **kwargs
        )
        nll_sum, count = jnp.sum(nll * batch.weights), jnp.sum(batch.weights)
        return nll_sum / jnp.maximum(count, 1.0), (nll_sum, count, after)

    return jax.grad(mean_nll, has_aux=True)(params)
