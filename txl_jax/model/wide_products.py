"""Products of bfloat16 factors on a CPU, with float32 results.

XLA has kernels for processors that multiply bfloat16 (twice as fast as float32 on an EPYC with
AVX512-BF16). It uses them for float32 results, and for sums over the last axis of the first factor:

    x [S,D] y [D,E]          x [S,D] y [E,D]^T          not x [S,D]^T g [S,E], a matrix's gradient

So x is copied in another order for the third one. All other orders, bfloat16 results and single
rows are several times slower, or as fast as float32.
"""

import math

import jax
import jax.numpy as jnp

from txl_jax.model.derivatives import with_derivatives
from txl_jax.parallel.platforms import cpu_has_bfloat16

_COLUMNS, _ROWS = -2, -1


def apply_to(platform: str, *factors: jax.Array) -> bool:
    """Tells whether this module computes products of these factors on this platform."""
    low = all(x.dtype == jnp.bfloat16 for x in factors)
    return low and platform == "cpu" and cpu_has_bfloat16()


def matmul(x: jax.Array, y: jax.Array, platform: str = "") -> jax.Array:
    """Returns x [...,S,D] times y [...,D,E] in their dtype, as ``x @ y``, on any platform."""
    if not apply_to(platform, x, y):
        return x @ y
    if y.ndim == 2:  # one flat product
        return _product((_COLUMNS, x.dtype), (x.reshape(-1, x.shape[-1]), y), ()).reshape(
            *x.shape[:-1], y.shape[-1]
        )
    return _product((_COLUMNS, x.dtype), (x, y), ())


def products_of_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the products of rows of x [...,S,D] and y [...,E,D]: float32 [...,S,E]."""
    return _product((_ROWS, jnp.dtype(jnp.float32)), (x, y), ())


def _float32(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Returns the float32 product of x [...,S,D] and y, whose ``axis`` is summed over.

    A single row is computed as two. A caller must round what it sums over columns of y before it
    transposes the result. XLA would otherwise move the transpose into the product after it has
    chosen a kernel, and the program would fail when it runs.
    """
    lead, single = x.shape[:-2], x.shape[-2] == 1
    if single:
        x = jnp.concatenate([x, x], axis=-2)
    if len(lead) > 1:  # with a second axis of size 1, XLA would compute in float32
        x, y = (z.reshape(math.prod(lead), *z.shape[-2:]) for z in (x, y))
    batch, n = tuple(range(x.ndim - 2)), x.ndim
    axes = ((n - 1,), (n + axis,)), (batch, batch)
    product = jax.lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)
    product = product.reshape(*lead, *product.shape[-2:])
    return product[..., :1, :] if single else product


def _of_columns(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the products of columns of x [...,S,D] and y [...,S,E]: float32 [...,D,E]."""
    if x.shape[-2] % 2:
        x, y = (jnp.pad(z, [(0, 0)] * (z.ndim - 2) + [(0, 1), (0, 0)]) for z in (x, y))
    # Pairs of rows are moved as 32 bits, since XLA would undo a plain transpose.
    even, odd = (jax.lax.bitcast_convert_type(x[..., i::2, :], jnp.uint16) for i in range(2))
    pairs = even.mT.astype(jnp.uint32) | (odd.mT.astype(jnp.uint32) << 16)
    columns = jax.lax.bitcast_convert_type(pairs, x.dtype)
    return _float32(columns.reshape(x.mT.shape), y, _COLUMNS)


def _forward(static, inputs, _):
    (axis, dtype), (x, y) = static, inputs
    return _float32(x, y, axis).astype(dtype), inputs


def _tangent(static, saved, tangents):
    (axis, dtype), (x, y), (dx, dy) = static, saved, tangents
    return (_float32(dx, y, axis) + _float32(x, dy, axis)).astype(dtype)


def _gradient(static, saved, gradient):
    (axis, _), (x, y) = static, saved
    g = gradient.astype(x.dtype)
    dx = _float32(g, y, _ROWS if axis == _COLUMNS else _COLUMNS)
    dy = _of_columns(x, g) if axis == _COLUMNS else _of_columns(g, x)
    return dx.astype(x.dtype), dy.astype(y.dtype)


_product = with_derivatives(_forward, _tangent, _gradient)
