"""Projected memory as a ring of slots, for inference: a step writes its tokens, and moves none.

R slots of keys and values; the oldest state is in slot ``oldest``, the newest in the one before.
For R = 4 and oldest = 1, numbers are distances from a query that follows:

    slot            0 1 2 3
    distance        1 4 3 2         a segment of two tokens is written to slots 1 and 2 next

Scores of positions come in the order of distances and are turned to the order of slots; that is
T x R numbers, and nothing of R x H is copied.

Where distances are clamped below R there are two rings, and a step moves the oldest T states of
the near one to the far one. All that is in the far one has the clamp's distance: of positions
there is one score of a query for all of it, and the others are made for the near ring only.
Segments of few tokens have one ring in any case.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.model.scores import content_scores, position_scores_by_distance, softmax_parts

FEW = 8
"""Queries whose scores take as long as reading what they are made of: two rings of less each, but
of twice as many products, are no quicker (for one query, 512 slots and two cores 0.8 times)."""


class Ring(NamedTuple):
    """One layer's slots: keys and values [N,B,R,H], and the oldest one's number, int32 []."""

    keys: jax.Array
    values: jax.Array
    oldest: jax.Array


class Rings(NamedTuple):
    """One layer's two rings; ``far``: ``None`` where nothing is beyond the clamp."""

    near: Ring
    far: Ring | None


def slots_of(mem_len: int, seg_len: int, clamp_len: int = -1) -> tuple[int, int]:
    """Slots of the near ring and of the far one, M in all, rounded up to whole segments.

    So a segment is never written over a ring's end. Every state in the far one is more than
    ``clamp_len`` before the segment's first query; -1, or T of at most :data:`FEW`: all are near.
    """
    whole = lambda n: -(-n // seg_len) * seg_len
    one = clamp_len < 0 or seg_len <= FEW
    near = whole(mem_len if one else min(mem_len, clamp_len))
    return near, whole(mem_len) - near


def in_order(slots: jax.Array, oldest: jax.Array) -> jax.Array:
    """[N,B,R,H] with the oldest state first (a copy)."""
    return jnp.roll(slots, -oldest, axis=2)


def read(slots: jax.Array, oldest: jax.Array, seg_len: int) -> jax.Array:
    """The oldest T states, [N,B,T,H]; T divides oldest."""
    return jax.lax.dynamic_slice_in_dim(slots, oldest, seg_len, axis=2)


def write(slots: jax.Array, new: jax.Array, oldest: jax.Array) -> jax.Array:
    """[N,B,R,H] with the oldest T states overwritten by ``new`` [N,B,T,H]; T divides oldest."""
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), oldest, axis=2)


def attend(
    q: jax.Array,
    past: Rings,
    present_keys: jax.Array,
    present_values: jax.Array,
    positions: Positions,
    visible: AttentionMask,
) -> jax.Array:
    """What each query gathers from rings and segment: [N,B,T,H].

    Args:
      q: [N,B,T,H], divided by sqrt(H).
      past: R slots in all, the oldest states in the far ring.
      present_keys, present_values: [N,B,T,H], of the segment.
      positions: of the distances to the near ring and to the segment, divided by sqrt(H) as in
        kernels/choice.py; the farthest is that of the far ring too.
      visible: with memory length R.
    """
    (near, far), t = past, visible.seg_len
    r, by_distance = near.keys.shape[2], None
    if positions.r is not None:
        # A row before and a row after: what is read past the ends of the real ones. Many scores are
        # made with them, not copied into something longer; of one query the product is quicker.
        longer = lambda x: jnp.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)])
        scored = lambda x: position_scores_by_distance(x, positions.v, positions.r, positions.b)
        by_distance = longer(scored(q)) if t == 1 else scored(longer(q))

    def scores(keys, of_positions):
        content = content_scores(q, positions.u, keys)
        return content if by_distance is None else content + of_positions(by_distance)

    parts = []
    if far is not None:
        of_far = scores(far.keys, lambda x: x[..., 1:-1, :1])
        parts.append((of_far, visible.allowed(keys=_places(far)), far.values))
    if r:
        of_near = scores(near.keys, lambda x: _by_slot(x, near.oldest, r))
        places = visible.mem_len - r + _places(near)
        parts.append((of_near, visible.allowed(keys=places), near.values))
    of_own = scores(present_keys, lambda x: _by_key(x[..., 1:-1, :], r))
    own = slice(visible.mem_len, visible.n_keys)
    parts.append((of_own, visible.allowed(keys=own), present_values))
    weights, total = softmax_parts(*((found, allowed) for found, allowed, _ in parts))
    dtype = present_values.dtype
    weigh = lambda weights, x: jnp.einsum("nbtk,nbkh->nbth", weights.astype(dtype), x)
    gathered = [weigh(w, values) for w, (_, _, values) in zip(weights, parts, strict=True)]
    return sum(gathered[1:], gathered[0]) / total.astype(dtype)


def _places(slots: Ring) -> jax.Array:
    """Each slot's place if the oldest came first: int32 [R]."""
    r = slots.keys.shape[2]
    slot = jnp.arange(r)
    return jnp.where(slot >= slots.oldest, slot - slots.oldest, slot - slots.oldest + r)


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
