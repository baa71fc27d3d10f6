"""What is minimised: negative log-likelihood over the scored targets, and what regularises it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import LossConfig
from txl_jax.data.batch import Batch
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL

Array = jax.Array | np.ndarray


class Totals(NamedTuple):
    """What sums over a whole step are divided by, float32 [], at least 1.

    Attributes:
      targets: scored targets.
      pairs: neighbours in a row that are both scored.
    """

    targets: jax.Array
    pairs: jax.Array


def scored(weights: Array, c: LossConfig) -> Array:
    """Weights [B,T] of the targets that count in training.

    With ``positions="half"`` the first half of a row's n real targets (n // 2 of them) gets 0:
    what is scored has at least that much of its own segment before it (paper, section 4.2).
    """
    if c.positions == "full":
        return weights
    n = jnp.sum(weights > 0, axis=1, keepdims=True)
    return jnp.where(jnp.arange(weights.shape[1]) < n // 2, 0.0, weights)


def totals(weights: Array) -> Totals:
    """The denominators of a step whose targets have these weights [B,T]."""
    at_least_1 = lambda x: jnp.maximum(jnp.sum(x), 1.0)
    return Totals(at_least_1(weights), at_least_1(_pairs(weights)))


def batch_loss(
    params,
    model: TransformerXL,
    batch: Batch,
    mems: Memory,
    dropout_key: jax.Array,
    c: LossConfig,
    whole: Totals,
    padded: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, Memory]]:
    """What a batch, or a part of one, adds to the loss of its step; the sum of nll beside it.

    Args:
      params: the model's parameters.
      batch: [B,T] arrays; what counts and how much is in its weights, see :func:`scored`.
      mems: memory before the segment.
      dropout_key: of this step and micro-batch.
      c: what regularises.
      whole: of the whole step, so that its parts add up.
      padded: whether memory after the segment is of use though the segment may be padded.

    Returns:
      loss in nats per target, float32 []; (sum of nll in nats, float32 []; memory after).
    """
    about = batch.about_inputs(model.cfg.memory_free or padded)

    def read(key, method, *inputs) -> Any:
        rngs = {"dropout": key}
        variables = {"params": params}
        return model.apply(variables, *inputs, mems, method=method, train=True, rngs=rngs, **about)

    divergence = jnp.zeros(())
    if c.r_drop:
        keys = (dropout_key, jax.random.fold_in(dropout_key, 1))
        read_twice = [read(key, "logits_and_states", batch.inputs) for key in keys]
        logs = [jax.nn.log_softmax(logits) for logits, _, _ in read_twice]
        nll = sum(_nll(log, batch.targets) for log in logs) / 2
        every_state, after = [states for _, states, _ in read_twice], read_twice[0][2]
        divergence = jnp.sum(symmetric_divergence(*logs) * batch.weights)
    else:
        read_once = read(dropout_key, "nll_and_states", batch.inputs, batch.targets)
        nll, every_state, after = read_once[0], [read_once[1]], read_once[2]
    nll_sum = jnp.sum(nll * batch.weights)
    loss = (nll_sum + c.r_drop * divergence) / whole.targets
    if c.ar or c.tar:
        terms = [regularisation(states, batch.weights, c, whole) for states in every_state]
        loss = loss + sum(terms) / len(terms)
    return loss, (nll_sum, after)


def symmetric_divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Mean of KL(p|q) and KL(q|p) in nats, [...], of log-probabilities [...,V]."""
    return jnp.sum((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q), axis=-1) / 2


def _nll(log_p: jax.Array, targets: Array) -> jax.Array:
    return -jnp.take_along_axis(log_p, jnp.asarray(targets)[..., None], axis=-1)[..., 0]


def regularisation(states: Array, weights: Array, c: LossConfig, whole: Totals) -> jax.Array:
    """``ar`` and ``tar`` times their mean squares (Merity et al. 2018, section 4.6): float32 [].

    Means are over scored positions (``tar``: over neighbours that are both scored) and over D.

    Args:
      states: [B,T,D], the last layer's, before dropout.
      weights: float32 [B,T].
      c: ``ar``, ``tar``.
      whole: of the whole step.
    """
    states = states.astype(jnp.float32)
    size = jnp.sum(jnp.mean(jnp.square(states), axis=-1) * weights)
    change = jnp.mean(jnp.square(states[:, 1:] - states[:, :-1]), axis=-1)
    return c.ar * size / whole.targets + c.tar * jnp.sum(change * _pairs(weights)) / whole.pairs


def _pairs(weights: Array) -> Array:
    return weights[:, 1:] * weights[:, :-1]
