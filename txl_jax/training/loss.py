"""What is minimised: negative log-likelihood over the scored targets, and what regularises it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import LossConfig
from txl_jax.data.batch import Batch, SoftTargets
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL

Array = jax.Array | np.ndarray

_LEAST_REST = 1e-6
"""The least probability that all words but the teachers' likeliest are taken to have."""


class Denominators(NamedTuple):
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


def totals(weights: Array) -> Denominators:
    """The denominators of a step whose targets have these weights [B,T]."""
    at_least_1 = lambda x: jnp.maximum(jnp.sum(x), 1.0)
    return Denominators(at_least_1(weights), at_least_1(_pairs(weights)))


def batch_loss(
    params,
    model: TransformerXL,
    batch: Batch,
    mems: Memory,
    dropout_key: jax.Array,
    c: LossConfig,
    whole: Denominators,
    padded: bool = False,
    taught: float = 0.0,
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
      taught: the share of the loss that is against the batch's soft targets (distil.py).

    Returns:
      loss in nats per target, float32 []; (sum of nll in nats, float32 []; memory after).
    """
    about = batch.model_kwargs(model.cfg.memory_free or padded)

    def apply(method, *inputs, **options) -> Any:
        return model.apply({"params": params}, *inputs, method=method, **options)

    def read(key) -> ForwardPass:
        options = {"train": True, "rngs": {"dropout": key}, **about}
        if not needs_every_word(c, taught):
            return ForwardPass(
                *apply("nll_and_states", batch.inputs, batch.targets, mems, **options)
            )
        logits, states, after = apply("logits_and_states", batch.inputs, mems, **options)
        log_p = jax.nn.log_softmax(logits)
        return ForwardPass(_nll(log_p, batch.targets), states, after, log_p)

    keys = [dropout_key, jax.random.fold_in(dropout_key, 1)] if c.r_drop else [dropout_key]
    readings = [read(key) for key in keys]
    nll_sum = jnp.sum(_mean(r.nll for r in readings) * batch.weights)
    added = jnp.zeros(())
    if c.r_drop:
        apart = symmetric_divergence(*(r.log_p for r in readings))
        added = added + c.r_drop * jnp.sum(apart * batch.weights)
    if c.past_decode:
        inputs = batch.inputs[:, -batch.targets.shape[1] :]  # less the context in front
        past = _mean(apply("past_nll", r.log_p, inputs) for r in readings)
        added = added + c.past_decode * jnp.sum(past * batch.weights)
    learnt = nll_sum
    if taught:
        assert batch.soft is not None, "a batch to be taught by teachers has their soft targets"
        soft = _mean(soft_cross_entropy(r.log_p, batch.soft) for r in readings)
        learnt = (1 - taught) * nll_sum + taught * jnp.sum(soft * batch.weights)
    loss = (learnt + added) / whole.targets
    if c.ar or c.tar:
        loss = loss + _mean(regularisation(r.states, batch.weights, c, whole) for r in readings)
    return loss, (nll_sum, readings[0].after)


class ForwardPass(NamedTuple):
    """A segment as the model read it once, under dropout of its own.

    Attributes:
      nll: of the targets, in nats, float32 [B,T].
      states: [B,T,D], the last layer's, before dropout.
      after: memory after the segment.
      log_p: log-probabilities of every word, float32 [B,T,V]; ``None`` unless some term of the
        loss needs them, see :func:`needs_every_word`.
    """

    nll: jax.Array
    states: jax.Array
    after: Memory
    log_p: Any = None


def needs_every_word(c: LossConfig, taught: float = 0.0) -> bool:
    """Whether a term needs the log-probabilities of every word at every position, [B,T,V].

    Where none does, the nll is computed in blocks that never hold them (cross_entropy.py).
    """
    return bool(c.r_drop or c.past_decode or taught)


def soft_cross_entropy(log_p: jax.Array, soft: SoftTargets) -> jax.Array:
    """Cross entropy of a model's probabilities against its teachers', in nats: float32 [B,T].

    Over k + 1 outcomes: the k words, and that it is none of them.

    Args:
      log_p: float32 [B,T,V], the model's.
      soft: [B,T,k].
    """
    of_words = jnp.take_along_axis(log_p, jnp.asarray(soft.words, jnp.int32), axis=-1)
    taught = jnp.asarray(soft.probabilities, jnp.float32)
    others = jnp.clip(1.0 - jnp.sum(taught, axis=-1), 0.0)
    own_others = jnp.maximum(1.0 - jnp.sum(jnp.exp(of_words), axis=-1), _LEAST_REST)
    return -jnp.sum(taught * of_words, axis=-1) - others * jnp.log(own_others)


def symmetric_divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Mean of KL(p|q) and KL(q|p) in nats, [...], of log-probabilities [...,V]."""
    return jnp.sum((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q), axis=-1) / 2


def _mean(values: Iterable[jax.Array]) -> jax.Array:
    values = list(values)
    return sum(values[1:], start=values[0]) / len(values)


def _nll(log_p: jax.Array, targets: Array) -> jax.Array:
    return -jnp.take_along_axis(log_p, jnp.asarray(targets)[..., None], axis=-1)[..., 0]


def regularisation(states: Array, weights: Array, c: LossConfig, whole: Denominators) -> jax.Array:
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
