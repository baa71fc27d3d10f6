"""Matrix products, and what XLA for GPUs needs to compute them well.

Cases: a single row, sides whose rows are no multiples of 16 bytes, products of the same rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.model import wide_products
from txl_jax.model.derivatives import with_derivatives
from txl_jax.parallel.platforms import platform_of


def product(x: jax.Array, matrix: jax.Array, mesh: Mesh | None, padded: bool = False) -> jax.Array:
    """Returns the product of rows x [S,D] with a matrix [D,E], [S,E].

    If ``padded``, the rows of the result may end with zeros, and those of x always may.

    On a GPU a single row is computed as two equal ones. XLA for GPUs writes the products of a
    single row with each column to memory before it adds them, so it moves four times the matrix.
    Sides are padded with zeros to multiples of 16 bytes there, unless devices share the matrix.
    """
    platform = platform_of(mesh)
    if platform != "gpu":
        return wide_products.matmul(x, matrix, platform)
    if x.shape[0] != 1:
        return _aligned(jnp.matmul, x, matrix, mesh, padded)
    return _aligned(jnp.matmul, jnp.concatenate([x, x]), matrix, mesh, padded)[:1]


def product_apart(x: jax.Array, matrix: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Returns the :func:`product` of more than one row, which XLA computes by itself.

    XLA for GPUs makes one product of several small ones of the same rows. A fused kernel, which
    needs each result in an array of its own, then waits for copies. XLA may join the gradients.
    """
    return _aligned(lambda *inputs: _apart(None, inputs, ()), x, matrix, mesh)


def share_matrices(mesh: Mesh | None) -> bool:
    """Tells whether devices of a mesh share matrices, whose sides are then not padded."""
    return mesh is not None and mesh.shape["fsdp"] * mesh.shape["tensor"] > 1


def _aligned(
    multiply: Callable, x: jax.Array, matrix: jax.Array, mesh: Mesh | None, padded: bool = False
) -> jax.Array:
    """Computes a product whose sides are padded on a GPU, since others have slow kernels there.

    With 410 and 2,100 numbers in bfloat16, as wt103_base has them, an H100 took half of the update
    for products, at about a sixth of the speed of others.
    """
    numbers = 16 // x.dtype.itemsize
    d, e = matrix.shape
    whole = d % numbers == e % numbers == 0
    if whole or platform_of(mesh) != "gpu" or share_matrices(mesh):
        return multiply(x, matrix)
    matrix = jnp.pad(matrix, [(0, -d % numbers), (0, -e % numbers)])
    result = multiply(jnp.pad(x, [(0, 0), (0, len(matrix) - x.shape[1])]), matrix)
    return result if padded else result[:, :e]


def _product(_, inputs, __):
    x, matrix = jax.lax.optimization_barrier(inputs)
    return x @ matrix, inputs


def _tangent(_, saved, tangents):
    (x, matrix), (dx, dmatrix) = saved, tangents
    return dx @ matrix + x @ dmatrix


def _gradient(_, saved, gradient):
    x, matrix = saved
    return gradient @ matrix.T, x.T @ gradient


_apart = with_derivatives(_product, _tangent, _gradient)
