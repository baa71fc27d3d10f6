"""Projected memory in a ring of slots, for inference; a step overwrites the oldest slots in place.

R slots hold keys and values. The oldest state is in slot ``oldest``, and the newest state is in the
slot before it. For R = 4 and oldest = 1, the slots have these distances from the next query:

    slot            0 1 2 3
    distance        1 4 3 2         a segment of two tokens is written to slots 1 and 2 next

Position scores are computed in the order of distances and then reordered to the order of slots.
This moves T x R numbers; the R x H keys and values are not copied.

If ``clamp_len`` is below R there are two rings, and a step moves the oldest T states of the near
ring to the far ring. All states of the far ring have the clamped distance, so a query needs one
position score for all of them. Fused kernels read a single ring only.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.model.scores import content_scores, position_scores_by_distance, weighted_sum

SINGLE_RING_MAX_TOKENS = 8
"""Segments of up to this length use one ring. For one query, two rings had 0.8 times the speed of
one ring (measured with 512 slots on two CPU cores)."""


class KeysValues(NamedTuple):
    """Keys and values of S positions, [N,B,S,H] each."""

    keys: jax.Array
    values: jax.Array


class Ring(NamedTuple):
    """A ring of one layer: keys and values [N,B,R,H], and the slot of the oldest state (int32)."""

    keys: jax.Array
    values: jax.Array
    oldest: jax.Array


def slots_of(mem_len: int, seg_len: int, clamp_len: int = -1) -> tuple[int, int]:
    """Returns the numbers of slots of the near and the far ring, which are multiples of T.

    Their sum is M, rounded up. So a segment never wraps around the end of a ring, and every state
    in the far ring is more than ``clamp_len`` positions before the segment's first query.
    """
    rounded = lambda n: -(-n // seg_len) * seg_len
    single = clamp_len < 0 or seg_len <= SINGLE_RING_MAX_TOKENS
    near = rounded(mem_len if single else min(mem_len, clamp_len))
    return near, rounded(mem_len) - near


def attend(
    q: jax.Array,
    past: list[Ring],
    present: KeysValues,
    positions: Positions,
    mask: AttentionMask,
    platform: str = "",
) -> jax.Array:
    """Returns the attention of each query to the rings and the segment: [N,B,T,H].

    ``past`` are the near ring and, if states are beyond ``clamp_len``, the far ring. ``q``
    [N,B,T,H] and ``positions`` are scaled as in kernels/reference.py. ``positions`` are for the
    near ring and the segment, and their largest distance is also that of the far ring. The mask's
    memory length is the number of slots of both rings. For ``platform`` see scores.py.
    """
    near, *beyond = past
    near_places, *far_places = places(past)
    t, r, by_distance = mask.seg_len, near.keys.shape[2], None
    if positions.of_distances:
        # Reordering reads one row before and one row after the scores. It is faster to add these
        # rows to q, except for one query, where they are added to the scores.
        padded = lambda x: jnp.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)])
        terms = positions.v, positions.r, positions.b, platform
        scored = lambda x: position_scores_by_distance(x, *terms)
        by_distance = padded(scored(q)) if t == 1 else scored(padded(q))

    def scores(keys, position_part):
        content = content_scores(q, positions.u, keys, platform)
        return content if by_distance is None else content + position_part(by_distance)

    parts = []  # scores, mask and values of each set of keys
    for far, keys in zip(beyond, far_places, strict=True):
        far_scores = scores(far.keys, lambda x: x[..., 1:-1, :1])
        parts.append((far_scores, mask.allowed(keys=keys), far.values))
    if r:
        near_scores = scores(near.keys, lambda x: _by_slot(x, near.oldest, r))
        parts.append((near_scores, mask.allowed(keys=near_places), near.values))
    own_scores = scores(present.keys, lambda x: _by_key(x[..., 1:-1, :], r))
    own = slice(mask.mem_len, mask.n_keys)
    parts.append((own_scores, mask.allowed(keys=own), present.values))
    weights, total = positions.softmax(*(part[:2] for part in parts))
    dtype = present.values.dtype
    gather = lambda w, values: weighted_sum(w.astype(dtype), values, platform)
    gathered = [gather(w, values) for w, (_, _, values) in zip(weights, parts, strict=True)]
    return sum(gathered[1:], gathered[0]) / total.astype(dtype)


def one_ring(
    q: jax.Array, past: list[Ring], present: KeysValues, positions: Positions, mask: AttentionMask
) -> AttentionInputs:
    """Returns the inputs of :func:`attend` for a fused kernel, which reads the ring in place."""
    (ring,) = past
    k, val = (ring.keys, present.keys), (ring.values, present.values)
    return AttentionInputs(q, k, val, positions, mask, oldest=ring.oldest)


def places(past: list[Ring]) -> list[jax.Array]:
    """Returns the index of each ring's slots among all keys, oldest first: int32 [R] each."""
    near, *beyond = past
    first = sum(far.keys.shape[2] for far in beyond)
    return [first + _ages(near), *map(_ages, beyond)]


def _ages(slots: Ring) -> jax.Array:
    """Returns each slot's index among the slots of its ring, from the oldest: int32 [R]."""
    slot, r = jnp.arange(slots.keys.shape[2]), slots.keys.shape[2]
    return jnp.where(slot >= slots.oldest, slot - slots.oldest, slot - slots.oldest + r)


# Column c of scores by distance [..., T, R + T] is for the distance R + T - 1 - c. For T = 2, R = 4
# and oldest = 1, with entries named by query and distance:
#
#     distance   5  4  3  2  1  0              slot   0  1  2  3
#     query 0   05 04 03 02 01 00      ->    query 0  01 04 03 02
#     query 1   15 14 13 12 11 10            query 1  12 15 14 13
#
# In the flattened scores, the entry of query i and key p, counted from the oldest, has the index
# i (R+T-1) + T - 1 + p: here 04 has the index 1, and 15 the index 6. So the flattened scores from
# index T - 1 on, cut into rows of R + T - 1, have each query's keys in order (see positions.py).


def _by_slot(x: jax.Array, oldest: jax.Array, r: int) -> jax.Array:
    """Reorders padded scores by distance [..., 1+T+1, R+T] to scores by slot [..., T, R]."""
    *lead, rows, k = x.shape
    t, flat = rows - 2, x.reshape(*lead, rows * k)

    def rows_from(start):
        part = jax.lax.dynamic_slice_in_dim(flat, start, t * (k - 1), axis=-1)
        return part.reshape(*lead, t, k - 1)[..., :r]

    first = k + t - 1 - oldest
    return jnp.where(jnp.arange(r) >= oldest, rows_from(first), rows_from(first + r))


def _by_key(x: jax.Array, r: int) -> jax.Array:
    """Reorders scores by distance [..., T, R+T] to scores of the segment's keys [..., T, T]."""
    *lead, t, _ = x.shape
    near = jnp.pad(x[..., r:], [(0, 0)] * (len(lead) + 1) + [(0, t)])
    flat = near.reshape(*lead, 2 * t * t)[..., t - 1 : t - 1 + t * (2 * t - 1)]
    return flat.reshape(*lead, t, 2 * t - 1)[..., :t]
