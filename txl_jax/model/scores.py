"""The four terms of an attention score, and the softmax over scores (paper, section 3.3).

    ( q_i.k_j  +  q_i.r_{i-j}  +  u.k_j  +  v.r_{i-j}  +  b_{i-j} ) / sqrt(H)
        (a)          (b)           (c)        (d)

This module computes the terms plainly; fused kernels give the same values. The position terms (u,
v, r, b) depend on the form of attention, see :class:`~txl_jax.model.positions.Positions`. The
caller divides q, u, v and b by sqrt(H), because they are smaller than the scores.
"""

import functools

import jax
import jax.numpy as jnp

from txl_jax.model.positions import relative_shift


def content_scores(q: jax.Array, u: jax.Array | None, k: jax.Array) -> jax.Array:
    """Returns (a) q.k plus (c) u.k: float32 [N,B,T,K]; q [N,B,T,H], u [N,H], k [N,B,K,H]."""
    if u is not None:
        q = q + u[:, None, None, :]
    return jnp.einsum("nbth,nbkh->nbtk", q, k, preferred_element_type=jnp.float32)


def position_scores(
    q: jax.Array, v: jax.Array | None, r: jax.Array | None, b: jax.Array | None = None
) -> jax.Array:
    """Returns the sum of the terms (b) q.r and (d) v.r, and of b: float32 [N,B,T,K].

    q is [N,B,T,H], and v [N,H]. r [N,K,H] and the scalars b [N,K] are of the distances K-1 .. 0;
    one of them may be ``None``.
    """
    return relative_shift(position_scores_by_distance(q, v, r, b))


def position_scores_by_distance(q, v, r, b=None) -> jax.Array:
    """Returns :func:`position_scores`, but with column c of every query for the distance K-1-c."""
    if r is None:
        return jnp.broadcast_to(b[:, None, None, :], (*q.shape[:3], b.shape[1]))
    if v is not None:
        q = q + v[:, None, None, :]
    scores = jnp.einsum("nbth,nkh->nbtk", q, r, preferred_element_type=jnp.float32)
    return scores if b is None else scores + b[:, None, None, :]


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
