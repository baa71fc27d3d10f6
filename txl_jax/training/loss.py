"""The training loss: the negative log-likelihood of the scored targets, plus regularisation."""

import functools
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

_MIN_PROBABILITY = 1e-6  # lower bound of the probability of "any other word", before the logarithm


class Denominators(NamedTuple):
    """The numbers of scored targets, and of pairs of adjacent scored targets, in a step.

    Both are float32 [] and at least 1, because sums are divided by them.
    """

    targets: jax.Array
    pairs: jax.Array


def scored_weights(weights: Array, c: LossConfig) -> Array:
    """Returns the weights [B,T] of the targets in the training loss.

    With ``positions="half"``, the first n // 2 of the n real targets of a row have weight 0 (paper,
    section 4.2).
    """
    if c.positions == "full":
        return weights
    # Targets of weight 0 are not counted, such as padding or a target in the next document.
    count = jnp.cumsum(weights > 0, axis=1)
    return jnp.where(count <= count[:, -1:] // 2, 0.0, weights)


def denominators(weights: Array) -> Denominators:
    """Returns the denominators of the loss of a step, given its target weights [B,T]."""
    at_least_1 = lambda x: jnp.maximum(jnp.sum(x), 1.0)
    return Denominators(at_least_1(weights), at_least_1(_pairs(weights)))


class ForwardPass(NamedTuple):
    """The outputs of the model for a segment with one dropout key."""

    nll: jax.Array  # negative log-likelihoods in nats, float32 [B,T]
    states: jax.Array  # states of the last layer before dropout, [B,T,D]
    mems: Memory  # memory after the segment
    log_p: Any = None  # log-probabilities, float32 [B,T,V], if a term of the loss needs them


def batch_loss(
    params,
    model: TransformerXL,
    batch: Batch,
    mems: Memory,
    dropout_key: jax.Array,
    c: LossConfig,
    whole: Denominators,
    padded: bool = False,
    distil_weight: float = 0.0,
) -> tuple[jax.Array, tuple[jax.Array, Memory]]:
    """Returns the loss of a batch, or the contribution of a micro-batch to the loss of the step.

    Args:
      mems: the memory before the segment.
      batch: [B,T] arrays. The weights come from :func:`scored_weights`.
      dropout_key: the dropout key of this step and micro-batch.
      whole: the denominators of the whole step, so that the losses of micro-batches add up.
      padded: whether text can follow a padded segment. If so, padding must not enter memory.
      distil_weight: the weight of the cross entropy against the batch's soft targets (distil.py).

    Returns:
      the loss in nats per target, float32 [], and a tuple: the sum of the negative log-likelihoods
      in nats, float32 [], and the memory after the segment.
    """
    kwargs = batch.model_kwargs(model.cfg.memory_free or padded)
    apply: Any = functools.partial(model.apply, {"params": params})
    needs_log_p = bool(c.r_drop or c.past_decode or distil_weight)
    keys = [dropout_key, jax.random.fold_in(dropout_key, 1)] if c.r_drop else [dropout_key]
    passes = [_forward(apply, batch, mems, key, kwargs, needs_log_p) for key in keys]
    nll_sum = jnp.sum(_mean(p.nll for p in passes) * batch.weights)
    added = jnp.zeros((), jnp.float32)
    if c.r_drop:
        divergence = symmetric_divergence(*(p.log_p for p in passes))
        added += c.r_drop * jnp.sum(divergence * batch.weights)
    if c.past_decode:
        own_inputs = batch.inputs[:, -batch.targets.shape[1] :]  # without the preceding context
        past = _mean(apply(p.log_p, own_inputs, method="past_nll") for p in passes)
        added += c.past_decode * jnp.sum(past * batch.weights)
    target_loss = nll_sum
    if distil_weight:
        assert batch.soft is not None, "a batch for distillation has soft targets"
        soft = _mean(soft_cross_entropy(p.log_p, batch.soft) for p in passes)
        soft_sum = jnp.sum(soft * batch.weights)
        target_loss = (1 - distil_weight) * nll_sum + distil_weight * soft_sum
    loss = (target_loss + added) / whole.targets
    if c.ar or c.tar:
        loss += _mean(activation_penalty(p.states, batch.weights, c, whole) for p in passes)
    return loss, (nll_sum, passes[0].mems)


def _forward(apply, batch: Batch, mems: Memory, key, kwargs, needs_log_p: bool) -> ForwardPass:
    """Runs the forward pass of training. Returns ``log_p`` [B,T,V] only if ``needs_log_p``."""
    options = {"train": True, "rngs": {"dropout": key}, **kwargs}
    if not needs_log_p:
        options["method"] = "nll_and_states"
        return ForwardPass(*apply(batch.inputs, batch.targets, mems, **options))
    logits, states, after = apply(batch.inputs, mems, method="logits_and_states", **options)
    log_p = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_p, jnp.asarray(batch.targets)[..., None], axis=-1)[..., 0]
    return ForwardPass(nll, states, after, log_p)


def soft_cross_entropy(log_p: jax.Array, soft: SoftTargets) -> jax.Array:
    """Returns the cross entropy of ``log_p`` [B,T,V] against soft targets [B,T,k]: nats, [B,T].

    The distributions have k + 1 outcomes: the k words of the soft targets, and any other word.
    """
    word_log_p = jnp.take_along_axis(log_p, jnp.asarray(soft.words, jnp.int32), axis=-1)
    target = jnp.asarray(soft.probabilities, jnp.float32)
    target_rest = jnp.clip(1.0 - jnp.sum(target, axis=-1), 0.0)
    rest = jnp.maximum(1.0 - jnp.sum(jnp.exp(word_log_p), axis=-1), _MIN_PROBABILITY)
    return -jnp.sum(target * word_log_p, axis=-1) - target_rest * jnp.log(rest)


def symmetric_divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Returns the mean of KL(p|q) and KL(q|p) in nats, [...], given log-probabilities [...,V]."""
    return jnp.sum((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q), axis=-1) / 2


def _mean(values: Iterable[jax.Array]) -> jax.Array:
    first, *others = values
    return sum(others, start=first) / (1 + len(others))


def activation_penalty(
    states: Array, weights: Array, c: LossConfig, whole: Denominators
) -> jax.Array:
    """Returns the activation regularisation term (Merity et al. 2018, section 4.6): float32 [].

    The term is ``ar`` times the mean square of the states [B,T,D], plus ``tar`` times the mean
    square of the differences of adjacent states. Positions are weighted with ``weights`` [B,T].
    """
    states = states.astype(jnp.float32)
    size = jnp.sum(jnp.mean(jnp.square(states), axis=-1) * weights)
    change = jnp.mean(jnp.square(states[:, 1:] - states[:, :-1]), axis=-1)
    return c.ar * size / whole.targets + c.tar * jnp.sum(change * _pairs(weights)) / whole.pairs


def _pairs(weights: Array) -> Array:
    return weights[:, 1:] * weights[:, :-1]
