"""Matrix products of bfloat16 factors on a CPU, with float32 results.

Some processors have instructions that multiply bfloat16, and XLA has fast kernels for them (twice
as fast as float32 on an EPYC with AVX512-BF16). XLA uses these kernels only if the result is
float32, and if the sum is over the last axis of the first factor:

    x [S,D] y [D,E]          x [S,D] y [E,D]^T          not x [S,D]^T g [S,E], a matrix's gradient

So for the third product, x is first copied to a transposed array. Products with another order of
axes or with bfloat16 results are several times slower, or only as fast as float32. Products of a
single row are slow too, except under :func:`reading_rows`.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.model.derivatives import with_derivatives
from txl_jax.parallel.platforms import cpu_has_bfloat16

_COLUMNS, _ROWS = -2, -1
_PARTS = 8
_LEAST = 4096  # numbers in a factor; a smaller one compiles as slowly and gains nothing
_READING = contextvars.ContextVar("reading rows", default=False)


def apply_to(platform: str, x: jax.Array, y: jax.Array) -> bool:
    """Tells whether this module computes matrix products of x [...,S,D] and y on the platform."""
    if platform != "cpu" or not x.dtype == y.dtype == jnp.bfloat16:
        return False
    return cpu_has_bfloat16() or _reads_rows(x, y)


@contextlib.contextmanager
def reading_rows() -> Iterator[None]:
    """Makes matrix products with a single row, in a loop on a CPU, read the other factor fast.

    The loop should carry the other factor as :func:`to_bits` returns it. If that factor has batch
    axes and its rows are multiplied (:func:`products_of_rows`), the loop should carry its
    transpose. Do not use this with ``jax.vmap``, which makes several rows share the factor.
    """
    token = _READING.set(True)
    try:
        yield
    finally:
        _READING.reset(token)


def is_reading_rows() -> bool:
    """Tells whether the caller is traced inside of :func:`reading_rows`."""
    return _READING.get()


def _reads_rows(x: jax.Array, y: jax.Array) -> bool:
    return is_reading_rows() and x.shape[-2] == 1 and y.shape[-2] * y.shape[-1] >= _LEAST


def matmul(x: jax.Array, y: jax.Array, platform: str = "") -> jax.Array:
    """Returns x [...,S,D] times y [...,D,E] in their dtype, as ``x @ y``, on any platform."""
    if not apply_to(platform, x, y):
        return x @ y
    if y.ndim == 2:  # one flat product
        flat = x.reshape(-1, x.shape[-1])
        return _columns(flat, y).reshape(*x.shape[:-1], y.shape[-1])
    return _columns(x, y)


def products_of_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the dot products of rows of x [...,S,D] and y [...,E,D]: float32 [...,S,E]."""
    return _product((_ROWS, jnp.dtype(jnp.float32), _reads_rows(x, y)), (x, y), ())


def _columns(x: jax.Array, y: jax.Array) -> jax.Array:
    return _product((_COLUMNS, x.dtype, _reads_rows(x, y)), (x, y), ())


def to_bits(tree: Any) -> Any:
    """Returns a tree whose bfloat16 arrays are replaced by their bits, uint16.

    A loop under :func:`reading_rows` carries bits, since XLA would copy bfloat16 arrays.
    """
    bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x
    return jax.tree.map(bits, tree)


def from_bits(tree: Any) -> Any:
    """Undoes :func:`to_bits`."""
    number = lambda x: jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
    return jax.tree.map(number, tree)


