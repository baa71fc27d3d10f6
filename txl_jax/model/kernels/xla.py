"""Attention some queries at a time: scores of Q x K instead of T x K, on any device.

Each group of queries reads the keys up to its own last one only (nothing later could be seen, nor
anything beyond the window), and its scores are computed again for the gradient.
"""

import functools

import jax
import jax.numpy as jnp

from txl_jax.model.kernels import reference
from txl_jax.model.kernels.dropping import Dropping
from txl_jax.model.masks import Visible
from txl_jax.model.positions import Positions

_LEAST = 128
_MOST_GROUPS = 16


def attend(
    q: jax.Array,
    k: jax.Array,
    val: jax.Array,
    positions: Positions,
    visible: Visible,
    dropping: Dropping | None = None,
) -> jax.Array:
    """See :func:`txl_jax.model.kernels.choice.attend`."""
    t, m = visible.seg_len, visible.mem_len
    size = group_size(t)
    if size >= t:
        return reference.attend(q, k, val, positions, visible, dropping)
    gathered = []
    for start in range(0, t, size):
        queries = slice(start, min(start + size, t))
        keys = slice(max(0, m + start - visible.reach), m + queries.stop)
        part = functools.partial(reference.attend_part, queries=queries, keys=keys)
        own = (q[:, :, queries], k[:, :, keys], val[:, :, keys])
        near = positions.nearest(keys.stop - keys.start)
        gathered.append(jax.checkpoint(part)(*own, near, visible, dropping))
    return jnp.concatenate(gathered, axis=2)


def group_size(seg_len: int) -> int:
    """How many queries are taken at a time: 128, more if they would be more than 16 groups."""
    return max(_LEAST, -(-seg_len // _MOST_GROUPS))
