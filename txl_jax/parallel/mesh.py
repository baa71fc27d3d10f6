"""The device mesh, a grid of devices with named axes.

    data      rows of the batch, with the memory of their streams
    fsdp      rows, and also parameters and optimizer state, which are gathered for use
    tensor    heads, the feed-forward layer's inner width, words
    copies    nothing: groups of devices that repeat the same work. A mesh has this axis only if
              several processes have more devices than the rows can use

The shardings of arrays on a mesh are in shardings.py.
"""

import collections
import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from txl_jax.config import ConfigError, MeshConfig, TransformerXLConfig

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
"""The axes that a batch's rows are sharded over."""
COPIES = "copies"


def make_mesh(
    c: MeshConfig,
    model: TransformerXLConfig,
    batch_size: int,
    micro_batches: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Returns the training mesh; ``data=-1`` uses the most devices that divide a batch's rows.

    ``fsdp=-1`` moves some or all of these devices from ``data`` to ``fsdp``
    (:func:`_sharing_parameters`). ``devices`` are all devices of the run unless given. With several
    processes, all devices take part: devices without rows of their own repeat the work of other
    devices, along the axis ``copies``.

    Raises ConfigError if there are too few devices, or if they do not divide rows, heads or inner
    width. With several processes and on TPUs, it also raises ConfigError if the mesh would use a
    number of devices that does not divide their total number.
    """
    devices = jax.devices() if devices is None else devices
    rows, fsdp = batch_size // micro_batches, _given_fsdp(c)
    fitting = [n for n in _data_sizes(c, devices) if rows % (n * fsdp) == 0]
    data = max(fitting, default=1) if c.data == -1 else c.data
    if data * fsdp * c.tensor <= len(devices) and rows % (data * fsdp):
        what = "train.batch_size" + " / train.micro_batches" * (micro_batches > 1)
        sizes = _sizes(batch_size, data * fsdp * micro_batches)
        raise ConfigError(
            f"config key mesh.data = {data}: data x fsdp = {data * fsdp} must divide {what} ="
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

    ``data=-1`` uses as few devices as possible, without giving a device more rows than if all
    devices were used. With several processes, it uses all devices. Raises ConfigError like
    :func:`make_mesh`.
    """
    devices = jax.devices() if devices is None else devices
    fitting, data = _data_sizes(c, devices), c.data
    if data == -1 and _many_processes(devices):
        data = max(fitting, default=1)
    elif data == -1:
        fsdp = _given_fsdp(c)
        data = min(fitting, key=lambda n: (-(-batch_size // (n * fsdp)), n), default=1)
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

    There is no warning if the user chose ``mesh.data`` and so left devices idle. ``count`` is the
    number of devices, by default all of the run. ``key`` is the setting of the batch size.
    """
    count, fsdp, busy = count or jax.device_count(), _given_fsdp(c), mesh.size // copies(mesh)
    others = fsdp * c.tensor
    if busy == count or (c.data != -1 and busy == mesh.size):
        return None
    if count % others:
        works = f"mesh.fsdp x mesh.tensor = {others} must divide {count} to use all"
    elif c.data != -1:
        works = "mesh.data = -1 uses as many as the rows allow"
    else:
        works = f"{key} = {_sizes(batch_size, count // others * fsdp * micro_batches)} uses all"
    rest = "stay idle" if busy == mesh.size else "repeat the same work"
    return f"warning: {busy} of {count} devices are in use, and the others {rest}; {works}"


def copies(mesh: Mesh | None) -> int:
    """Returns how many groups of devices do the same work."""
    return 1 if mesh is None else mesh.shape.get(COPIES, 1)


def _data_sizes(c: MeshConfig, devices: Sequence[jax.Device]) -> list[int]:
    """Returns the sizes that the axis ``data`` can have on these devices or a part of them."""
    count, others = len(devices), _given_fsdp(c) * c.tensor
    return [n for n in range(1, count // others + 1) if _is_part(n * others, devices)]


def _is_part(used: int, devices: Sequence[jax.Device]) -> bool:
    """Tells whether a mesh can have ``used`` devices, if other devices are idle or hold copies."""
    # Every process must take part, and libtpu cannot compile programs for other parts of a slice.
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
    count, fsdp = len(devices), _given_fsdp(c)
    others = fsdp * c.tensor
    used, axes = data * others, f"data {data} x fsdp {fsdp} x tensor {c.tensor}"
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
    # XLA gives the GPUs of each host a slice index too, but any axis of a mesh can span GPU hosts.
    slice_of = lambda d: getattr(d, "slice_index", 0) if d.platform == "tpu" else 0
    slices = len({slice_of(d) for d in devices[:used]})
    sharing = math.gcd(data, slices)  # the number of slices that divide the rows
    if repeated % (slices // sharing):
        raise ConfigError(
            f"config key mesh = {axes}: only mesh.data divides work among the {slices} TPU slices,"
            f" so mesh.data must be a multiple of {slices}"
        )
    if c.data == c.fsdp == -1 and repeated == 1:
        fsdp = _sharing_parameters(model, c.tensor, data // sharing, devices[:used])
        data //= fsdp
    sizes = {COPIES: (slices // sharing, repeated), "data": (sharing, data)}
    sizes |= {"fsdp": (1, fsdp), "tensor": (1, c.tensor)}
    names = (COPIES, *AXES) if repeated > 1 else AXES
    over_slices, shape = zip(*(sizes[name] for name in names), strict=True)
    auto = (AxisType.Auto,) * len(names)
    if slices == 1:
        return jax.make_mesh(shape, names, auto, devices=devices[:used])
    of_slice = [n // m for n, m in zip(shape, over_slices, strict=True)]
    placed = mesh_utils.create_hybrid_device_mesh(of_slice, over_slices, devices[:used])
    return Mesh(placed, names, axis_types=auto)


_SHARED_FROM = {"gpu": 1 << 25, "tpu": 1 << 29}
"""On each platform, devices share parameters if the layers have at least this many parameters.

On GPUs, the optimizer's memory traffic then takes longer than the additional collectives. On TPUs,
sharing saves no time (RESULTS.md), but a chip might be too small for more parameters.
"""


def _given_fsdp(c: MeshConfig) -> int:
    """Returns the size of ``fsdp``; 1 if it is -1, since ``data`` then counts all row devices."""
    return max(c.fsdp, 1)


def _sharing_parameters(
    model: TransformerXLConfig, tensor: int, rows: int, devices: Sequence[jax.Device]
) -> int:
    """Returns how many of ``rows`` devices also share parameters and optimizer state.

    The result is the largest number up to 16 that divides ``rows``, the devices of each host or TPU
    slice, and the model's width. It is 1 on CPUs and for small models. It is also 1 for models
    whose matrices would need padding on GPUs (model/products.py), since padding is possible only
    after the parts of a matrix are gathered.
    """
    inner, heads = model.d_inner, model.n_head * model.d_head
    size = model.n_layer * model.d_model * (4 * heads + 2 * inner)
    few = size < _SHARED_FROM.get(devices[0].platform, math.inf)
    if few or any(n % 8 for n in (model.d_model, inner, heads)):
        return 1
    host = lambda d: 0 if d.platform == "tpu" else d.process_index
    hosts = collections.Counter(getattr(d, "slice_index", host(d)) for d in devices)
    near = math.gcd(rows, model.d_model, *(max(n // tensor, 1) for n in hosts.values()))
    return max(n for n in range(1, 17) if near % n == 0)


def one_device(device: jax.Device) -> Mesh:
    """Returns the mesh of a single device."""
    return jax.make_mesh((1, 1, 1), AXES, (AxisType.Auto,) * len(AXES), devices=[device])


def _sizes(batch_size: int, divisor: int) -> str:
    """Returns the nearest batch sizes that the divisor divides, in words."""
    below = batch_size // divisor * divisor
    sizes = [str(size) for size in (below, below + divisor) if size]
    return " or ".join(sizes)


def row_devices(mesh: Mesh | None) -> int:
    """Returns the number of devices that rows are sharded over; 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROWS)
