"""How the model's arrays lie on a mesh of devices, where they are not parameters.

    data      rows of the batch
    fsdp      rows of the batch too; parameters are cut, and gathered where they are used
    tensor    heads, the feed-forward layer's inner width, words

Parameters and optimizer: parallel/shardings.py.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
"""The axes that a batch's rows are cut over."""


def spread_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """[B,...] with its rows over the devices of a mesh and no other axis cut.

    Without a mesh, and on a mesh of one device, the array itself.
    """
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(ROWS)))


def whole(x: jax.Array, mesh: Mesh | None, words: bool = False) -> jax.Array:
    """An array that is not of rows, the same on all devices of a mesh.

    ``words``: its first axis is cut over ``tensor``, where that divides it. Without a mesh, and on
    a mesh of one device, the array itself.
    """
    if mesh is None or mesh.size == 1:
        return x
    cut = words and x.shape[0] % mesh.shape["tensor"] == 0
    spec = PartitionSpec("tensor" if cut else None)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def each_its_rows(function: Callable, mesh: Mesh | None, n_rows: int) -> Callable:
    """The function run by every device on its own rows, so that none waits for another's.

    Args:
      function: of ``n_rows`` arrays [S,...] and of parameters; gives one [S,...].
      mesh: ``None``: the function as it is. Gradients of parameters are summed over the rows'
        axes once, at the end. What is cut over ``tensor`` stays with the compiler.
      n_rows: how many.
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
