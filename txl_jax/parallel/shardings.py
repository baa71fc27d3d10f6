"""The shardings of parameters, optimizer state, batches and activations on a mesh (mesh.py).

An axis of a parameter is replicated if the number of its devices does not divide its size, such as
267,735 words.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from txl_jax.parallel.mesh import COPIES, ROWS, copies, row_devices

PARAMETERS: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("query", "key", "value", "position"), ("fsdp", "tensor", None)),  # [D,N,H]
    "output": ("tensor", None, "fsdp"),  # [N,H,D]
    **dict.fromkeys("uv", ("tensor", None)),  # [N,H]
    "value_bias": ("tensor", None),  # [N,H]
    **dict.fromkeys(("from_output", "from_input"), ("fsdp", None, "tensor")),  # [D,3,D]
    "distance": (None, "tensor", None),  # [R,N,H]
    "distance_bias": (None, "tensor"),  # [R,N]
    "positions": (None, "fsdp"),  # [R,D]
    "inner/kernel": ("fsdp", "tensor"),  # [D,F]
    "inner/bias": ("tensor",),  # [F]
    "outer/kernel": ("tensor", "fsdp"),  # [F,D]
    **dict.fromkeys(("embedding", "softmax_weight"), ("tensor", "fsdp")),  # [V,d]
    "softmax_bias": ("tensor",),  # [V]
    **dict.fromkeys(("embedding_projection", "softmax_projection"), (None, "fsdp")),  # [d,D]
    "cluster_weight": (None, "fsdp"),  # [C,d]
    "past_bias": ("tensor",),  # [V]
    **dict.fromkeys(("mixture_prior", "mixture_latent_bias"), (None, None)),  # [D,K], [K,d]
}
"""The mesh axis of each axis of a parameter, or ``None`` if it is not sharded. A key is the end of
a parameter's path, without a cluster's number. Other matrices are sharded by their first axis over
``fsdp``, and other vectors are replicated. Parameters of stacked layers have one axis more, and so
have ``u`` and ``v`` if each layer has its own ``u`` and ``v``."""


@dataclasses.dataclass(frozen=True)
class Shardings:
    """The shardings of a run's arrays on a mesh, for ``jit`` and ``device_put``."""

    mesh: Mesh

    @property
    def row_devices(self) -> int:
        """The number of devices that rows are sharded over."""
        return row_devices(self.mesh)

    def replicated(self) -> NamedSharding:
        """Returns the sharding with a full copy on every device."""
        return self._sharding()

    def rows(self, leading_axis: bool = False) -> NamedSharding:
        """Returns the sharding of [B,...] by rows, or of [L,B,...] with a ``leading_axis``."""
        return self._sharding(None, ROWS) if leading_axis else self._sharding(ROWS)

    def parameters(self, tree: Any) -> Any:
        """Returns the shardings of parameters, or of an optimizer's state, by :data:`PARAMETERS`.

        Layers can be stacked. The optimizer's moments are sharded like their parameters, and its
        counts are replicated.
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.sharded(_axes_of(path, leaf.ndim), leaf.shape), tree
        )

    def sharded(self, axes: tuple[Any, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Returns an array's sharding over these mesh axes, where they divide the array's sides."""
        size = lambda axis: math.prod(self.mesh.shape[a] for a in np.atleast_1d(axis))
        divides = lambda axis, n: axis is not None and n % size(axis) == 0
        pairs = zip(axes, shape, strict=False)
        return self._sharding(*(axis if divides(axis, n) else None for axis, n in pairs))

    def _sharding(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def _axes_of(path: tuple[Any, ...], n_axes: int) -> tuple[str | None, ...]:
    """Returns the mesh axis of each axis of a parameter, or of one of its moments."""
    *modules, name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    own = n_axes - ("layers" in modules)  # without the axis of stacked layers
    stem, _, number = name.rpartition("_")
    key = stem if number.isdigit() else name
    if name in ("kernel", "bias"):
        key = "/".join([*modules[-1:], name])
    unknown = ("fsdp", *[None] * (own - 1)) if own > 1 else ()
    axes = PARAMETERS.get(key, unknown)[:n_axes]
    return (*[None] * (n_axes - len(axes)), *axes)


def vary_alike(tree: Any) -> Any:
    """Makes arrays inside of ``jax.shard_map`` vary over the axes over which any of them varies.

    A loop needs this, because the type of a carry must not change. If an array was the same on all
    devices, its gradient is summed over the devices. Outside of ``jax.shard_map`` nothing changes.
    """
    axes = frozenset[Any]().union(*map(_varying, jax.tree.leaves(tree)))
    if not axes:
        return tree

    def vary(x):
        missing = tuple(axes - _varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _varying(x: jax.Array) -> frozenset[Any]:
    """Returns the axes of an enclosing ``jax.shard_map`` over which an array varies."""
    kind: Any = jax.typeof(x)
    return kind.mat.varying


def varies(x: Any) -> bool:
    """Tells whether an array varies over an axis of an enclosing ``jax.shard_map``."""
    return isinstance(x, jax.Array) and bool(_varying(x))


def shard_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Shards the rows of [B,...] over the devices, and no other axis."""
    return _constrained(x, mesh, ROWS)


def shard_words(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Shards the words of [V,...] over ``tensor`` if that divides V, else replicates them."""
    divides = mesh is not None and x.shape[0] % mesh.shape["tensor"] == 0
    return _constrained(x, mesh, "tensor" if divides else None)


def replicate(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Replicates an array on every device."""
    return _constrained(x, mesh, None)


def _constrained(x: jax.Array, mesh: Mesh | None, first_axis) -> jax.Array:
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(first_axis)))


def sharded_over_rows(function: Callable, mesh: Mesh | None, n_rows: int) -> Callable:
    """Returns a function that each device runs on its own rows, without waiting for others.

    ``function`` takes ``n_rows`` arrays [S,...] and then parameters, and returns one array [S,...].
    Gradients of parameters are summed over the row axes once, at the end. The compiler handles the
    sharding over ``tensor``.
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


def equal_on_copies(tree: Any, mesh: Mesh | None) -> Any:
    """Returns the mean of arrays over the axis ``copies``, or the arrays if there is no such axis.

    Groups of devices can add numbers in different orders. Without the mean, rounding would make the
    copies differ more and more.
    """
    if copies(mesh) == 1:
        return tree
    mean = functools.partial(jax.lax.pmean, axis_name=COPIES)
    whole: Any = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
    over = jax.shard_map(mean, mesh=mesh, **whole, axis_names={COPIES}, check_vma=False)
    return over(tree)


def zero_after(
    done: jax.Array, number: jax.Array, mesh: Mesh | None = None, axes: tuple[Any, ...] = ()
) -> jax.Array:
    """Returns an int32 zero that depends on ``done`` (floats, not empty, maybe NaN).

    Adding this zero to a number makes the number depend on ``done``, and the compiler cannot remove
    the dependency. Without such a dependency, a compiler might overwrite an array before all reads
    and keep a copy for the late reads, or it might compute several large arrays at once.

    ``number`` is int32 [], not negative, and unknown to the compiler. ``done`` is sharded over
    ``axes`` of ``mesh``. Each device waits only for its own part, without a collective operation.
    """
    if mesh is None or mesh.size == 1:
        return _zero_after(done, number)
    parts, whole = Shardings(mesh).sharded(axes, done.shape).spec, PartitionSpec()
    specs: Any = {"in_specs": (parts, whole), "out_specs": whole}
    return jax.shard_map(_zero_after, mesh=mesh, **specs, check_vma=False)(done, number)


def _zero_after(done: jax.Array, number: jax.Array) -> jax.Array:
    element = done.reshape(-1)[0].astype(jnp.float32)
    return jax.lax.bitcast_convert_type(element, jnp.int32) & jnp.minimum(number, 0)
