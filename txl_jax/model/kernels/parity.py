"""Compares an implementation of attention with ``reference`` on this process's devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.kernels import choice, reference
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.model.masks import AttentionMask, attention_mask
from txl_jax.model.positions import Positions

TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 1e-2}
"""The largest :func:`difference` that rounding can explain; that of a wrong kernel is about 1."""


def random_inputs(
    n_head: int, rows: int, mask: AttentionMask, d_head: int, dtype: Any, dropout: Any = None
) -> AttentionInputs:
    """Draws random queries, keys, values and positions of a realistic scale."""
    t, k, scale = mask.seg_len, mask.n_keys, jnp.asarray(d_head**-0.5, dtype)
    keys = jax.random.split(jax.random.key(0), 6)
    draw = lambda key, *shape: jax.random.normal(keys[key], shape).astype(dtype)
    q = draw(0, n_head, rows, t, d_head) * scale
    of_keys, values = (draw(key, n_head, rows, k, d_head) for key in (1, 2))
    u, v = (draw(key, n_head, d_head) * scale for key in (3, 4))
    positions = Positions(u, v, draw(5, n_head, mask.n_distances, d_head))
    return AttentionInputs(q, of_keys, values, positions, mask, dropout)


def values_and_gradients(attend, x: AttentionInputs) -> Any:
    """Returns the result of ``attend``, and the gradients of a loss for q, k, val and positions.

    The loss is the sum of the result's entries, each times an entry of a random array. The keys and
    values of memory and segment are passed to ``attend`` separately, as in a model.
    """
    direction = jax.random.normal(jax.random.key(9), x.q.shape)

    def loss(q, k, val, positions):
        k, val = (tuple(jnp.split(both, [x.mask.mem_len], axis=2)) for both in (k, val))
        gathered = attend(x.replace(q=q, k=k, val=val, positions=positions))
        return jnp.sum(gathered.astype(jnp.float32) * direction), gathered

    grad = jax.grad(loss, argnums=range(4), has_aux=True)
    gradients, gathered = grad(x.q, x.k, x.val, x.positions)
    return gathered, gradients


def largest_difference(found: Any, expected: Any) -> float:
    """Returns the largest |found - expected|, relative to the largest |expected| of its array."""
    return float(worst(found, expected))


def worst(found: Any, expected: Any) -> jax.Array:
    """Computes :func:`largest_difference` as an array, for use under ``jit``."""

    def of_array(a, b):
        a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(of_array, found, expected))))


def example(d_head: int, dtype: Any, dropatt: float = 0.0) -> AttentionInputs:
    """Returns random inputs for three rows, with empty, full and partly filled memory.

    The mask has a window, and one row has a reset.
    """
    reset = jnp.zeros((3, 200), bool).at[1, 60].set(True)
    mask = attention_mask(200, jnp.array([0, 150, 70]), 150, "tf", reset)
    dropout = AttentionDropout.draw(jax.random.key(1), dropatt) if dropatt else None
    return random_inputs(2, 3, mask, d_head, dtype, dropout)


def difference(implementation: str, d_head: int, dtype: Any, dropatt: float = 0.0) -> float:
    """Returns :func:`largest_difference` between an implementation and ``reference`` in float32.

    ``reference`` multiplies in float32, and the implementation in JAX's default precision.
    """
    inputs = example(d_head, dtype, dropatt)
    in_float32 = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    run = jax.jit(values_and_gradients, static_argnums=0)
    with jax.default_matmul_precision("highest"):
        expected = run(reference.attend, jax.tree.map(in_float32, inputs))
    found = run(functools.partial(choice.attend, implementation=implementation), inputs)
    return largest_difference(found, expected)
