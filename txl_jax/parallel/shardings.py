"""The device mesh, and the shardings of parameters, optimizer state, batches and activations.

    data      rows of the batch, with the memory of their streams
    fsdp      rows, and also parameters and optimizer state, which are gathered for use
    tensor    heads, the feed-forward layer's inner width, words
    copies    nothing: groups of devices that repeat the same work. A mesh has this axis only if
              several processes have more devices than the rows can use

A parameter axis is replicated if the number of its devices does not divide it (267,735 words).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from txl_jax.config import ConfigError, MeshConfig, TransformerXLConfig

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
"""The axes that a batch's rows are sharded over."""
COPIES = "copies"

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
``fsdp``, and other vectors are replicated. Stacked layers have one axis more, and so have ``u`` and
``v`` if each layer has its own."""


def make_mesh(
    c: MeshConfig,
    model: TransformerXLConfig,
    batch_size: int,
    micro_batches: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Returns the training mesh; ``data=-1`` uses the most devices that divide a batch's rows.

    ``devices`` are all devices of the run unless given. With several processes all devices take
    part: those that get no rows repeat the work of others, along the axis ``copies``. Raises
    ConfigError if the devices are too few, do not divide rows, heads or inner width, or cannot be
    used in part (those of several processes, and of a TPU slice).
    """
    devices = jax.devices() if devices is None else devices
    rows = batch_size // micro_batches
    fitting = [n for n in _data_sizes(c, devices) if rows % (n * c.fsdp) == 0]
    data = max(fitting, default=1) if c.data == -1 else c.data
    if data * c.fsdp * c.tensor <= len(devices) and rows % (data * c.fsdp):
        what = "train.batch_size" + " / train.micro_batches" * (micro_batches > 1)
        sizes = _sizes(batch_size, data * c.fsdp * micro_batches)
        raise ConfigError(
            f"config key mesh.data = {data}: data x fsdp = {data * c.fsdp} must divide {what} ="
            f" {rows}; a train.batch_size of {sizes} works"
        )
    return _mesh(c, model, data, devices, fitting)


