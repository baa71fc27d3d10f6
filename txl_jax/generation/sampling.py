"""Samples the next token from logits."""

import jax
import jax.numpy as jnp

from txl_jax.config import GenerateConfig

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The settings of generation that change the probabilities of the next token."""


def sample(keys: jax.Array, logits: jax.Array, c: GenerateConfig) -> jax.Array:
    """Samples the next token of each row: int32 [B].

    The temperature is applied first, then top-k, top-p and min-p, each to the remaining tokens.
    With temperature 0, the likeliest token is chosen.

    Args:
      keys: [B], the random keys of this step. The draw of a row depends only on its own key.
      logits: float32 [B,V].
      c: settings with ``temperature``, ``top_k``, ``top_p`` and ``min_p``.
    """
    if c.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = keep_top_p(keep_top_k(logits / c.temperature, c.top_k), c.top_p)
    draw = jax.vmap(jax.random.categorical)
    return draw(keys, keep_min_p(logits, c.min_p)).astype(jnp.int32)


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Sets logits [B,V] below the k-th largest logit to -inf; k = 0 keeps all logits."""
    if not 0 < k < logits.shape[-1]:
        return logits
    least = jax.lax.top_k(logits, k)[0][..., -1:]
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Sets logits [B,V] to -inf outside the nucleus (Holtzman et al. 2020).

    The nucleus is the smallest set of the likeliest tokens with total probability p or more. The
    likeliest token is always in the nucleus.
    """
    if p >= 1:
        return logits
    ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    least = jnp.min(jnp.where(before < p, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_min_p(logits: jax.Array, p: float) -> jax.Array:
    """Sets logits [B,V] to -inf below p times the largest probability (Nguyen et al. 2024)."""
    if p == 0:
        return logits
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(p)
    return jnp.where(logits < least, -jnp.inf, logits)


def apply_repetition_penalty(logits: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """Lowers the logits [B,V] of the tokens in ``seen``, bool [B,V] (Keskar et al. 2019)."""
    lower = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, lower, logits)
