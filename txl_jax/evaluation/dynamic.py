"""Dynamic evaluation: after a segment is scored, the parameters learn from it.

    segment 0        segment 1        segment 2
    score(p0) ─┐     score(p1) ─┐     score(p2) …      p0: the trained parameters
               └─learn─▶ p1     └─learn─▶ p2

No segment is scored with parameters that have seen it, so the number is that of an honest
prediction; what it is compared with should be allowed to adapt too. Dropout is off. The memory
after a segment is made by the parameters that scored it. Several streams adapt one set of
parameters together; the papers have one stream.

With g the gradient of a segment's mean nll (nats per scored target, over all streams):

    sgd   p <- p - lr g
    rms   p <- p - lr g / (root + epsilon) - min(decay root, 1) (p - p0)
          root = sqrt(sum of g^2 over ``statistics`` segments of the training split, at p0)

Source: Krause et al. 2018, "Dynamic Evaluation of Neural Sequence Models", and Krause et al.
2019, "Dynamic Evaluation of Transformer Language Models" (arXiv 1904.08378). The sum is not a
mean, as in the code of the second (benkrause/dynamiceval-transformer), so its settings hold
here; they go with the number of segments. The limit of 1, so that the pull never goes past p0,
is the first paper's; the second's code has none.
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
    """Parameters on their way through a text.

    Attributes:
      params: of the next segment.
      trained: p0; ``None`` where the rule has no pull.
      root: of the summed squared gradients, >= 0, in the shape of ``params``; ``None`` likewise.
    """

    params: Params
    trained: Params = None
    root: Params = None


def learned(state: Learner, gradient: Params, c: DynamicConfig) -> Params:
    """The parameters after one step of the rule, which is not ``none``."""
    if c.rule == "sgd":
        return jax.tree.map(lambda p, g: p - c.learning_rate * g, state.params, gradient)

    def step(p, g, p0, root):
        pull = jnp.minimum(c.decay * root, 1.0)
        return p - c.learning_rate * g / (root + c.epsilon) - pull * (p - p0)

    return jax.tree.map(step, state.params, gradient, state.trained, state.root)


def score_and_learn(
    state: Learner, batch: Batch, mems: Memory, model: TransformerXL, c: DynamicConfig
) -> tuple[jax.Array, jax.Array, Memory, Learner]:
    """A segment scored with the parameters as they are, and the learner after it.

    Args:
      state: before the segment.
      batch: [B,T] arrays.
      mems: memory before the segment.
      model: of the parameters.
      c: the rule.

    Returns:
      sum of nll in nats and number of targets, float32 []; memory after; learner after, which
      is ``state`` where the segment has no target.
    """
    gradient, (nll_sum, count, after) = _gradient(state.params, batch, mems, model)
    new = learned(state, gradient, c)
    new = jax.tree.map(lambda x, old: jnp.where(count > 0, x, old), new, state.params)
    return nll_sum, count, after, state.replace(params=new)


def add_squares(
    squares: Params, params: Params, batch: Batch, mems: Memory, model: TransformerXL
) -> tuple[Params, Memory]:
    """``squares`` and the squared gradient of a segment's mean nll; memory after the segment."""
    gradient, (_, _, after) = _gradient(params, batch, mems, model)
    return jax.tree.map(lambda s, g: s + jnp.square(g), squares, gradient), after


def describe_dynamic(c: DynamicConfig) -> str:
    """The rule in words, to stand beside a result."""
    told = f"dynamic evaluation {c.rule}, rate {c.learning_rate:g}"
    if c.rule != "rms":
        return told
    return (
        f"{told}, decay {c.decay:g}, epsilon {c.epsilon:g}, statistics of {c.statistics} segments"
    )


def _gradient(params: Params, batch: Batch, mems: Memory, model: TransformerXL):
    """Gradient of the mean nll (0 where there is no target); nll sum, count, memory after."""

    def mean_nll(p):
        nll, after = model.apply(
            {"params": p},
            batch.inputs,
            batch.targets,
            mems,
            method="nll",
            **batch.model_kwargs(model.cfg.memory_free),
        )
        nll_sum, count = jnp.sum(nll * batch.weights), jnp.sum(batch.weights)
        return nll_sum / jnp.maximum(count, 1.0), (nll_sum, count, after)

    return jax.grad(mean_nll, has_aux=True)(params)
