"""Projected memory as a ring of slots, for inference: a step writes its tokens, and moves none.

R slots of keys and values; the oldest state is in slot ``oldest``, the newest in the one before.
For R = 4 and oldest = 1, numbers are distances from a query that follows:

    slot            0 1 2 3
    distance        1 4 3 2         a segment of two tokens is written to slots 1 and 2 next

Scores of positions come in the order of distances and are turned to the order of slots; that is
T x R numbers, and nothing of R x H is copied.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.model.masks import Visible
from txl_jax.model.positions import Positions
from txl_jax.model.scores import content_scores, position_scores_by_distance, softmax_parts


class Ring(NamedTuple):
    """One layer's slots: keys and values [N,B,R,H], and the oldest one's number, int32 []."""

    keys: jax.Array
    values: jax.Array
    oldest: jax.Array


def slots_of(mem_len: int, seg_len: int) -> int:
    """R: M, rounded up to whole segments, so that one is never written over the ring's end."""
    return -(-mem_len // seg_len) * seg_len


def in_order(slots: jax.Array, oldest: jax.Array) -> jax.Array:
    """[N,B,R,H] with the oldest state first (a copy)."""
    return jnp.roll(slots, -oldest, axis=2)


def write(slots: jax.Array, new: jax.Array, oldest: jax.Array) -> jax.Array:
    """[N,B,R,H] with the oldest T states overwritten by ``new`` [N,B,T,H]; T divides oldest."""
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), oldest, axis=2)


def attend(
    q: jax.Array,
    past: Ring,
    present_keys: jax.Array,
    present_values: jax.Array,
    positions: Positions,
    visible: Visible,
) -> jax.Array:
    """What each query gathers from ring and segment: [N,B,T,H].

    Args:
      q: [N,B,T,H], divided by sqrt(H).
      past: R slots.
      present_keys, present_values: [N,B,T,H], of the segment.
      positions: of the R + T distances, divided by sqrt(H) as in kernels/choice.py.
      visible: with memory length R.
    """
    r, t = visible.mem_len, visible.seg_len
    slot = jnp.arange(r)
    order = jnp.where(slot >= past.oldest, slot - past.oldest, slot - past.oldest + r)
    remembered = content_scores(q, positions.u, past.keys)
    own = content_scores(q, positions.u, present_keys)
    if positions.r is not None:
        # A row before and a row after: what is read past the ends of the real ones. Many scores are
        # made with them, not copied into something longer; of one query the product is quicker.
        longer = lambda x: jnp.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)])
        scored = lambda x: position_scores_by_distance(x, positions.v, positions.r, positions.b)
        by_distance = longer(scored(q)) if t == 1 else scored(longer(q))
        remembered = remembered + _by_slot(by_distance, past.oldest, r)
        own = own + _by_key(by_distance[..., 1:-1, :], r)
    new = (own, visible.allowed(keys=slice(r, r + t)))
    dtype = present_values.dtype
    weigh = lambda weights, x: jnp.einsum("nbtk,nbkh->nbth", weights.astype(dtype), x)
    if not r:
        (weights,), total = softmax_parts(new)
        return weigh(weights, present_values) / total.astype(dtype)
    old = (remembered, visible.allowed(keys=order))
    (of_old, of_new), total = softmax_parts(old, new)
    gathered = weigh(of_old, past.values) + weigh(of_new, present_values)
    return gathered / total.astype(dtype)


# Column c of scores by distance [..., T, R + T] is of distance R + T - 1 - c. Read as one line,
# the entry of query i and of the key at place p (oldest first) is number i (R+T-1) + T - 1 + p:
# rows one shorter, begun T - 1 later (model/positions.py draws it).


def _by_slot(x: jax.Array, oldest: jax.Array, r: int) -> jax.Array:
    """Scores by distance [..., 1+T+1, R+T] as scores of slots [..., T, R]."""
    *lead, rows, k = x.shape
    t, line = rows - 2, x.reshape(*lead, rows * k)

    def begun(start):
        part = jax.lax.dynamic_slice_in_dim(line, start, t * (k - 1), axis=-1)
        return part.reshape(*lead, t, k - 1)[..., :r]

    first = k + t - 1 - oldest
    return jnp.where(jnp.arange(r) >= oldest, begun(first), begun(first + r))


def _by_key(x: jax.Array, r: int) -> jax.Array:
    """Scores by distance [..., T, R+T] as scores of the segment's keys [..., T, T]."""
    *lead, t, _ = x.shape
    near = jnp.pad(x[..., r:], [(0, 0)] * (len(lead) + 1) + [(0, t)])
    line = near.reshape(*lead, 2 * t * t)[..., t - 1 : t - 1 + t * (2 * t - 1)]
    return line.reshape(*lead, t, 2 * t - 1)[..., :t]
