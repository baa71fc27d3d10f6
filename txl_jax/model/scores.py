"""The four terms of an attention score (paper, section 3.3).

    ( q_i.k_j  +  q_i.r_{i-j}  +  u.k_j  +  v.r_{i-j}  +  b_{i-j} ) / sqrt(H)
        (a)          (b)           (c)        (d)

This module computes the terms plainly; fused kernels give the same values. The position terms (u,
v, r, b) depend on the form of attention, see :class:`~txl_jax.model.positions.Positions`. The
caller divides q, u, v and b by sqrt(H), because they are smaller than the scores.
"""

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
