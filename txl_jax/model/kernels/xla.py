"""Attention some queries at a time: scores of Q x K instead of T x K, on any device.

Each group of queries reads the keys up to its own last one only (nothing later could be seen, nor
anything beyond the window), and its scores are computed again for the gradient. A short segment
keeps its scores, which are few; its groups only spare what nobody sees.
"""

import functools

import jax
import jax.numpy as jnp

from txl_jax.model.kernels import reference
from txl_jax.model.kernels.dropping import Dropping
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.parallel.ordering import zero_after

_SHORT = 128
_MOST_GROUPS = 16


def attend(
    q: jax.Array,
    k: jax.Array,
    val: jax.Array,
    positions: Positions,
    visible: AttentionMask,
    dropping: Dropping | None = None,
    few: int | None = None,
) -> jax.Array:
    """See :func:`txl_jax.model.kernels.choice.attend`.

    ``few``: see :func:`group_size`.
    """
    t, m = visible.seg_len, visible.mem_len
    size, short = group_size(t, few), t <= _SHORT
    gathered: list[jax.Array] = []
    number = visible.filled[0]
    for start in range(0, t, size):
        queries = slice(start, min(start + size, t))
        keys = slice(max(0, m + start - visible.reach), m + queries.stop)
        part = functools.partial(reference.attend_part, queries=queries, keys=keys)
        asking = q[:, :, queries]
        if gathered and not short:
            asking, gathered[-1] = _one_by_one(asking, gathered[-1], number)
        own = (asking, k[:, :, keys], val[:, :, keys])
        near = positions.nearest(keys.stop - keys.start)
        if short:
            gathered.append(part(*own, near, visible, dropping))
        else:
            gathered.append(_computed_again(part, (*own, near), (visible, dropping), number))
    return jnp.concatenate(gathered, axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _computed_again(function, inputs, others, number: jax.Array):
    """``function(*inputs, *others)``; for the gradient of its inputs it is computed again.

    As ``jax.checkpoint``, whose second computation some compilers merge with the first.
    """
    return function(*inputs, *others)


def _computed_again_forward(function, inputs, others, number):
    return function(*inputs, *others), (inputs, others, number)


def _computed_again_backward(function, saved, gradient):
    (q, *rest), others, number = saved
    _, pull = jax.vjp(lambda *x: function(*x, *others), _after(q, gradient, number), *rest)
    return pull(gradient), None, None


_computed_again.defvjp(_computed_again_forward, _computed_again_backward)


@jax.custom_vjp
def _one_by_one(later: jax.Array, earlier: jax.Array, number: jax.Array):
    """Both as they are: ``later`` is known only when ``earlier`` is, its gradient the other way.

    A compiler that begins all groups at once holds the scores of all of them.
    """
    return _after(later, earlier, number), earlier


def _one_by_one_forward(later, earlier, number):
    return _one_by_one(later, earlier, number), number


def _one_by_one_backward(number, gradients):
    later, earlier = gradients
    return later, _after(earlier, later, number), None


_one_by_one.defvjp(_one_by_one_forward, _one_by_one_backward)


def _after(x: jax.Array, done: jax.Array, number: jax.Array) -> jax.Array:
    """``x``, known only when ``done`` is."""
    return x + zero_after(done, number).astype(x.dtype)


def group_size(seg_len: int, few: int | None = None) -> int:
    """How many queries are taken at a time: 128, more if they would be more than 16 groups.

    ``few``: about how many queries are enough for products to run at full speed. Segments of up to
    128 are taken in equal groups of about so many; ``None``: whole.
    """
    if seg_len > _SHORT:
        return max(_SHORT, -(-seg_len // _MOST_GROUPS))
    return seg_len if few is None else -(-seg_len // max(1, round(seg_len / few)))
