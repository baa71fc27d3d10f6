"""Attention written plainly: every score at once."""

import jax
import jax.numpy as jnp

from txl_jax.model.kernels.dropping import Dropping, kept
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.model.scores import content_scores, position_scores, softmax_parts


def attend(
    q: jax.Array,
    k: jax.Array,
    val: jax.Array,
    positions: Positions,
    visible: AttentionMask,
    dropping: Dropping | None = None,
) -> jax.Array:
    """See :func:`txl_jax.model.kernels.choice.attend`."""
    part = slice(0, visible.seg_len)
    return attend_part(q, k, val, positions, visible, dropping, part, slice(0, visible.n_keys))


def attend_part(q, k, val, positions, visible, dropping, queries: slice, keys: slice) -> jax.Array:
    """As :func:`attend` for some queries over the keys from ``keys.start`` to their last own one.

    Args:
      q: [N,B,t,H], of ``queries``.  k, val: [N,B,k,H], of ``keys``; the last is that of the last
        query.
      positions: of the distances k-1 .. 0.
    """
    scores = content_scores(q, positions.u, k)
    if positions.r is not None:
        scores = scores + position_scores(q, positions.v, positions.r, positions.b)
    (weights,), total = softmax_parts((scores, visible.allowed(queries, keys)))
    if dropping is not None:
        weights = weights * kept(dropping, weights.shape, queries.start, keys.start)
    gathered = jnp.einsum("nbtk,nbkh->nbth", weights.astype(val.dtype), val)
    return gathered / total.astype(val.dtype)
