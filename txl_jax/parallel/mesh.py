"""Axes of the device mesh, and sharding constraints on the model's activations.

    data      rows of the batch
    fsdp      rows of the batch too; parameters are sharded, and gathered where they are used
    tensor    heads, the feed-forward layer's inner width, words

shardings.py has the shardings of parameters and optimizer state. Without a mesh, and on a mesh of
one device, these functions change nothing.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
"""The axes that a batch's rows are sharded over."""


def shard_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """[B,...] with its rows sharded over the devices, and no other axis."""
    return _constrained(x, mesh, ROWS)


def shard_words(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """[V,...] with its words sharded over ``tensor`` if that divides V, else replicated."""
    divides = mesh is not None and x.shape[0] % mesh.shape["tensor"] == 0
    return _constrained(x, mesh, "tensor" if divides else None)


def replicate(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """An array with a full copy on every device."""
    return _constrained(x, mesh, None)


def _constrained(x: jax.Array, mesh: Mesh | None, first_axis) -> jax.Array:
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(first_axis)))


def sharded_over_rows(function: Callable, mesh: Mesh | None, n_rows: int) -> Callable:
    """The function run by every device on its own rows, without waiting for other devices.

    ``function``: of ``n_rows`` arrays [S,...] and then of parameters; gives one [S,...]. Gradients
    of parameters are summed over the axes of rows once, at the end. The compiler handles what is
    sharded over ``tensor``.
    """
    axes = () if mesh is None else tuple(axis for axis in ROWS if mesh.shape[axis] > 1)
    if not axes:
        return function
    rows = PartitionSpec(axes)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(*[rows] * n_rows, PartitionSpec()),
        out_specs=rows,
        axis_names=set(axes),
        check_vma=False,
    )
