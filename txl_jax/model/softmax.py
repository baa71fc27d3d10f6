"""The softmax over the scores of several sets of keys."""

import functools

import jax
import jax.numpy as jnp


def softmax_parts(*parts: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns softmax numerators [N,B,T,K], 0 where masked, and their sum [N,B,T,1]: float32.

    The caller divides T x H sums instead of T x K weights. On a CPU this saves a third of
    attention's time. ``parts`` are the scores, float32 [N,B,T,K], and the mask, bool [B,T,K], of
    each set of keys. Each query must have at least one allowed key.
    """
    least = jnp.finfo(jnp.float32).min
    masked = [jnp.where(allowed, scores, least) for scores, allowed in parts]
    largest = functools.reduce(jnp.maximum, (jnp.max(x, axis=-1, keepdims=True) for x in masked))
    largest = jax.lax.stop_gradient(largest)
    weights = tuple(jnp.exp(x - largest) for x in masked)
    total = functools.reduce(jnp.add, (jnp.sum(x, axis=-1, keepdims=True) for x in weights))
    return weights, total
