"""The device mesh, and where every leaf of state and batch lies on it.

One axis now: ``data`` cuts the batch. Streams, their memory and their batch rows stay on one
device; parameters and optimizer are on all of them.
"""

import dataclasses

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from txl_jax.config import ConfigError, MeshConfig
from txl_jax.data.batch import Batch
from txl_jax.model.memory import Memory
from txl_jax.training.state import TrainState

ROWS = PartitionSpec("data")
MEMORY = Memory(hidden=PartitionSpec(None, "data"), filled=PartitionSpec("data"))  # type: ignore[arg-type]
EVERYWHERE = PartitionSpec()


def make_mesh(c: MeshConfig, batch_size: int) -> Mesh:
    """A mesh of ``c.data`` devices (-1: the most that divide the batch).

    Raises:
      ConfigError: more devices than there are, or a batch that they do not divide.
    """
    there = jax.device_count()
    data = c.data
    if data == -1:
        data = max(n for n in range(1, there + 1) if batch_size % n == 0)
    if data > there:
        raise ConfigError(f"config key mesh.data = {data}: there are {there} devices")
    if batch_size % data:
        raise ConfigError(
            f"config key mesh.data = {data}: must divide train.batch_size {batch_size}"
        )
    return jax.make_mesh((data,), ("data",), (AxisType.Auto,), devices=jax.devices()[:data])


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where things lie on a mesh, as shardings that ``jit`` and ``device_put`` take."""

    mesh: Mesh

    def everywhere(self) -> NamedSharding:
        """A full copy on every device."""
        return NamedSharding(self.mesh, EVERYWHERE)

    def rows(self, steps_axis: bool = False) -> NamedSharding:
        """[B, ...] cut by rows; ``steps_axis``: behind a leading axis of steps."""
        return NamedSharding(self.mesh, PartitionSpec(None, "data") if steps_axis else ROWS)

    def batch(self, steps_axis: bool = False) -> Batch:
        """Of every field of a batch."""
        rows = self.rows(steps_axis)
        return Batch(rows, rows, rows, rows)  # type: ignore[arg-type]

    def memory(self) -> Memory:
        """Of a memory: each stream's states on the device of its row."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            MEMORY,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def state(self, abstract: TrainState) -> TrainState:
        """Of a whole training state, given its shapes."""
        copy = lambda tree: jax.tree.map(lambda _: self.everywhere(), tree)
        return TrainState(
            step=copy(abstract.step),
            params=copy(abstract.params),
            opt_state=copy(abstract.opt_state),
            mems=self.memory(),
        )


def donates() -> bool:
    """Whether the step gives its old state's memory to the new one (on CPU it costs speed)."""
    return jax.default_backend() != "cpu"
