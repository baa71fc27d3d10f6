"""Products that XLA for GPUs computes badly: of a single row, and several of the same rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.model.derivatives import with_derivatives
from txl_jax.parallel.platforms import platform_of


def product_of_rows(
    product: Callable[[jax.Array], jax.Array], x: jax.Array, mesh: Mesh | None
) -> jax.Array:
    """Returns the product of rows x [S,D] with a matrix, [S,E].

    On a GPU a single row is computed as two equal ones. XLA for GPUs writes the products of a
    single row with each column to memory before it adds them, so it moves four times the matrix.
    """
    if x.shape[0] != 1 or platform_of(mesh) != "gpu":
        return product(x)
    return product(jnp.concatenate([x, x]))[:1]


def product_apart(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns the product of rows x [S,D] with a matrix [D,E], which XLA computes by itself.

    XLA for GPUs makes one product of several small ones of the same rows. A fused kernel, which
    needs each result in an array of its own, then waits for copies. XLA may join the gradients.
    """
    return _apart(None, (x, matrix), ())


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
