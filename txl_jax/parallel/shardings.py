"""The device mesh, and where every leaf of state and batch lies on it.

    data      rows of the batch, with their streams' memory
    fsdp      the same; parameters and optimizer are cut as well, and gathered where they are used
    tensor    heads, the feed-forward layer's inner width, words

A parameter axis that its devices do not divide is not cut (267,735 words are odd): its leaf is
then whole on those devices.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from txl_jax.config import ConfigError, MeshConfig, TransformerXLConfig
from txl_jax.parallel.mesh import AXES, ROWS

_HEADS = ("fsdp", "tensor", None)  # [D,N,H]
_WORDS = ("tensor", "fsdp")  # [V,d]
PARAMETERS: dict[str, tuple[str | None, ...]] = {
    "query": _HEADS,
    "key": _HEADS,
    "value": _HEADS,
    "position": _HEADS,
    "output": ("tensor", None, "fsdp"),  # [N,H,D]
    "u": ("tensor", None),  # [N,H]
    "v": ("tensor", None),
    "distance": (None, "tensor", None),  # [R,N,H]
    "distance_bias": (None, "tensor"),  # [R,N]
    "positions": (None, "fsdp"),  # [R,D]
    "inner/kernel": ("fsdp", "tensor"),  # [D,F]
    "inner/bias": ("tensor",),  # [F]
    "outer/kernel": ("tensor", "fsdp"),  # [F,D]
    "embedding": _WORDS,
    "softmax_weight": _WORDS,
    "softmax_bias": ("tensor",),  # [V]
    "embedding_projection": (None, "fsdp"),  # [d,D]
    "softmax_projection": (None, "fsdp"),
    "cluster_weight": (None, "fsdp"),  # [C,d]
    "mixture_latent": ("fsdp", None, None),  # [D,K,d]
    "past_weight": ("fsdp", None),  # [d,d]
    "past_bias": ("tensor",),  # [V]
}
"""How the last axes of each parameter are cut, by the end of its path, less a cluster's number.
What is not here (LayerNorm, small biases) is whole everywhere."""


def make_mesh(
    c: MeshConfig,
    model: TransformerXLConfig,
    batch_size: int,
    micro_batches: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of the devices that ``c`` asks for; ``data=-1``: the most that divide the batch.

    ``devices``: to choose from; ``None``: those at hand.

    Raises:
      ConfigError: more devices than there are, rows, heads or an inner width that they do not
        divide, or processes left without a device.
    """
    devices = jax.devices() if devices is None else devices
    there, rows = len(devices), batch_size // micro_batches
    others = c.fsdp * c.tensor
    data = c.data
    if data == -1:
        fitting = [n for n in range(1, there // others + 1) if rows % (n * c.fsdp) == 0]
        data = max(fitting, default=1)
    if data * others > there:
        axes = f"data {data} x fsdp {c.fsdp} x tensor {c.tensor} = {data * others}"
        raise ConfigError(f"config key mesh = {axes}: there are {there} devices")
    if rows % (data * c.fsdp):
        what = "train.batch_size" if micro_batches == 1 else "batch_size / micro_batches"
        raise ConfigError(
            f"config key mesh.data = {data}: data x fsdp = {data * c.fsdp} must divide {what}"
            f" {rows}; {_sizes(batch_size, data * c.fsdp * micro_batches)}"
        )
    for key, size in (("n_head", model.n_head), ("d_inner", model.d_inner)):
        if size % c.tensor:
            raise ConfigError(
                f"config key mesh.tensor = {c.tensor}: must divide model.{key} {size}"
            )
    if len({d.process_index for d in devices}) > 1 and data * others < there:
        works = _sizes(batch_size, there // others * c.fsdp * micro_batches)
        if there % others:
            works = f"fsdp x tensor = {others} must divide {there}"
        elif c.data != -1:
            works = f"mesh.data {there // others} uses all"
        raise ConfigError(
            f"config key mesh = data {data} x fsdp {c.fsdp} x tensor {c.tensor}: uses"
            f" {data * others} of {there} devices, and every process needs its own in use; {works}"
        )
    shape, auto = (data, c.fsdp, c.tensor), (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, auto, devices=devices[: data * others])


def _sizes(batch_size: int, divisor: int) -> str:
    """The batch sizes next to one that would do, in words."""
    below = batch_size // divisor * divisor
    sizes = [str(size) for size in (below, below + divisor) if size]
    return f"a train.batch_size of {' or '.join(sizes)} works"


@dataclasses.dataclass(frozen=True)
class Shardings:
    """Where things lie on a mesh, as shardings that ``jit`` and ``device_put`` take."""

    mesh: Mesh

    @property
    def row_devices(self) -> int:
        """Over how many devices rows are spread."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def replicated(self) -> NamedSharding:
        """A full copy on every device."""
        return self._at()

    def rows(self, leading_axis: bool = False) -> NamedSharding:
        """[B, ...] cut by rows; ``leading_axis``: behind another axis, of steps or layers."""
        return self._at(None, ROWS) if leading_axis else self._at(ROWS)

    def parameters(self, tree: Any) -> Any:
        """Of parameters, or of a tree that holds trees like them (an optimizer's state).

        ``tree``: arrays or their shapes, layers one by one or stacked.
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._at(*self._cut(_key(path), leaf.shape)), tree
        )

    def _cut(self, key: str, shape: tuple[int, ...]) -> list[str | None]:
        axes = PARAMETERS.get(key, ())[: len(shape)]
        axes = (*[None] * (len(shape) - len(axes)), *axes)  # [L] in front where layers are stacked
        return self._dividing(axes, shape)

    def sharded(self, axes: tuple[Any, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Sharding of an array over these mesh axes, as far as they divide its shape."""
        return self._at(*self._dividing(axes, shape))

    def _dividing(self, axes: tuple[Any, ...], shape: tuple[int, ...]) -> list[Any]:
        """The mesh axes that cut each axis of a shape, less those that do not divide it."""
        size = lambda axis: math.prod(self.mesh.shape[a] for a in np.atleast_1d(axis))
        divides = lambda axis, n: axis is not None and n % size(axis) == 0
        return [axis if divides(axis, n) else None for axis, n in zip(axes, shape, strict=False)]

    def _at(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def _key(path: tuple[Any, ...]) -> str:
    """The name of a parameter in :data:`PARAMETERS`."""
    *_, module, name = ("", *jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
    if name in ("kernel", "bias"):
        return f"{module}/{name}"
    stem, _, number = name.rpartition("_")
    return stem if number.isdigit() else name
