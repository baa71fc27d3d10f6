"""Rows of a table by index, with a gradient that has no undefined order of additions on GPUs."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.model.derivatives import with_derivatives
from txl_jax.parallel.platforms import platform_of

_MOST = 2**25
"""Up to so many rows of the table times indices, the gradient on a GPU is a product."""


def table_rows(
    table: jax.Array, index: jax.Array, dtype: jax.typing.DTypeLike, mesh: Mesh | None
) -> jax.Array:
    """Returns ``table[index]`` in a dtype, [...,d]; the table is float32 [V,d], and index int32.

    The gradient adds the rows of each index. A GPU adds them by a product with one-hot rows, where
    the table is small: XLA's additions in a fixed order pass over all rows a dozen times.
    """
    size = len(table) * math.prod(index.shape)
    symbolic = not isinstance(size, int)  # in a program that is exported for any number of rows
    if platform_of(mesh) != "gpu" or symbolic or size > _MOST:
        return table[index].astype(dtype)
    return _rows((jnp.dtype(dtype), len(table)), (table,), (index,))


def _forward(static, inputs, constants):
    (table,), (index,) = inputs, constants
    return table[index].astype(static[0]), index


def _tangent(static, index, tangents):
    return tangents[0][index].astype(static[0])


def _gradient(static, index, gradient):
    one_hot = index.reshape(-1, 1) == jnp.arange(static[1])
    rows = gradient.reshape(-1, gradient.shape[-1])
    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    return (jnp.einsum("sv,sd->vd", one_hot.astype(rows.dtype), rows, **options),)


_rows = with_derivatives(_forward, _tangent, _gradient)
