"""The function for attention, and the choice of the implementation that runs."""

import functools
import importlib
import math
from types import ModuleType

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from txl_jax.config import ConfigError
from txl_jax.model.dropout import HEAD_STRIDE
from txl_jax.model.kernels import reference, xla
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.parallel.shardings import ROWS

IMPLEMENTATIONS = ("auto", "reference", "xla", "cudnn", "triton", "pallas_tpu")
FUSED = {"cudnn": "gpu", "triton": "gpu", "pallas_tpu": "tpu"}
"""The implementations that XLA does not compile, and the platform of each."""
BEST = {"gpu": "triton", "tpu": "pallas_tpu"}
"""The implementation that ``auto`` chooses on each platform, if it supports the form."""
FUSED_MIN_QUERIES = 128
"""For shorter segments, a fused kernel loses more time to padded tiles than it saves."""


class KernelError(ConfigError):
    """Raised if an implementation of attention cannot be used; the message says why."""


def attend(x: AttentionInputs, implementation: str = "auto", mesh: Mesh | None = None) -> jax.Array:
    """Returns the attention of each query, [N,B,T,H] in the dtype of the values.

    ``implementation`` is one of :data:`IMPLEMENTATIONS`; ``auto`` chooses the best one. Raises
    KernelError if the implementation does not support the form of attention or the devices. The
    devices of ``mesh`` share rows and heads.
    """
    name = chosen(implementation, x, mesh)
    if name == "reference":
        return reference.attend(x)
    if name == "xla":
        return xla.attend(x, xla.HALVED_FROM.get(_platform(mesh)))
    return _per_device(_module(name).attend, mesh)(x)


def chosen(implementation: str, x: AttentionInputs, mesh: Mesh | None = None) -> str:
    """Returns the implementation that :func:`attend` runs; it reads only shapes and dtypes."""
    platform = _platform(mesh)
    if implementation == "auto":
        best, (_, rows, seg_len, _) = BEST.get(platform), x.q.shape
        row_devices = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROWS)
        if best is None or seg_len < FUSED_MIN_QUERIES or rows % row_devices:
            return "xla"
        return best if _module(best).supports(x) is None else "xla"
    if implementation not in FUSED:
        return implementation
    check_platform(implementation, mesh)
    if refused := _module(implementation).supports(x):
        why = f"does not support this form: {refused}; use 'auto' or 'xla'"
        raise KernelError(f"model.kernel = {implementation!r} {why}")
    return implementation


def check_platform(implementation: str, mesh: Mesh | None = None) -> None:
    """Raises KernelError if an implementation is for other devices than those of the mesh."""
    platform = _platform(mesh)
    if FUSED.get(implementation, platform) != platform:
        why = f"is for a {FUSED[implementation]} and this runs on a {platform}: use 'auto' or 'xla'"
        raise KernelError(f"model.kernel = {implementation!r} {why}")


def _platform(mesh: Mesh | None) -> str:
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return "gpu" if platform in ("cuda", "rocm") else platform


@functools.cache
def _module(name: str) -> ModuleType:
    """Imports an implementation's module on first use, since it may need optional packages."""
    return importlib.import_module(f"txl_jax.model.kernels.{name}")


def _per_device(function, mesh: Mesh | None):
    """Returns a fused function that each device of a mesh runs on its own heads and rows."""
    if mesh is None or mesh.size == 1:
        return function

    def on_device(x: AttentionInputs) -> jax.Array:
        if x.dropout is not None:  # the same mask as on one device
            index = lambda axes: jax.lax.axis_index(axes).astype(np.uint32)
            n, b = x.q.shape[:2]
            first = index("tensor") * n * HEAD_STRIDE + index(ROWS) * b
            x = x.replace(dropout=x.dropout.replace(seed=x.dropout.seed.at[0].add(first)))
        return function(x)

    heads, rows, both = (PartitionSpec(*axes) for axes in (("tensor",), (ROWS,), ("tensor", ROWS)))
    specs = AttentionInputs(both, both, both, heads, rows, PartitionSpec())  # type: ignore[arg-type]
    return jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=both, check_vma=False)
