"""How much memory the devices have, and whether a program can fit at all."""

import dataclasses
import functools
import os
import re
from collections.abc import Iterable

import jax
from jax.sharding import Mesh

from txl_jax.config import ConfigError, ExperimentConfig, flatten

GIB = 2**30
_CONTAINER_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
_SWAP = "/proc/meminfo"


@dataclasses.dataclass(frozen=True)
class Need:
    """Memory for one purpose.

    Attributes:
      what: the purpose, in words.
      size: bytes on each device.
      keys: the settings that decide it.
    """

    what: str
    size: int
    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Over how many devices a program is spread, and whether attention keeps scores in memory.

    Attributes:
      rows: devices that share the rows of a batch (data x fsdp).
      parameters: devices that share the parameters (fsdp x tensor).
      heads: devices that share the heads (tensor).
      fused: long segments run a kernel that never holds all scores (a GPU or a TPU).
    """

    rows: int = 1
    parameters: int = 1
    heads: int = 1
    fused: bool = False


ALONE = Spread()
"""One device, on which attention holds scores."""


def check_memory(
    what: str, needs: Iterable[Need], exp: ExperimentConfig, mesh: Mesh | None = None
) -> None:
    """Raises ConfigError where even the least that a program needs is more than there is.

    Args:
      what: the work, as the subject of the message.
      needs: of each device.
      exp: where the values of the settings in the message are from.
      mesh: the devices; ``None``: the first one of this process.
    """
    there = memory_of_each(mesh)
    needs = sorted(needs, key=lambda need: need.size, reverse=True)
    total = sum(need.size for need in needs)
    if there is None or total <= there:
        return
    settings, first = flatten(exp.to_dict()), needs[0]
    named = [(key, settings.get(key)) for key in dict.fromkeys(first.keys)]
    longest = lambda value: f"up to {max(value)}" if isinstance(value, list) else value
    lower = ", ".join(
        f"{key} ({longest(value)})" for key, value in named if value not in (None, [])
    )
    raise ConfigError(
        f"{what} needs at least {_gib(total)} of memory on each device, which has {_gib(there)};"
        f" {_gib(first.size)} of it is for {first.what}: lower {lower}"
    )


def spread_of(mesh: Mesh | None) -> Spread:
    """How a mesh shares rows, parameters and heads; ``None``: one device of this process."""
    platform = _devices(mesh)[0].platform
    if mesh is None:
        return Spread(fused=platform != "cpu")
    data, fsdp, tensor = (mesh.shape[axis] for axis in ("data", "fsdp", "tensor"))
    return Spread(data * fsdp, fsdp * tensor, tensor, fused=platform != "cpu")


def memory_of_each(mesh: Mesh | None = None) -> int | None:
    """Bytes that a program may use on each device; ``None``: not known.

    Devices of the CPU share the memory of the host.
    """
    devices = _devices(mesh)
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit")
    host = host_memory()
    return None if host is None else host // len(devices)


@functools.cache
def host_memory() -> int | None:
    """Bytes of memory and swap of this machine, or of this container; ``None``: not known."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    limits = [int(text) for path in _CONTAINER_LIMITS if (text := _read(path).strip()).isdigit()]
    swap = re.search(r"^SwapTotal:\s*(\d+) kB", _read(_SWAP), re.MULTILINE)
    return min([memory, *limits]) + (1024 * int(swap[1]) if swap else 0)


def _devices(mesh: Mesh | None) -> list[jax.Device]:
    """The devices of a mesh that belong to this process."""
    if mesh is None:
        return jax.local_devices()[:1]
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return own or list(mesh.devices.flat)[:1]


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"
