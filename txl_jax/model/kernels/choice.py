"""The function for attention, and the choice of the implementation that runs."""

import functools
import importlib
from types import ModuleType
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from txl_jax.config import ConfigError
from txl_jax.model.derivatives import with_derivatives
from txl_jax.model.dropout import HEAD_STRIDE
from txl_jax.model.kernels import reference, xla
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.model.masks import AttentionMask, BothWaysMask
from txl_jax.model.positions import Positions
from txl_jax.parallel.mesh import ROWS, row_devices
from txl_jax.parallel.platforms import compute_capability, platform_of, tpu_generation
from txl_jax.parallel.shardings import varies

IMPLEMENTATIONS = ("auto", "reference", "xla", "triton", "pallas_tpu")
FUSED = {"triton": "gpu", "pallas_tpu": "tpu"}
"""The fused implementations, and the platform of each; ``gpu`` means an NVIDIA GPU."""
BEST = {platform: name for name, platform in FUSED.items()}
"""The implementation that ``auto`` chooses on each platform, if it supports the attention."""
_NOT_IN_SHARD_MAP = "a fused kernel cannot run inside of jax.shard_map with check_vma=True"
_OLD_TPU = "needs a TPU v5 or later"
FUSED_MIN_QUERIES = 128
"""For shorter segments, a fused kernel loses more time to padded tiles than it saves."""


class KernelError(ConfigError):
    """Raised if an implementation of attention cannot be used; the message says why."""


class Choice(NamedTuple):
    """The chosen implementation, and the reason why it is not fused (empty if it is fused).

    ``falls_back`` is true if ``auto`` rejects the fused implementation although the devices and the
    segment's length would allow it.
    """

    name: str
    reason: str = ""
    falls_back: bool = False

    def describe(self) -> str:
        """Returns the choice as ``triton (fused)`` or ``xla (not fused: …)``."""
        return f"{self.name} ({f'not fused: {self.reason}' if self.reason else 'fused'})"


def attend(x: AttentionInputs, implementation: str = "auto", mesh: Mesh | None = None) -> jax.Array:
    """Returns the attention of each query, [N,B,T,H] in the dtype of the values.

    ``implementation`` is one of :data:`IMPLEMENTATIONS`; ``auto`` chooses the best one. Raises
    KernelError if the implementation does not support the form of attention or the devices. Rows
    and heads are split over the devices of ``mesh``.
    """
    name = choose(implementation, x, mesh).name
    if name != "triton":
        x = x.joined()
    if name == "reference" or (name == "xla" and isinstance(x.mask, BothWaysMask)):
        return reference.attend(x)
    if name == "xla":
        function = functools.partial(xla.attend, platform=platform_of(mesh))
        return (_per_device(function, mesh) if _rows_divide(x, mesh) else function)(x)
    function = _module(name).attend
    if name == "triton":
        function = functools.partial(function, capability=compute_capability(mesh))
    q, k, val, positions = _reverse_only(None, (x.q, x.k, x.val, x.positions), ())
    return _per_device(function, mesh)(x.replace(q=q, k=k, val=val, positions=positions))


def _refuse(_, saved, tangents):
    why = "a fused kernel has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize)"
    raise KernelError(f"{why}: use model.kernel = 'reference' or 'xla', or reverse mode (jax.grad)")


_reverse_only = with_derivatives(
    lambda _, x, __: (x, ()), _refuse, lambda _, __, gradient: gradient
)
"""Returns arrays unchanged, and refuses to differentiate them in forward mode."""


def choose(implementation: str, x: AttentionInputs, mesh: Mesh | None = None) -> Choice:
    """Returns the implementation that :func:`attend` runs for inputs like ``x``.

    The choice reads the shapes and dtypes of the arrays in ``x``, but not their values. Raises
    KernelError if an implementation is named and cannot be used.
    """
    if implementation == "auto":
        return _best(x, mesh)
    if implementation not in FUSED:
        return Choice(implementation, f"model.kernel is {implementation!r}")
    check_platform(implementation, mesh)
    if implementation == "pallas_tpu" and (tpu_generation(mesh) or 5) < 5:
        raise KernelError(f"model.kernel = {implementation!r} {_OLD_TPU}; use 'auto' or 'xla'")
    if varies(x.q):
        raise KernelError(f"model.kernel = {implementation!r}: {_NOT_IN_SHARD_MAP}; use 'auto'")
    if refused := _unsupported(implementation, x):
        why = f"does not support this attention: {refused}; use 'auto' or 'xla'"
        raise KernelError(f"model.kernel = {implementation!r} {why}")
    return Choice(implementation)


