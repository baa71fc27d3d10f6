"""Attention for one group of queries at a time, with scores [group,K] instead of [T,K].

Each group reads only the keys up to its own last query and within the window. The gradient
computes the group's scores again, except in a short segment, which has few scores.
"""

import functools

import jax
import jax.numpy as jnp

from txl_jax.model.derivatives import with_derivatives
from txl_jax.model.kernels import reference
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.parallel.shardings import zero_after

HALVED_FROM = {"cpu": 64}
"""On each platform, the least length from which a short segment is split into two groups."""
_SHORT = 128
_MOST_GROUPS = 16


def attend(x: AttentionInputs, platform: str = "") -> jax.Array:
    """Computes :func:`txl_jax.model.kernels.choice.attend` in groups of :func:`group_size`.

    ``platform`` is the platform of the devices, or empty if it is unknown.
    """
    t, m, unknown = x.mask.seg_len, x.mask.mem_len, x.mask.filled[0]
    size, short = group_size(t, platform), t <= _SHORT
    gathered: list[jax.Array] = []
    for start in range(0, t, size):
        queries = slice(start, min(start + size, t))
        keys = slice(max(0, m + start - x.mask.reach), m + queries.stop)
        q = x.q[:, :, queries]
        if gathered and not short:
            q, gathered[-1] = _in_order(q, gathered[-1], unknown)
        near = x.positions.nearest(keys.stop - keys.start)
        group = x.replace(q=q, k=x.k[:, :, keys], val=x.val[:, :, keys], positions=near)
        attend_part = functools.partial(
            reference.attend_part, queries=queries, keys=keys, platform=platform
        )
        gathered.append(attend_part(group) if short else _recomputed(attend_part, group, unknown))
    return jnp.concatenate(gathered, axis=2)


def _recomputed(function, x: AttentionInputs, unknown: jax.Array) -> jax.Array:
    """Acts like ``jax.checkpoint``, but XLA cannot merge the first and the second computation."""
    inputs = (x.q, x.k, x.val, x.positions)
    return _call(function, inputs, (x.mask, x.dropout, unknown))


def _of_group(function, inputs, constants):
    """Builds AttentionInputs from their parts, and applies a function to them."""
    return function(AttentionInputs(*inputs, *constants[:2]))


def _call_forward(function, inputs, constants):
    return _of_group(function, inputs, constants), (inputs, constants)


def _call_tangent(function, saved, tangents):
    inputs, constants = saved
    return jax.jvp(lambda *x: _of_group(function, x, constants), inputs, tangents)[1]


def _call_gradient(function, saved, gradient):
    (q, *others), constants = saved
    q = _after(q, gradient, constants[2])
    return jax.vjp(lambda *x: _of_group(function, x, constants), q, *others)[1](gradient)


_call = with_derivatives(_call_forward, _call_tangent, _call_gradient)


def _in_order(later: jax.Array, earlier: jax.Array, unknown: jax.Array):
    """Makes XLA compute ``earlier`` before ``later``, and their gradients in the reverse order."""
    return _ordered(None, (later, earlier), unknown)


def _order(_, inputs, unknown):
    later, earlier = inputs
    return (_after(later, earlier, unknown), earlier), unknown


def _order_gradients(_, unknown, gradients):
    later, earlier = gradients
    return later, _after(earlier, later, unknown)


_ordered = with_derivatives(_order, lambda _, unknown, tangents: tangents, _order_gradients)


def _after(x: jax.Array, done: jax.Array, unknown: jax.Array) -> jax.Array:
    """Returns ``x``, but XLA computes ``done`` before anything that uses the result."""
    return x + zero_after(done, unknown).astype(x.dtype)


def group_size(seg_len: int, platform: str = "") -> int:
    """Returns the number of queries in a group: 128, or more if there would be over 16 groups.

    A segment of up to 128 tokens is one group, or two as :data:`HALVED_FROM` says.
    """
    if seg_len > _SHORT:
        return max(_SHORT, -(-seg_len // _MOST_GROUPS))
    halved_from = HALVED_FROM.get(platform)
    halved = halved_from is not None and seg_len >= halved_from
    return -(-seg_len // 2) if halved else seg_len
