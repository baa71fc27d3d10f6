"""The four terms of a score, and the softmax over them (paper, section 3.3).

    ( q_i.k_j  +  q_i.r_{i-j}  +  u.k_j  +  v.r_{i-j}  +  b_{i-j} ) / sqrt(H)
        (a)          (b)           (c)        (d)

Every implementation of attention computes these; here they are written out once, plainly. What
positions add (u, v, r, b) depends on the form of attention, see
:class:`~txl_jax.model.positions.Positions`; the division by sqrt(H) is done to q, u, v and b
beforehand, which are small.
"""

import functools

import jax
import jax.numpy as jnp

from txl_jax.model.positions import relative_shift


def content_scores(q: jax.Array, u: jax.Array | None, k: jax.Array) -> jax.Array:
    """Terms (a) q.k and (c) u.k, content and global content: float32 [N,B,T,K].

    Args:
      q: [N,B,T,H].  u: [N,H].  k: [N,B,K,H].
    """
    if u is not None:
        q = q + u[:, None, None, :]
    return jnp.einsum("nbth,nbkh->nbtk", q, k, preferred_element_type=jnp.float32)


def position_scores(
    q: jax.Array, v: jax.Array | None, r: jax.Array, b: jax.Array | None = None
) -> jax.Array:
    """Terms (b) q.r and (d) v.r, content-dependent and global position: float32 [N,B,T,K].

    Args:
      q: [N,B,T,H].  v: [N,H].  r: [N,K,H], projections of the distances K-1 .. 0.
      b: [N,K], a learnt scalar for each of these distances.
    """
    return relative_shift(position_scores_by_distance(q, v, r, b))


def position_scores_by_distance(q, v, r, b=None) -> jax.Array:
    """As :func:`position_scores`, column c of every query for the distance K-1-c."""
    if v is not None:
        q = q + v[:, None, None, :]
    scores = jnp.einsum("nbth,nkh->nbtk", q, r, preferred_element_type=jnp.float32)
    return scores if b is None else scores + b[:, None, None, :]


def softmax_parts(
    *parts: tuple[jax.Array, jax.Array],
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Softmax over the allowed keys as numerators and denominator, for the division to come last.

    Dividing T x H sums instead of T x K weights saves passes over the largest array (a third of
    attention's time on a CPU).

    Args:
      parts: scores float32 [N,B,T,K] and who is allowed, bool [B,T,K], of one set of keys or of
        several; each query is allowed at least one key in all.

    Returns:
      For each part float32 [N,B,T,K], 0 where not allowed; and the sum of all, float32 [N,B,T,1].
    """
    least = jnp.finfo(jnp.float32).min
    masked = [jnp.where(allowed, scores, least) for scores, allowed in parts]
    largest = functools.reduce(jnp.maximum, (jnp.max(x, axis=-1, keepdims=True) for x in masked))
    largest = jax.lax.stop_gradient(largest)
    weights = tuple(jnp.exp(x - largest) for x in masked)
    total = functools.reduce(jnp.add, (jnp.sum(x, axis=-1, keepdims=True) for x in weights))
    return weights, total
