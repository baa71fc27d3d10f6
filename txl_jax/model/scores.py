"""The four terms of an attention score (paper, section 3.3).

    ( q_i.k_j  +  q_i.r_{i-j}  +  u.k_j  +  v.r_{i-j}  +  b_{i-j} ) / sqrt(H)
        (a)          (b)           (c)        (d)

This module computes the terms in plain JAX; fused kernels give the same values. The position terms
(u, v, r, b) depend on the form of attention, see :class:`~txl_jax.model.positions.Positions`. The
caller divides q, u, v and b by sqrt(H), because these arrays are smaller than the scores. If
``platform`` is given, such as ``cpu``, matrix products take the form that is fast there.
"""

import jax
import jax.numpy as jnp

from txl_jax.model import wide_products
from txl_jax.model.positions import relative_shift


def content_scores(
    q: jax.Array, u: jax.Array | None, k: jax.Array, platform: str = ""
) -> jax.Array:
    """Returns (a) q.k plus (c) u.k: [N,B,T,K]; q [N,B,T,H], u [N,H], k [N,B,K,H]."""
    q = _plus(q, u, platform)
    if wide_products.apply_to(platform, q, k):
        return wide_products.products_of_rows(q, k)
    return jnp.einsum("nbth,nbkh->nbtk", q, k, preferred_element_type=_of_sum(q))


def position_scores(
    q: jax.Array,
    v: jax.Array | None,
    r: jax.Array | None,
    b: jax.Array | None = None,
    platform: str = "",
) -> jax.Array:
    """Returns the sum of the terms (b) q.r and (d) v.r, and of b: [N,B,T,K].

    q is [N,B,T,H], and v is [N,H]. The vectors r [N,K,H] and the scalars b [N,K] are for the
    distances K-1 .. 0; either r or b can be ``None``.
    """
    return relative_shift(position_scores_by_distance(q, v, r, b, platform))


def position_scores_by_distance(q, v, r, b=None, platform="") -> jax.Array:
    """Returns the scores of :func:`position_scores` by distance: column c is for distance K-1-c."""
    if r is None:
        return jnp.broadcast_to(b[:, None, None, :], (*q.shape[:3], b.shape[1]))
    q = _plus(q, v, platform)
    if wide_products.apply_to(platform, q, r):
        rows = q.reshape(len(q), -1, q.shape[-1])
        scores = wide_products.products_of_rows(rows, r).reshape(*q.shape[:-1], -1)
    else:
        scores = jnp.einsum("nbth,nkh->nbtk", q, r, preferred_element_type=_of_sum(q))
    return scores if b is None else scores + b[:, None, None, :]


def _of_sum(x: jax.Array) -> jnp.dtype:
    """Returns the dtype of scores: float32, or float64 for queries of that type."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _plus(q: jax.Array, bias: jax.Array | None, platform: str) -> jax.Array:
    """Returns queries [N,B,T,H] plus u or v [N,H]."""
    if bias is None:
        return q
    rows = q.reshape(len(q), -1, q.shape[-1])
    return wide_products.add_bias(rows, bias, platform).reshape(q.shape)


def weighted_sum(weights: jax.Array, values: jax.Array, platform: str = "") -> jax.Array:
    """Returns the sums of values [N,B,K,H] with weights [N,B,T,K], of the same dtype: [N,B,T,H]."""
    if wide_products.apply_to(platform, weights, values):
        return wide_products.matmul(weights, values, platform)
    return jnp.einsum("nbtk,nbkh->nbth", weights, values)
