"""The memory of the devices, and the check whether a program can fit into it."""

import dataclasses
import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path

import jax
from jax.sharding import Mesh

from txl_jax.config import ConfigError, ExperimentConfig, flatten
from txl_jax.parallel.shardings import AXES

GIB = 2**30
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SWAP = "/proc/meminfo"


@dataclasses.dataclass(frozen=True)
class Need:
    """The bytes that one purpose needs on each device, and the settings that decide the size."""

    what: str
    size: int
    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Shares:
    """The number of devices that share each part of a program.

    ``fused`` means that long segments run a kernel that never stores all scores (GPU or TPU).
    """

    rows: int = 1  # data x fsdp
    parameters: int = 1  # fsdp x tensor
    heads: int = 1  # tensor
    fused: bool = False


ONE_DEVICE = Shares()


def check_memory(
    what: str, needs: Iterable[Need], exp: ExperimentConfig, mesh: Mesh | None = None
) -> None:
    """Raises ConfigError if a program needs more memory than each device has.

    ``what`` names the work as the subject of the message. ``needs`` are lower bounds for each
    device of ``mesh``; ``None`` means the first device of this process.
    """
    available, needs = memory_of_each(mesh), list(needs)
    total = sum(need.size for need in needs)
    if available is None or total <= available:
        return
    settings, largest = flatten(exp.to_dict()), max(needs, key=lambda need: need.size)
    values = [(key, settings.get(key)) for key in dict.fromkeys(largest.keys)]
    shown = lambda value: f"up to {max(value)}" if isinstance(value, list) else value
    lower = ", ".join(f"{key} ({shown(value)})" for key, value in values if value not in (None, []))
    gib = lambda size: f"{size / GIB:,.1f} GiB"
    raise ConfigError(
        f"{what} needs at least {gib(total)} of memory on each device, which has {gib(available)};"
        f" {gib(largest.size)} of it is for {largest.what}: lower {lower}"
    )


def shares_of(mesh: Mesh | None) -> Shares:
    """Returns how many devices share each part of a program; ``None`` means one device."""
    fused = _devices(mesh)[0].platform != "cpu"
    data, fsdp, tensor = (1 if mesh is None else mesh.shape[axis] for axis in AXES)
    return Shares(data * fsdp, fsdp * tensor, tensor, fused)


def memory_of_each(mesh: Mesh | None = None) -> int | None:
    """Returns the bytes for a program on each device, if known; CPU devices share the host's."""
    devices = _devices(mesh)
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit")
    host = host_memory()
    return None if host is None else host // len(devices)


@functools.cache
def host_memory() -> int | None:
    """Returns the bytes of memory and swap of this machine or container; ``None`` if unknown."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    limits = [int(text) for path in _CONTAINER_LIMITS if (text := _read(path).strip()).isdigit()]
    swap = re.search(r"^SwapTotal:\s*(\d+) kB", _read(_SWAP), re.MULTILINE)
    return min([memory, *limits]) + (1024 * int(swap[1]) if swap else 0)


def _devices(mesh: Mesh | None) -> list[jax.Device]:
    """Returns the devices of a mesh that belong to this process."""
    if mesh is None:
        return jax.local_devices()[:1]
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return own or list(mesh.devices.flat)[:1]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
