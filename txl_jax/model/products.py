"""Matrix products, in forms that XLA for GPUs computes fast.

There are three special cases: a single row, rows whose size is not a multiple of 16 bytes, and
several products of the same rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.model import wide_products
from txl_jax.model.derivatives import with_derivatives
from txl_jax.parallel.platforms import platform_of


def product(x: jax.Array, matrix: jax.Array, mesh: Mesh | None, padded: bool = False) -> jax.Array:
    """Returns the product of rows x [S,D] with a matrix [D,E]: [S,E].

    Rows of x can end with zeros as padding. If ``padded``, rows of the result can end with such
    zeros too, so they can have more than E numbers.

    On a GPU, a single row is multiplied as two equal rows. For a single row, XLA would write all
    elementwise products to memory before it sums them, which moves four times the bytes of the
    matrix. On a GPU, D and E are also padded with zeros to multiples of 16 bytes, unless the matrix
    is split over devices.
    """
    platform = platform_of(mesh)
    if platform != "gpu":
        return wide_products.matmul(x, matrix, platform)
    if x.shape[0] != 1:
        return _aligned(jnp.matmul, x, matrix, mesh, padded)
    return _aligned(jnp.matmul, jnp.concatenate([x, x]), matrix, mesh, padded)[:1]


def product_apart(
    x: jax.Array, matrix: jax.Array, mesh: Mesh | None, scale: float = 1.0
) -> jax.Array:
    """Returns the :func:`product` times ``scale``, which XLA cannot merge with other products.

    ``x`` has more than one row. XLA for GPUs merges several small products of the same rows into
    one. A fused kernel needs each result in an array of its own, so it would wait for copies. XLA
    can still merge the products that compute the gradient.
    """
    return _aligned(lambda *inputs: _apart(scale, inputs, ()), x, matrix, mesh)


def share_matrices(mesh: Mesh | None) -> bool:
    """Tells whether a mesh splits matrices over its devices; their sides are then not padded."""
    return mesh is not None and mesh.shape["fsdp"] * mesh.shape["tensor"] > 1


def _aligned(
    multiply: Callable, x: jax.Array, matrix: jax.Array, mesh: Mesh | None, padded: bool = False
) -> jax.Array:
    """Computes a product; on a GPU its sides are padded to sizes that have fast kernels.

    The sides of wt103_base are 410 and 2,100 numbers. Unpadded bfloat16 products with these sides
    took half of the update on an H100. They had about a sixth of the speed of the fast kernels.
    """
    numbers = 16 // x.dtype.itemsize
    d, e = matrix.shape
    whole = d % numbers == e % numbers == 0
    if whole or platform_of(mesh) != "gpu" or share_matrices(mesh):
        return multiply(x, matrix)
    matrix = jnp.pad(matrix, [(0, -d % numbers), (0, -e % numbers)])
    result = multiply(jnp.pad(x, [(0, 0), (0, len(matrix) - x.shape[1])]), matrix)
    return result if padded else result[:, :e]


def _product(scale, inputs, _):
    x, matrix = jax.lax.optimization_barrier(inputs)
    return x @ matrix * scale, inputs


def _tangent(scale, saved, tangents):
    (x, matrix), (dx, dmatrix) = saved, tangents
    return (dx @ matrix + x @ dmatrix) * scale


def _gradient(scale, saved, gradient):
    x, matrix = saved  # scales the matrix below, which is smaller than the gradient
    return gradient @ (matrix * scale).T, x.T @ gradient * scale


_apart = with_derivatives(_product, _tangent, _gradient)
