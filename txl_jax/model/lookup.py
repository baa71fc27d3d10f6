"""Rows of a table by index, with a gradient whose additions have a fixed order on GPUs too.

XLA can also fix the order, by sorting all numbers of all rows. On an H100, this sort took 4.7 of
the 46 ms that all kernels of an update of wt103_large took.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.model.derivatives import with_derivatives
from txl_jax.parallel.mesh import row_devices
from txl_jax.parallel.platforms import platform_of
from txl_jax.parallel.shardings import sharded_over_rows

_MOST = 2**25
"""If the table's rows times the indices are at most this, the gradient on a GPU is a product with
one-hot rows."""


def table_rows(
    table: jax.Array, index: jax.Array, dtype: jax.typing.DTypeLike, mesh: Mesh | None
) -> jax.Array:
    """Returns ``table[index]`` in a dtype, [B,...,d]; table is float32 [V,d], index int32 [B,...].

    The rows of ``index`` are split over the devices of ``mesh``.
    """
    symbolic = not isinstance(math.prod(index.shape), int)  # exported for any number of rows
    if platform_of(mesh) != "gpu" or symbolic or len(index) % row_devices(mesh):
        return table[index].astype(dtype)

    def rows(index, table):
        product = len(table) * index.size <= _MOST
        return _rows((jnp.dtype(dtype), len(table), product), (table,), (index,))

    return sharded_over_rows(rows, mesh, n_rows=1)(index, table)


def _forward(static, inputs, constants):
    (table,), (index,) = inputs, constants
    return table[index].astype(static[0]), index


def _tangent(static, index, tangents):
    return tangents[0][index].astype(static[0])


def _gradient(static, index, gradient):
    (_, words, product), index = static, jnp.asarray(index).reshape(-1)
    rows = gradient.reshape(-1, gradient.shape[-1])
    if not product:
        return (_sums(words, index, rows.astype(jnp.float32)),)
    one_hot = index[:, None] == jnp.arange(words)
    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    return (jnp.einsum("sv,sd->vd", one_hot.astype(rows.dtype), rows, **options),)


def _sums(words: int, index: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the sum of all rows that have the same index: [words,d], from rows [S,d].

    Sorting makes rows of the same index neighbours. Each row then adds the sum of the row 1 place
    before it, then 2, 4, .. places before it, if that row has the same index. So the last row of
    each index ends up with the complete sum.
    """
    order, n = jnp.argsort(index), len(index)
    index, rows, apart = index[order], rows[order], 1
    while apart < n:
        same = (index[apart:] == index[:-apart])[:, None]
        rows = rows + jnp.pad(jnp.where(same, rows[:-apart], 0), ((apart, 0), (0, 0)))
        apart *= 2
    last = jnp.append(index[1:] != index[:-1], True)
    place = jnp.where(last, index, words + jnp.arange(n))  # drops all other rows
    empty = jnp.zeros((words, rows.shape[1]), rows.dtype)
    return empty.at[place].set(rows, mode="drop", unique_indices=True)


_rows = with_derivatives(_forward, _tangent, _gradient)