def _float32(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Returns the float32 product of x [...,S,D] and y, summed over this ``axis`` of y.

    A single row is computed as two equal rows. If ``axis`` is ``_COLUMNS``, a caller must round the
    result before transposing it. Otherwise XLA would move the transpose into the product after
    choosing a kernel, and the program would fail when it runs.
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


def _of_a_row(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Returns the float32 product of a row x [...,1,D] and y, as :func:`_float32`.

    XLA has no fast kernel for this product, but its elementwise kernels read arrays at the speed of
    memory. So D is cut into eight equal parts and a remainder, and one elementwise kernel adds the
    eight parts. y is read as integers, because XLA would first convert slices of bfloat16 arrays to
    float32. A barrier stops XLA from converting y to float32 before a loop and keeping the result.
    With batch axes, the sums over rows of y are short. They are ten times as fast if the transpose
    of y is in memory.
    """
    y = jax.lax.bitcast_convert_type(y, jnp.uint16)
    if y.ndim > 2 and axis == _ROWS:
        y, axis = y.mT, _COLUMNS
    x, y = jax.lax.optimization_barrier((x, y))
    x = x.astype(jnp.float32)
    if axis == _COLUMNS:
        x = x.mT
    n = y.shape[axis] // _PARTS

    def products(start: int, size: int) -> jax.Array:
        part = lambda z: jax.lax.slice_in_dim(z, start, start + size, axis=z.ndim + axis)
        wide = part(y).astype(jnp.uint32) << 16
        return part(x) * jax.lax.bitcast_convert_type(wide, jnp.float32)

    total = [products(i, 1) for i in range(n * _PARTS, y.shape[axis])]
    if n:
        parts = functools.reduce(jnp.add, [products(i * n, n) for i in range(_PARTS)])
        parts = jax.lax.optimization_barrier(parts)
        ones = jnp.ones((*y.shape[:-2], n, 1), jnp.float32)
        total.append(ones.mT @ parts if axis == _COLUMNS else parts @ ones)
    product = functools.reduce(jnp.add, total)
    return product if axis == _COLUMNS else product.mT


def _of_columns(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the dot products of columns of x [...,S,D] and y [...,S,E]: float32 [...,D,E]."""
    if not all(isinstance(size, int) for size in x.shape):  # a symbolic size of jax.export
        return jnp.einsum("...sd,...se->...de", x, y, preferred_element_type=jnp.float32)
    if x.shape[-2] % 2:
        x, y = (jnp.pad(z, [(0, 0)] * (z.ndim - 2) + [(0, 1), (0, 0)]) for z in (x, y))
    # Pairs of rows are moved as 32 bits, since XLA would undo a plain transpose.
    even, odd = (jax.lax.bitcast_convert_type(x[..., i::2, :], jnp.uint16) for i in range(2))
    pairs = even.mT.astype(jnp.uint32) | (odd.mT.astype(jnp.uint32) << 16)
    columns = jax.lax.bitcast_convert_type(pairs, x.dtype)
    return _float32(columns.reshape(x.mT.shape), y, _COLUMNS)


def _forward(static, inputs, _):
    (axis, dtype, reads), (x, y) = static, inputs
    return (_of_a_row if reads else _float32)(x, y, axis).astype(dtype), inputs


def _tangent(static, saved, tangents):
    (axis, dtype, _), (x, y), (dx, dy) = static, saved, tangents
    return (_float32(dx, y, axis) + _float32(x, dy, axis)).astype(dtype)


def _gradient(static, saved, gradient):
    (axis, *_), (x, y) = static, saved
    g = gradient.astype(x.dtype)
    dx = _float32(g, y, _ROWS if axis == _COLUMNS else _COLUMNS)
    dy = _of_columns(x, g) if axis == _COLUMNS else _of_columns(g, x)
    return dx.astype(x.dtype), dy.astype(y.dtype)


_product = with_derivatives(_forward, _tangent, _gradient)


def add_bias(x: jax.Array, bias: jax.Array, platform: str = "") -> jax.Array:
    """Returns x [...,S,E] plus a bias [...,E], in the dtype of x, on any platform.

    On a CPU, XLA sums the rows of a bfloat16 gradient inside an update with slow kernels (measured,
    RESULTS.md). So on a CPU that multiplies bfloat16, the gradient of the bias is computed as a
    product with ones.
    """
    if platform == "cpu" and x.dtype == jnp.bfloat16 and cpu_has_bfloat16():
        return _plus_bias(None, (x, bias), ())
    return _sum_of((x, bias))


def _bias_gradient(_, bias, gradient):
    ones = jnp.ones((*gradient.shape[:-2], 1, gradient.shape[-2]), gradient.dtype)
    return gradient, _float32(ones, gradient, _COLUMNS)[..., 0, :].astype(bias.dtype)


def _sum_of(pair):
    x, bias = pair
    return x + bias[..., None, :].astype(x.dtype)


_plus_bias = with_derivatives(
    lambda _, inputs, __: (_sum_of(inputs), inputs[1]),
    lambda _, __, tangents: _sum_of(tangents),
    _bias_gradient,
)
