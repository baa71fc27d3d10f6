"""The inputs of every implementation of attention, and attention in plain JAX."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.model.scores import content_scores, position_scores, weighted_sum


class AttentionInputs(flax.struct.PyTreeNode):
    """Queries, keys and values, with the positions, mask and dropout of attention.

    Attributes:
      q: queries [N,B,T,H]; q and the positions' u, v and b are already divided by sqrt(H).
      k, val: keys and values of memory and segment, oldest first: [N,B,K,H] with K = M + T, or
        pairs of [N,B,M,H] and [N,B,T,H].
      positions: r has K rows, or K + T - 1 where attention is in both directions.
      mask: the attention mask; every query can attend at least to itself.
      oldest: int32 [], the slot of the oldest of M keys in a ring (ring.py); ``None``: slot 0.
    """

    q: jax.Array
    k: Any
    val: Any
    positions: Positions
    mask: AttentionMask
    dropout: AttentionDropout | None = None
    oldest: jax.Array | None = None

    def joined(self) -> "AttentionInputs":
        """Returns the inputs with memory and segment in one array of keys and one of values."""
        turn = lambda x: x if self.oldest is None else jnp.roll(x, -self.oldest, axis=2)
        join = lambda x: jnp.concatenate((turn(x[0]), x[1]), 2) if isinstance(x, tuple) else x
        return self.replace(k=join(self.k), val=join(self.val), oldest=None)

    def biased_queries(self) -> tuple[jax.Array, jax.Array]:
        """Returns q + u and q + v, [N,B,T,H] each, for the products with keys and with r."""
        biased = lambda x: self.q if x is None else (self.q + x[:, None, None]).astype(self.q.dtype)
        return biased(self.positions.u), biased(self.positions.v)

    def unsupported_by_fused(self) -> str | None:
        """Returns the reason why no fused kernel can compute this attention, or ``None``."""
        dtype = jnp.dtype(self.q.dtype)
        if self.positions.r is None:
            return "it needs vectors of distances (r), and this attention has none"
        if self.positions.b is not None:
            return "it does not support a learnt score for each distance (b)"
        if dtype not in (jnp.bfloat16, jnp.float32):
            return f"it supports bfloat16 and float32, not {dtype.name}"
        return None


def attend(x: AttentionInputs) -> jax.Array:
    """Computes :func:`txl_jax.model.kernels.choice.attend` in plain JAX."""
    return attend_part(x.joined(), slice(0, x.mask.seg_len), slice(0, x.mask.n_keys))


def attend_part(x: AttentionInputs, queries: slice, keys: slice, platform: str = "") -> jax.Array:
    """Computes :func:`attend` for t of the queries, [N,B,t,H], and for k of the keys.

    ``x`` has only these queries, keys and values, and the positions of the distances k-1 .. 0. The
    last key must be the last query's own key. The mask and the dropout of ``x`` are those of the
    complete segment. For ``platform`` see scores.py.
    """
    p = x.positions
    scores = content_scores(x.q, p.u, x.k, platform)
    if p.of_distances:
        by_key = position_scores(x.q, p.v, p.r, p.b, platform)
        scores = scores + by_key[..., : scores.shape[-1]]
    (weights,), total = p.softmax((scores, x.mask.allowed(queries, keys)))
    if x.dropout is not None:
        weights = weights * x.dropout.mask(weights.shape, queries.start, keys.start)
    if x.val.dtype == jnp.float16:  # many sums exceed 65,504, the largest float16
        weights, total = weights / total, jnp.ones_like(total)
    gathered = weighted_sum(weights.astype(x.val.dtype), x.val, platform)
    return gathered / total.astype(x.val.dtype)
