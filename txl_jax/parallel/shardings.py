"""The device mesh, and the shardings of parameters, optimizer state, batches and activations.

    data      rows of the batch, with the memory of their streams
    fsdp      rows, and also parameters and optimizer state, which are gathered for use
    tensor    heads, the feed-forward layer's inner width, words

A parameter axis is replicated if the number of its devices does not divide it (267,735 words).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from txl_jax.config import ConfigError, MeshConfig, TransformerXLConfig

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
"""The axes that a batch's rows are sharded over."""

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
    "mixture_latent": ("fsdp", None, None),  # [D,K,d]
    "past_weight": ("fsdp", None),  # [d,d]
    "past_bias": ("tensor",),  # [V]
}
"""The mesh axes of the last axes of each parameter. A key is the end of a parameter's path, without
a cluster's number. Other parameters (LayerNorm, small biases) are replicated."""


def make_mesh(
    c: MeshConfig,
    model: TransformerXLConfig,
    batch_size: int,
    micro_batches: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Returns the mesh that trains; ``data=-1`` uses the most devices that divide a batch's rows.

    ``devices`` are all devices of the run unless given. Raises ConfigError if they are too few, if
    they do not divide rows, heads or inner width, if a process would have no device in use, or if
    the mesh is a part of a TPU slice that does not divide it, for which libtpu has no programs.
    """
    devices = jax.devices() if devices is None else devices
    rows = batch_size // micro_batches
    fitting = [n for n in _data_sizes(c, devices) if rows % (n * c.fsdp) == 0]
    data = max(fitting, default=1) if c.data == -1 else c.data
    if data * c.fsdp * c.tensor <= len(devices) and rows % (data * c.fsdp):
        what = "train.batch_size" if micro_batches == 1 else "batch_size / micro_batches"
        sizes = _sizes(batch_size, data * c.fsdp * micro_batches)
        raise ConfigError(
            f"config key mesh.data = {data}: data x fsdp = {data * c.fsdp} must divide {what}"
            f" {rows}; a train.batch_size of {sizes} works"
        )
    unit = c.fsdp * micro_batches * max(1, len(devices) // (c.fsdp * c.tensor))
    return _mesh(c, model, data, devices, fitting, _sizes(batch_size, unit))


def scoring_mesh(
    c: MeshConfig,
    model: TransformerXLConfig,
    batch_size: int,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Returns the mesh that scores ``batch_size`` streams, which an evaluator pads with empty rows.

    ``data=-1`` uses the fewest devices on which no device has more rows than on all of them, or all
    devices if several processes have them. Raises ConfigError as :func:`make_mesh`.
    """
    devices = jax.devices() if devices is None else devices
    fitting, data = _data_sizes(c, devices), c.data
    if data == -1 and _many_processes(devices):
        data = max(fitting, default=1)
    elif data == -1:
        data = min(fitting, key=lambda n: (-(-batch_size // (n * c.fsdp)), n), default=1)
    return _mesh(c, model, data, devices, fitting)


def idle_devices(
    mesh: Mesh,
    c: MeshConfig,
    batch_size: int,
    micro_batches: int = 1,
    count: int | None = None,
    key: str = "train.batch_size",
) -> str | None:
    """Returns a warning that names the nearest batch sizes if ``data=-1`` leaves devices idle.

    ``count`` is the number of devices, by default all of the run. ``key`` is the batch's setting.
    """
    count, others = count or jax.device_count(), c.fsdp * c.tensor
    if c.data != -1 or mesh.size == count:
        return None
    works = f"{key} = {_sizes(batch_size, count // others * c.fsdp * micro_batches)} uses all"
    if count % others:
        works = f"mesh.fsdp x mesh.tensor = {others} does not divide {count}"
    return f"warning: {mesh.size} of {count} devices are in use, the others stay idle; {works}"


def _data_sizes(c: MeshConfig, devices: Sequence[jax.Device]) -> list[int]:
    """Returns the numbers that the axis ``data`` can have on some of the devices."""
    count, others = len(devices), c.fsdp * c.tensor
    return [n for n in range(1, count // others + 1) if _is_part(n * others, devices)]


def _is_part(used: int, devices: Sequence[jax.Device]) -> bool:
    """Tells whether a mesh of ``used`` devices can run: on TPUs, they must divide the slice."""
    return devices[0].platform != "tpu" or len(devices) % used == 0


def _many_processes(devices: Sequence[jax.Device]) -> bool:
    return len({d.process_index for d in devices}) > 1


def _mesh(
    c: MeshConfig,
    model: TransformerXLConfig,
    data: int,
    devices: Sequence[jax.Device],
    fitting: list[int],
    sizes: str = "",
) -> Mesh:
    """Checks and returns a mesh; ``fitting`` are values of ``data``, ``sizes`` of the batch."""
    count, others = len(devices), c.fsdp * c.tensor
    used, axes = data * others, f"data {data} x fsdp {c.fsdp} x tensor {c.tensor}"
    if used > count:
        raise ConfigError(f"config key mesh = {axes} = {used}: there are {count} devices")
    for key, size in (("n_head", model.n_head), ("d_inner", model.d_inner)):
        if size % c.tensor:
            why = f"must divide model.{key} {size}"
            raise ConfigError(f"config key mesh.tensor = {c.tensor}: {why}")
    many, all_of_them = _many_processes(devices), count // others
    if used < count if many else not _is_part(used, devices):
        rule = "every process must use its own" if many else "a part of a TPU slice must divide it"
        works = f"a train.batch_size of {sizes} works"
        if count % others:
            works = f"fsdp x tensor = {others} must divide {count}"
        elif not many:
            works = f"mesh.data {max(fitting, default=-1)} works"
        elif c.data != -1 and all_of_them in fitting:
            works = f"mesh.data {all_of_them} uses all"
        raise ConfigError(
            f"config key mesh = {axes}: uses {used} of {count} devices, and {rule}; {works}"
        )
    slices = len({getattr(d, "slice_index", 0) for d in devices[:used]})
    if slices > 1 and data % slices:
        raise ConfigError(
            f"config key mesh = {axes}: the {slices} TPU slices share rows alone, so mesh.data must"
            f" be a multiple of {slices}"
        )
    shape, auto = (data, c.fsdp, c.tensor), (AxisType.Auto,) * len(AXES)
    if slices == 1:
        return jax.make_mesh(shape, AXES, auto, devices=devices[:used])
    of_slice, over_slices = (data // slices, c.fsdp, c.tensor), (slices, 1, 1)
    placed = mesh_utils.create_hybrid_device_mesh(of_slice, over_slices, devices[:used])
    return Mesh(placed, AXES, axis_types=auto)


def _sizes(batch_size: int, divisor: int) -> str:
    """Returns the nearest batch sizes that the divisor divides, in words."""
    below = batch_size // divisor * divisor
    sizes = [str(size) for size in (below, below + divisor) if size]
    return " or ".join(sizes)


@dataclasses.dataclass(frozen=True)
class Shardings:
    """The shardings of a run's arrays on a mesh, for ``jit`` and ``device_put``."""

    mesh: Mesh

    @property
    def row_devices(self) -> int:
        """The number of devices that rows are sharded over."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def replicated(self) -> NamedSharding:
        """Returns the sharding with a full copy on every device."""
        return self._sharding()

    def rows(self, leading_axis: bool = False) -> NamedSharding:
        """Returns the sharding of [B,...] by rows, or of [L,B,...] with a ``leading_axis``."""
        return self._sharding(None, ROWS) if leading_axis else self._sharding(ROWS)

    def parameters(self, tree: Any) -> Any:
        """Returns the shardings of parameters, or of a tree of them; layers may be stacked."""

        def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            axes = PARAMETERS.get(_key(path), ())[: leaf.ndim]
            stacked = [None] * (leaf.ndim - len(axes))  # [L] comes first where layers are stacked
            return self.sharded((*stacked, *axes), leaf.shape)

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def sharded(self, axes: tuple[Any, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of an array over those of the mesh axes that divide its shape."""
        size = lambda axis: math.prod(self.mesh.shape[a] for a in np.atleast_1d(axis))
        divides = lambda axis, n: axis is not None and n % size(axis) == 0
        pairs = zip(axes, shape, strict=False)
        return self._sharding(*(axis if divides(axis, n) else None for axis, n in pairs))

    def _sharding(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def _key(path: tuple[Any, ...]) -> str:
    """Returns the key of a parameter in :data:`PARAMETERS`."""
    *_, module, name = ("", *jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
    if name in ("kernel", "bias"):
        return f"{module}/{name}"
    stem, _, number = name.rpartition("_")
    return stem if number.isdigit() else name


def vary_alike(tree: Any) -> Any:
    """Makes arrays inside of ``jax.shard_map`` vary over the axes over which any of them varies.

    A loop needs it, because the type of a carry may not change. The gradient of an array that is
    the same on all devices is summed over them. Elsewhere the arrays are returned as they are.
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
