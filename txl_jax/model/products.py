"""Matrix products of a single row, which XLA for GPUs computes badly."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

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