def scoring_mesh(
    c: MeshConfig,
    model: TransformerXLConfig,
    batch_size: int,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Returns the mesh to score ``batch_size`` streams, which an evaluator pads with empty rows.

    ``data=-1`` uses the fewest devices that have no more rows each than all devices would have, or
    all devices if there are several processes. Raises ConfigError like :func:`make_mesh`.
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
    """Returns a warning that names the nearest batch sizes if devices are idle or repeat work.

    Devices that ``mesh.data`` leaves idle, as the user asked, need no warning. ``count`` is the
    number of devices, by default all of the run. ``key`` is the batch's setting.
    """
    count, others, busy = count or jax.device_count(), c.fsdp * c.tensor, mesh.size // copies(mesh)
    if busy == count or (c.data != -1 and busy == mesh.size):
        return None
    if count % others:
        works = f"mesh.fsdp x mesh.tensor = {others} must divide {count} to use all"
    elif c.data != -1:
        works = "mesh.data = -1 uses as many as the rows allow"
    else:
        works = f"{key} = {_sizes(batch_size, count // others * c.fsdp * micro_batches)} uses all"
    rest = "stay idle" if busy == mesh.size else "repeat the same work"
    return f"warning: {busy} of {count} devices are in use, and the others {rest}; {works}"


def copies(mesh: Mesh | None) -> int:
    """Returns how many groups of devices do the same work."""
    return 1 if mesh is None else mesh.shape.get(COPIES, 1)


def _data_sizes(c: MeshConfig, devices: Sequence[jax.Device]) -> list[int]:
    """Returns the sizes that the axis ``data`` can have on these devices or a part of them."""
    count, others = len(devices), c.fsdp * c.tensor
    return [n for n in range(1, count // others + 1) if _is_part(n * others, devices)]


def _is_part(used: int, devices: Sequence[jax.Device]) -> bool:
    """Tells whether a mesh of ``used`` devices can run beside the others, or with copies of it."""
    # Every process must take part, and libtpu has no programs for other parts of a slice.
    any_number = devices[0].platform != "tpu" and not _many_processes(devices)
    return any_number or len(devices) % used == 0


def _many_processes(devices: Sequence[jax.Device]) -> bool:
    return len({d.process_index for d in devices}) > 1


def _mesh(
    c: MeshConfig,
    model: TransformerXLConfig,
    data: int,
    devices: Sequence[jax.Device],
    fitting: list[int],
) -> Mesh:
    """Checks and returns a mesh; ``fitting`` are the values of ``data`` that work."""
    count, others = len(devices), c.fsdp * c.tensor
    used, axes = data * others, f"data {data} x fsdp {c.fsdp} x tensor {c.tensor}"
    if used > count:
        raise ConfigError(
            f"config key mesh = {axes} = {used}: must be at most {count}, the number of devices"
        )
    for key, size in (("n_head", model.n_head), ("d_inner", model.d_inner)):
        if size % c.tensor:
            why = f"must divide model.{key} {size}"
            raise ConfigError(f"config key mesh.tensor = {c.tensor}: {why}")
    if not _is_part(used, devices):
        works = f"mesh.data {max(fitting, default=-1)} works"
        if count % others:
            works = f"fsdp x tensor = {others} must divide {count}"
        raise ConfigError(
            f"config key mesh = {axes}: uses {used} of {count} devices, and with several processes"
            f" or on TPUs the number in use must divide the number of devices; {works}"
        )
    repeated = count // used if _many_processes(devices) else 1
    used *= repeated
    # XLA numbers the GPUs of each host as a slice too, but they may divide more than rows.
    slice_of = lambda d: getattr(d, "slice_index", 0) if d.platform == "tpu" else 0
    slices = len({slice_of(d) for d in devices[:used]})
    sharing = math.gcd(data, slices)  # the slices that share the rows
    if repeated % (slices // sharing):
        raise ConfigError(
            f"config key mesh = {axes}: only mesh.data divides work among the {slices} TPU slices,"
            f" so mesh.data must be a multiple of {slices}"
        )
    sizes = {COPIES: (slices // sharing, repeated), "data": (sharing, data)}
    sizes |= {"fsdp": (1, c.fsdp), "tensor": (1, c.tensor)}
    names = (COPIES, *AXES) if repeated > 1 else AXES
    over_slices, shape = zip(*(sizes[name] for name in names), strict=True)
    auto = (AxisType.Auto,) * len(names)
    if slices == 1:
        return jax.make_mesh(shape, names, auto, devices=devices[:used])
    of_slice = [n // m for n, m in zip(shape, over_slices, strict=True)]
    placed = mesh_utils.create_hybrid_device_mesh(of_slice, over_slices, devices[:used])
    return Mesh(placed, names, axis_types=auto)


def one_device(device: jax.Device) -> Mesh:
    """Returns the mesh of a single device."""
    return jax.make_mesh((1, 1, 1), AXES, (AxisType.Auto,) * len(AXES), devices=[device])


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
        return row_devices(self.mesh)

    def replicated(self) -> NamedSharding:
        """Returns the sharding with a full copy on every device."""
        return self._sharding()

    def rows(self, leading_axis: bool = False) -> NamedSharding:
        """Returns the sharding of [B,...] by rows, or of [L,B,...] with a ``leading_axis``."""
        return self._sharding(None, ROWS) if leading_axis else self._sharding(ROWS)

    def parameters(self, tree: Any) -> Any:
        """Returns the shardings by :data:`PARAMETERS` of parameters, or of an optimizer's state.

        Layers may be stacked. Moments are sharded as their parameters, and counts replicated.
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.sharded(_axes_of(path, leaf.ndim), leaf.shape), tree
        )

    def sharded(self, axes: tuple[Any, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of an array over those of the mesh axes that divide its shape."""
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

    A loop needs this, because the type of a carry may not change. The gradient of an array that is
    the same on all devices is summed over them. Outside of ``jax.shard_map`` nothing changes.
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


def row_devices(mesh: Mesh | None) -> int:
    """Returns the number of devices that rows are sharded over; 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROWS)


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

    Groups of devices may sum in different orders. Without the mean, rounding would make the copies
    differ more and more.
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

    Adding it makes a dependency that the compiler cannot remove. Without one, a compiler may
    overwrite an array before all reads and keep a copy for the readers, or compute several large
    arrays at once.

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