def _best(x: AttentionInputs, mesh: Mesh | None) -> Choice:
    platform, (_, rows, seg_len, _) = platform_of(mesh), x.q.shape
    best = BEST.get(platform)
    if best is None:
        return Choice("xla", f"there is no fused kernel for a {platform}")
    if best == "triton" and (compute_capability(mesh) or 90) < 80:
        return Choice("xla", f"{best} needs a GPU of compute capability 8.0 or higher")
    if best == "pallas_tpu" and (tpu_generation(mesh) or 5) < 5:
        return Choice("xla", f"{best} {_OLD_TPU}")
    if seg_len < FUSED_MIN_QUERIES:
        few = f"{best} gains nothing for segments of {seg_len} tokens, below {FUSED_MIN_QUERIES}"
        return Choice("xla", few)
    if varies(x.q):
        return Choice("xla", _NOT_IN_SHARD_MAP, falls_back=True)
    if not _rows_divide(x, mesh):
        n = row_devices(mesh)
        unequal = f"{best} needs the same number of rows on each device, not {rows} rows on {n}"
        return Choice("xla", unequal, falls_back=True)
    if refused := _unsupported(best, x):
        return Choice("xla", f"{best} cannot run: {refused}", falls_back=True)
    if failed := _failures.get(best):
        return Choice("xla", failed, falls_back=True)
    return Choice(best)


def _unsupported(implementation: str, x: AttentionInputs) -> str | None:
    """Returns the reason why a fused implementation cannot compute the attention, or ``None``."""
    for part in (x.positions, x.mask):
        if type(part) not in (Positions, AttentionMask, BothWaysMask):
            return f"it supports Positions, AttentionMask, BothWaysMask, not {type(part).__name__}"
    return _module(implementation).supports(x)


def _rows_divide(x: AttentionInputs, mesh: Mesh | None) -> bool:
    """Tells whether all devices have equally many rows."""
    return x.q.shape[1] % row_devices(mesh) == 0


_failures: dict[str, str] = {}


def distrust(implementation: str, reason: str) -> None:
    """Makes ``auto`` avoid an implementation in this process; users are shown the reason."""
    _failures[implementation] = reason


def may_fuse(implementation: str, mesh: Mesh | None) -> bool:
    """Tells whether a fused implementation might run; :func:`choose` decides whether it does."""
    return implementation in FUSED or (implementation == "auto" and platform_of(mesh) in BEST)


def check_platform(implementation: str, mesh: Mesh | None = None) -> None:
    """Raises KernelError if an implementation is for other devices than those of the mesh."""
    platform = platform_of(mesh)
    if FUSED.get(implementation, platform) != platform:
        needed = {"gpu": "an NVIDIA GPU", "tpu": "a TPU"}[FUSED[implementation]]
        why = f"needs {needed}, but the program runs on a {platform}"
        raise KernelError(f"model.kernel = {implementation!r} {why}; use 'auto' or 'xla'")


def compiler_options(mesh: Mesh | None) -> dict[str, bool | str] | None:
    """Returns XLA's options for a program with gradients, or ``None`` for the defaults.

    By default, XLA for NVIDIA GPUs adds the gradients of an embedding's rows with atomic additions.
    Their order, and so the rounding, differs from run to run. An option here allows only
    deterministic operations, which cost under 1% more traffic to memory.

    With JAX 0.11, XLA for NVIDIA GPUs lets a kernel in scanned layers write its outputs directly
    into the stacked arrays, but runs the kernel once more for the rest of the layer. So the forward
    pass of ``triton`` ran twice. JAX 0.10 and 0.12 run it once by default.

    With several GPUs, the XLA pass ``all-reduce-contiguous`` copies the gradients of a layer into
    one array, in which the GPUs add them, and copies the sums back. Without this pass, NCCL adds
    the same gradients in place, in one group.
    """
    if platform_of(mesh) != "gpu":
        return None
    options: dict[str, bool | str] = {"xla_gpu_exclude_nondeterministic_ops": True}
    if mesh is not None and mesh.size > 1:
        options["xla_disable_hlo_passes"] = "all-reduce-contiguous"
    if jax.__version_info__[:2] == (0, 11):
        options["xla_gpu_enable_dynamic_slice_fusion"] = False
    return options


@functools.cache
def _module(name: str) -> ModuleType:
    """Imports an implementation's module on first use, since it can need optional packages."""
    return importlib.import_module(f"txl_jax.model.kernels.{name}")


def _per_device(function, mesh: Mesh | None):
    """Returns a function that each device of a mesh runs on its own heads and rows."""
    if mesh is None or mesh.size == 1:
        return function

    def on_device(x: AttentionInputs) -> jax.Array:
        if x.dropout is not None:  # the same mask as on one device
            index = lambda axes: jax.lax.axis_index(axes).astype(np.uint32)
            n, b = x.q.shape[:2]
            first = index("tensor") * n * HEAD_STRIDE + index(ROWS) * b
            x = x.replace(dropout=x.dropout.replace(seed=x.dropout.seed.at[0].add(first)))
        return function(x)

    x = specs()
    return jax.shard_map(on_device, mesh=mesh, in_specs=(x,), out_specs=x.q, check_vma=False)


def specs() -> AttentionInputs:
    """Returns the PartitionSpecs of attention's inputs on a mesh, as a prefix of their pytree."""
    places = ("tensor",), (ROWS,), ("tensor", ROWS), ()
    heads, rows, both, every = (PartitionSpec(*axes) for axes in places)
    return AttentionInputs(both, both, both, heads, rows, every, every)  # type: ignore[arg-type]
