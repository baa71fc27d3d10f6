"""One function for attention; which implementation runs is a name."""

import functools
import importlib
import math
from types import ModuleType

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from txl_jax.config import ConfigError
from txl_jax.model.kernels import reference, xla
from txl_jax.model.kernels.dropping import ROW, Dropping
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.parallel.mesh import ROWS

IMPLEMENTATIONS = ("auto", "reference", "xla", "cudnn", "triton", "pallas_tpu")
FUSED = {"cudnn": "gpu", "triton": "gpu", "pallas_tpu": "tpu"}
"""Those that keep nothing to XLA, and the platform that each is for."""
BEST = {"gpu": "triton", "tpu": "pallas_tpu"}
"""What ``auto`` takes on a platform, where the form allows it."""

FEW = {"cpu": 64}
"""How many queries ``xla`` takes at a time in a short segment; on other platforms all."""

_LEAST_QUERIES = 128
"""Below it a fused kernel pads its tiles with more than it spares."""


class KernelError(ConfigError):
    """An implementation of attention that cannot be used; the text says why, and the way out."""


def attend(
    q: jax.Array,
    k: jax.Array,
    val: jax.Array,
    positions: Positions,
    visible: AttentionMask,
    dropping: Dropping | None = None,
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """What each query gathers from the values it may see: [N,B,T,H] in the values' dtype.

    Args:
      q: [N,B,T,H], divided by sqrt(H).
      k, val: [N,B,K,H], of memory and segment, oldest first; K = M + T.
      positions: u, v [N,H], r [N,K,H] of the distances K-1 .. 0, b [N,K]; u, v and b are divided
        by sqrt(H).
      visible: who may attend to whom; every query sees at least itself.
      dropping: dropout of the weights.
      implementation: of :data:`IMPLEMENTATIONS`; ``auto``: the best that this form has here.
      mesh: devices that rows and heads are spread over when compiled.

    Raises:
      KernelError: an implementation that is not for this form, or not for these devices.
    """
    form = (q.shape, k.shape[2], positions, dropping, q.dtype)
    name = chosen(implementation, form, mesh)
    if name == "reference":
        return reference.attend(q, k, val, positions, visible, dropping)
    if name == "xla":
        few = FEW.get(_platform(mesh))
        return xla.attend(q, k, val, positions, visible, dropping, few)
    function = _each_its_own(_module(name).attend, mesh)
    return function(q, k, val, positions, visible, dropping)


def chosen(implementation: str, form: tuple, mesh: Mesh | None = None) -> str:
    """The implementation that runs, not ``auto``.

    Args:
      implementation: of :data:`IMPLEMENTATIONS`.
      form: shape of q, K, positions, dropping and dtype.
      mesh: as in :func:`attend`.

    Raises:
      KernelError: as :func:`attend`.
    """
    platform = _platform(mesh)
    if implementation == "auto":
        best, (_, rows, seg_len, _) = BEST.get(platform), form[0]
        spread = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROWS)
        if best is None or seg_len < _LEAST_QUERIES or rows % spread:
            return "xla"
        return best if _module(best).supports(*form) is None else "xla"
    if implementation not in FUSED:
        return implementation
    check_platform(implementation, mesh)
    refused = _module(implementation).supports(*form)
    if refused:
        raise KernelError(
            f"model.kernel = {implementation!r} is not for this form: {refused}; use 'auto' or"
            " 'xla'"
        )
    return implementation


def check_platform(implementation: str, mesh: Mesh | None = None) -> None:
    """Raises KernelError for an implementation that is for other devices than those of the mesh."""
    platform = _platform(mesh)
    if FUSED.get(implementation, platform) != platform:
        raise KernelError(
            f"model.kernel = {implementation!r} is for a {FUSED[implementation]} and this runs on a"
            f" {platform}: use 'auto' or 'xla'"
        )


def _platform(mesh: Mesh | None) -> str:
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return "gpu" if platform in ("cuda", "rocm") else platform


@functools.cache
def _module(name: str) -> ModuleType:
    """The implementation's module, imported when first needed (it may need other packages)."""
    return importlib.import_module(f"txl_jax.model.kernels.{name}")


def _each_its_own(function, mesh: Mesh | None):
    """A fused function, run by each device of a mesh on its own heads and rows."""
    if mesh is None or mesh.size == 1:
        return function
    heads, rows, own = (PartitionSpec(*axes) for axes in (("tensor",), (ROWS,), ("tensor", ROWS)))

    def on_a_device(q, k, val, positions, visible, dropping):
        if dropping is not None:  # the same mask as on one device
            number = lambda axes: jax.lax.axis_index(axes).astype(np.uint32)
            first = number("tensor") * q.shape[0] * ROW + number(ROWS) * q.shape[1]
            dropping = dropping.replace(seed=dropping.seed.at[0].add(first))
        return function(q, k, val, positions, visible, dropping)

    return jax.shard_map(
        on_a_device,
        mesh=mesh,
        in_specs=(own, own, own, heads, rows, PartitionSpec()),
        out_specs=own,
        check_vma=False,
    )
