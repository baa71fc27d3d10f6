"""The memory of the devices, and the check of a program before it runs.

A program is compiled first. The memory that it needs, by the compiler's count, is compared with the
memory of the device. Only then is anything allocated. Before compiling, :func:`check_arrays`
refuses arrays that exceed the memory by themselves.
"""

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from txl_jax.config import ConfigError
from txl_jax.progress import waiting_for

GIB = 2**30
GPU_SHARE = 0.9
"""The share of a GPU's memory that a command uses; the rest is for CUDA, NCCL and a display."""
_SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SWAP = "/proc/meminfo"


@dataclasses.dataclass(frozen=True)
class Work:
    """Work on a device: its name in messages, and how its user can make it smaller.

    ``batch_key`` is the setting of its batch size, for errors.
    """

    what: str
    advice: str
    batch_key: str = "batch_size"

    @classmethod
    def sized_by(cls, what: str, *keys: str) -> "Work":
        """Returns work ``what`` that a user can make smaller by lowering the settings ``keys``."""
        advice = f"lower {', '.join(keys[:-1])}{' or ' * (len(keys) > 1)}{keys[-1]}"
        batch = next((f"config key {k}" for k in keys if k.endswith("batch_size")), cls.batch_key)
        return cls(what, advice, batch)


EVALUATION, VALIDATION = (
    Work.sized_by(what, *(f"{section}.{key}" for key in ("batch_size", "seg_len", "mem_len")))
    for what, section in (("evaluation", "evaluate"), ("validation", "validate"))
)
TRAINING_STATE = Work(
    "training",
    "share the model among devices (mesh.fsdp), make it smaller (model.n_layer, model.d_model,"
    " model.d_inner, model.n_head, model.vocab_size), or lower train.batch_size, train.mem_len or"
    " train.num_seeds",
)
TRAINING = Work(
    "training",
    "raise train.micro_batches, set model.remat to 'layer', share the model among devices"
    " (mesh.fsdp), or lower train.batch_size, train.seg_len or train.mem_len",
)


def check_arrays(work: Work, arrays: Any, mesh: Mesh | None = None, copies: int = 1) -> None:
    """Raises ConfigError if ``copies`` copies of a tree of arrays exceed the memory of a device.

    The tree can have shapes in place of arrays, with shardings or without. ``mesh`` has the
    devices; ``None`` means the first device of this process.
    """
    _compare(work, copies * array_bytes(arrays), _devices(mesh), "at least ")


def check_program(
    work: Work, lowered: jax.stages.Lowered, resident: bool = True, options: Any = None
) -> Any:
    """Returns the compiled program, or raises ConfigError if it exceeds the memory of a device.

    ``resident`` means that the program's arguments are already on the devices. ``options`` are
    XLA's compiler options.
    """
    with explained(work):
        compiled = lowered.compile(options)
    read, devices = compiled.memory_analysis(), _devices_of(compiled)
    if read is not None and devices:
        in_use = (devices[0].memory_stats() or {}).get("bytes_in_use", 0)
        counted = read.argument_size_in_bytes if resident and in_use else 0
        _compare(work, in_use + program_bytes(read) - counted, devices)
    return compiled


def program_bytes(m: Any) -> int:
    """Returns the bytes on each device while a program runs, from jaxlib's ``memory_analysis``.

    An output that reuses the memory of a donated argument counts once.
    """
    outputs = m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    return m.argument_size_in_bytes + outputs + m.generated_code_size_in_bytes


class Checked:
    """A jitted function whose program is compared with the device's memory before its first run.

    A call raises ConfigError if the program for arguments of these shapes does not fit, or if a
    device runs out of memory.
    """

    def __init__(self, jitted: Any, work: Work):
        self.jitted, self._work, self._fitting = jitted, work, set[Any]()

    def __call__(self, *args: Any) -> Any:
        """Runs the function; raises ConfigError if the memory of a device does not suffice."""
        leaves, structure = jax.tree.flatten(args)
        shapes = structure, *map(jax.typeof, leaves)
        traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
        if shapes not in self._fitting and not traced:
            with waiting_for(f"compiling the program of {self._work.what}, once for these sizes"):
                check_program(self._work, self.jitted.lower(*args))
            self._fitting.add(shapes)
        with explained(self._work):
            return self.jitted(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function for arguments or their shapes."""
        return self.jitted.lower(*args)


@contextlib.contextmanager
def explained(work: Work) -> Iterator[None]:
    """If a device runs out of memory, raises a ConfigError that names the settings to change."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        limit = memory_of_each()
        which = "" if limit is None else f" of {_gib(limit)}"
        message = f"{work.what} ran out of the memory of a device{which}: {work.advice}"
        raise ConfigError(message) from error


def array_bytes(tree: Any) -> int:
    """Returns the bytes that a tree of arrays, or of their shapes, occupies on each device."""

    def size(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _compare(work: Work, needed: int, devices: list[jax.Device], bound: str = "") -> None:
    available = memory_of_each(devices)
    if available is not None and needed > available:
        raise ConfigError(
            f"{work.what} needs {bound}{_gib(needed)} of memory on each device, which has"
            f" {_gib(available)}: {work.advice}"
        )


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"


def gpu_share() -> float:
    """Returns the share of a GPU's memory that JAX may use; :func:`use_most_memory` sets it."""
    return float(next((os.environ[name] for name in _SHARE if os.environ.get(name)), GPU_SHARE))


def use_most_memory() -> None:
    """Lets JAX use :data:`GPU_SHARE` of a GPU, unless an environment variable sets the share.

    By default JAX uses three quarters. Call this before JAX starts its devices.
    """
    if not any(os.environ.get(name) for name in _SHARE):
        os.environ[_SHARE[0]] = str(GPU_SHARE)


def memory_of_each(devices: list[jax.Device] | None = None) -> int | None:
    """Returns the bytes of memory that a program can use on each device, or ``None`` if unknown.

    CPU devices divide the host's memory equally.
    """
    devices = devices or _devices(None)
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
    return jax.local_devices()[:1] if mesh is None else _own(mesh.devices.flat)


def _devices_of(compiled: Any) -> list[jax.Device]:
    shardings = jax.tree.leaves((compiled.output_shardings, compiled.input_shardings))
    return _own(shardings[0].device_set) if shardings else []


def _own(devices: Iterable[jax.Device]) -> list[jax.Device]:
    everyone = list(devices)
    return [d for d in everyone if d.process_index == jax.process_index()] or everyone[:1]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
