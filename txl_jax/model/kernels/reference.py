"""Attention written plainly: all scores at once."""

import jax
import jax.numpy as jnp

from txl_jax.model.kernels.inputs import AttentionInputs
from txl_jax.model.scores import content_scores, position_scores, softmax_parts


def attend(x: AttentionInputs) -> jax.Array:
    """See :func:`txl_jax.model.kernels.choice.attend`."""
    return attend_part(x, slice(0, x.mask.seg_len), slice(0, x.mask.n_keys))


def attend_part(x: AttentionInputs, queries: slice, keys: slice) -> jax.Array:
    """As :func:`attend` for t of the queries, [N,B,t,H], and k keys up to the last query's own.

    ``x`` has the q, k and val of these only, and positions of the distances k-1 .. 0; the mask and
    the dropout are those of the whole segment.
    """
    p = x.positions
    scores = content_scores(x.q, p.u, x.k)
    if p.r is not None:
        scores = scores + position_scores(x.q, p.v, p.r, p.b)
    (weights,), total = softmax_parts((scores, x.mask.allowed(queries, keys)))
    if x.dropout is not None:
        weights = weights * x.dropout.mask(weights.shape, queries.start, keys.start)
    gathered = jnp.einsum("nbtk,nbkh->nbth", weights.astype(x.val.dtype), x.val)
    return gathered / total.astype(x.val.dtype)
