"""Attention to memory states that are not projected, for segments of few tokens.

A memory state s has the key W_k s and the value W_v s. Scores and sums can be rewritten as

    q.(W_k s) = (W_k^T q).s                sum_j a_j (W_v s_j) = W_v (sum_j a_j s_j)

So the T queries and their T sums are projected instead of the M states. For each stream, this takes
4 M T N D operations instead of 4 M D N H, which is T / H times as many. For example, an agent that
takes one step at a time (T = 1) with H = 64 needs 1/64 of the operations.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.model.ring import KeysValues
from txl_jax.model.scores import content_scores, position_scores


class States(NamedTuple):
    """States of memory, and the maps from a state s to its key and value: ``kernel s + shift``.

    The kernels include the scale of a LayerNorm. The shifts include the bias of a LayerNorm, and a
    bias of the values.
    """

    states: jax.Array  # [B,M,D]
    kernels: KeysValues  # [D,N,H] each
    shifts: KeysValues  # [N,H] each


def is_cheaper(seg_len: int, mem_len: int, d_head: int) -> bool:
    """Tells whether :func:`attend` is cheaper than attention to projected states: if T <= H / 8.

    It needs fewer operations for every T < H, but matrix products of few rows are slow.
    """
    return mem_len > 0 and 8 * seg_len <= d_head


def attend(
    q: jax.Array, past: States, present: KeysValues, positions: Positions, mask: AttentionMask
) -> jax.Array:
    """Returns the attention of each query to the memory and the segment: [N,B,T,H].

    ``q`` [N,B,T,H] and ``positions`` are scaled as in kernels/reference.py; ``present`` are the
    keys and values of the segment.
    """
    p, dtype, m = positions, present.values.dtype, mask.mem_len
    kernels, shifts = jax.tree.map(lambda x: x.astype(dtype), (past.kernels, past.shifts))
    content = q if p.u is None else q + p.u[:, None, None]
    wide = jnp.einsum("nbth,dnh->bntd", content, kernels.keys)
    shift = jnp.einsum("nbth,nh->nbt", content, shifts.keys)[..., None]
    # The large factor is first: XLA for CPUs copies the second factor (measured: 1.9 -> 0.3 ms).
    product = jnp.einsum("bmd,bntd->bmnt", past.states, wide, preferred_element_type=jnp.float32)
    scores = [product.transpose(2, 0, 3, 1) + shift, content_scores(q, p.u, present.keys)]
    if p.of_distances:
        by_key = position_scores(q, p.v, p.r, p.b)
        scores = [x + y for x, y in zip(scores, jnp.split(by_key, [m], axis=-1), strict=True)]
    allowed = jnp.split(mask.allowed(), [m], axis=-1)
    (old, new), total = p.softmax(*zip(scores, allowed, strict=True))
    old, new, total = old.astype(dtype), new.astype(dtype), total.astype(dtype)
    sums = jnp.einsum("bntm,bmd->bntd", old.swapaxes(0, 1), past.states)
    gathered = jnp.einsum("bntd,dnh->nbth", sums, kernels.values)
    gathered += old.sum(axis=-1, keepdims=True) * shifts.values[:, None, None]
    return (gathered + jnp.einsum("nbtk,nbkh->nbth", new, present.values)) / total
