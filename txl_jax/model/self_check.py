"""The self-check: a run's fused attention, compared with ``reference`` on the run's devices.

The check runs the same attention as the run will: with its positions, lengths, dtype, precision,
dropout, episodes, mesh, loop over layers and seeds, but with at most three rows and two heads on
each device. The result is stored in the compilation cache's folder. Later starts read the result
there instead of running the check again.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh, NamedSharding

from txl_jax.config import TransformerXLConfig
from txl_jax.library_errors import installed_version
from txl_jax.messages import one_line
from txl_jax.model import dropout, masks
from txl_jax.model.attention import planned_inputs
from txl_jax.model.kernels import choice, parity, reference
from txl_jax.model.kernels.choice import KernelError
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.model.precision import bfloat16_passes, product_precision, resolved
from txl_jax.parallel import processes
from txl_jax.parallel.mesh import one_device
from txl_jax.standard_streams import say

_PACKAGES = (
    *("jax", "jaxlib", "libtpu", "triton", "jax-triton", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
)
_LONG = 2**23
"""With more scores per head than this, the check has one row and one head on each device."""


class Attention(NamedTuple):
    """The attention of a planned program: the shapes of its inputs on a mesh, and its surroundings.

    ``implementation`` is ``model.kernel``, and ``precision`` is ``model.matmul_precision``.
    ``scanned`` means inside of a loop over layers, and ``several_seeds`` inside of ``jax.vmap``.
    """

    implementation: str
    x: AttentionInputs
    mesh: Mesh
    precision: str | None = None
    scanned: bool = False
    several_seeds: bool = False

    def fused(self) -> str | None:
        """Returns the fused implementation that computes this attention, or ``None``."""
        with product_precision(self.precision):
            name = choice.choose(self.implementation, self.x, self.mesh).name
        return name if name in choice.FUSED else None


def planned(
    c: TransformerXLConfig,
    mesh: Mesh,
    rows: int,
    seg_len: int,
    mem_len: int,
    *,
    train: bool,
    episodes: bool = False,
    cached: bool = False,
    several_seeds: bool = False,
) -> Attention:
    """Returns the attention of a program; see :func:`~txl_jax.model.attention.planned_inputs`."""
    c = resolved(c, mesh)
    x = planned_inputs(c, rows, seg_len, mem_len, train, episodes, cached)
    return Attention(c.kernel, x, mesh, c.matmul_precision, bool(c.scan_layers), several_seeds)


def check(c: TransformerXLConfig, mesh: Mesh, *sizes: int, **program: bool) -> None:
    """Compares a planned attention with ``reference``, if a fused implementation computes it.

    The arguments are those of :func:`planned`. If ``auto`` chose the implementation, a failure
    prints a warning, and ``auto`` avoids this implementation in this process. If the user named the
    implementation, a failure raises KernelError. All processes of the run must call this.
    """
    if not choice.may_fuse(c.kernel, mesh):
        return
    attention = planned(c, mesh, *sizes, **program)
    name = attention.fused()
    reason = name and _kept_or_found(attention, name)
    if not name or not reason:
        return
    if c.kernel != "auto":
        raise KernelError(f"model.kernel = {name!r} {reason}; use 'auto' or 'xla'")
    reason = f"{name} {reason}"
    choice.distrust(name, reason)
    processes.print_once(f"warning: {reason}; attention is computed by XLA", sys.stderr)


def check_on_one_device(c: TransformerXLConfig, *sizes: int, **program: bool) -> None:
    """Runs :func:`check` for a program without a mesh, which runs on this process's first device.

    It does nothing with several processes, since :func:`check` needs all of them.
    """
    if not processes.many():
        check(c, one_device(jax.devices()[0]), *sizes, train=False, **program)


def failure(attention: Attention, name: str) -> str:
    """Runs the self-check; returns why the implementation cannot be trusted, or ``""``.

    All processes compile before any process runs the check, since a running program waits for the
    devices of all processes.
    """
    compare, reason = _attempted(lambda: comparison(attention, name))
    if reason := _agreed(reason):
        return reason
    apart, reason = _attempted(compare)
    limit = tolerance(attention, name)
    if not reason and not apart <= limit:
        reason = (
            "fails its self-check on this device: attention or its gradient differs from the"
            f" reference by {apart:.2g} of the largest entry (limit {limit:.2g}); please report it"
        )
    return _agreed(reason)


def _attempted(work: Callable[[], Any]) -> tuple[Any, str]:
    """Returns the result of ``work()`` or ``None``, and why it failed or ``""``."""
    try:
        return work(), ""
    except Exception as error:  # several compilers, or the launch, can raise it
        what = f"{type(error).__name__}: {one_line(error)}"
        return None, f"fails its self-check on this device ({what})"


def _agreed(reason: str) -> str:
    """Returns why this process failed, or which other process failed; ``""`` if none did."""
    failing = processes.failing(bool(reason))
    if reason and not processes.is_process_zero() and 0 not in failing:
        say(f"warning: process {jax.process_index()}: {reason}")
    elsewhere = f"fails its self-check on the devices of process {failing[0]}" if failing else ""
    return reason or elsewhere


def tolerance(attention: Attention, name: str) -> float:
    """Returns the largest result of :func:`comparison` that rounding can explain."""
    dtype = jnp.dtype(attention.x.q.dtype).name
    with product_precision(attention.precision):
        passes = bfloat16_passes()
    if dtype == "float32" and name != "triton" and passes == 1:
        dtype = "bfloat16"
    return parity.TOLERANCE[dtype]


def comparison(attention: Attention, name: str) -> Callable[[], float]:
    """Compiles the implementation, and returns a function that compares it with ``reference``.

    The function returns the largest difference in any array of values or gradients, relative to the
    largest entry of this array.
    """
    run = lower(attention, name).compile()

    def compare() -> float:
        x = jax.jit(functools.partial(drawn, attention), out_shardings=_shardings(attention))()
        found = run(x)
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(_plain)(x)
        return float(jax.jit(parity.worst)(found, expected))

    return compare


def lower(attention: Attention, name: str) -> jax.stages.Lowered:
    """Returns the lowered program that computes values and gradients with the implementation.

    The devices can be absent.
    """
    shapes = jax.eval_shape(functools.partial(drawn, attention))
    place = lambda sharding, tree: jax.tree.map(lambda x: x.update(sharding=sharding), tree)
    inputs = jax.tree.map(place, _shardings(attention), shapes)
    attend = functools.partial(choice.attend, implementation=name, mesh=attention.mesh)
    if attention.scanned:
        attend = functools.partial(_twice, jax.lax.map, attend)
    compute = functools.partial(parity.values_and_gradients, attend)
    if attention.several_seeds:
        compute = functools.partial(_twice, lambda f, x: jax.vmap(f)(x), compute)

    def run(x: AttentionInputs):
        with product_precision(attention.precision):
            return compute(x)

    options = choice.compiler_options(attention.mesh)
    return jax.jit(run, compiler_options=options).lower(inputs)


def _twice(mapped, function, x: AttentionInputs) -> Any:
    """Returns the mean of the results for two copies of ``x``, which equals the result for one."""
    both = mapped(function, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), x))
    return jax.tree.map(lambda y: (y[0] + y[1]) / 2, both)


def _plain(x: AttentionInputs):
    in_float32 = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return parity.values_and_gradients(reference.attend, jax.tree.map(in_float32, x))


def drawn(attention: Attention) -> AttentionInputs:
    """Draws random inputs of a planned attention, with fewer rows and heads.

    The memory of the first row is full, of the second two thirds full, of the third empty, and so
    on. With episodes, a new episode starts within each row.
    """
    x, shape = attention.x, attention.mesh.shape
    (n, b, t, h), mask = x.q.shape, x.mask
    row_devices, few = shape["data"] * shape["fsdp"], (1, 1) if t * mask.n_keys > _LONG else (2, 3)
    heads = shape["tensor"] * min(n // shape["tensor"], few[0])
    rows = row_devices * max(1, min(b // row_devices, few[1]))
    row = jnp.arange(rows)
    filled = jnp.asarray([mask.mem_len, 2 * mask.mem_len // 3, 0], jnp.int32)[row % 3]
    episode = mask.episode
    if episode is not None:
        episode = (jnp.arange(t) >= (t // 3 + row)[:, None]).astype(jnp.int32)
    drop = x.dropout and dropout.AttentionDropout.draw(jax.random.key(1), x.dropout.rate)
    mask = masks.AttentionMask(filled, episode, t, mask.mem_len, mask.reach)
    inputs = parity.random_inputs(heads, rows, mask, h, x.q.dtype, drop)
    given = dataclasses.asdict(inputs.positions)
    given["b"] = jax.random.normal(jax.random.key(2), (heads, mask.n_keys)) * h**-0.5
    absent = {key: None for key, term in dataclasses.asdict(x.positions).items() if term is None}
    oldest = None if x.oldest is None else jnp.int32(mask.mem_len // 3)
    positions = inputs.positions.replace(**{**given, **absent})
    return inputs.replace(positions=positions, oldest=oldest)


def _shardings(attention: Attention) -> AttentionInputs:
    place = functools.partial(NamedSharding, attention.mesh)
    return jax.tree.map(place, choice.specs())


_results: dict[str, str] = {}
"""The results of checks in this process, by the name of their file."""


def _kept_or_found(attention: Attention, name: str) -> str:
    """Returns the result of an earlier check from the compilation cache, or else runs the check."""
    file = _file(attention, name)
    if file not in _results:
        reason = processes.on_process_zero(lambda: _read(file))
        if reason is None:
            reason = failure(attention, name)
            # A process that ran out of memory can have enough at the next start: writes no file.
            if not processes.failing("RESOURCE_EXHAUSTED" in reason):
                processes.on_process_zero(lambda: _write(file, reason))
        _results[file] = reason
    return _results[file]


def _file(attention: Attention, name: str) -> str:
    """Returns the file name of a result: a hash of everything that the result depends on."""
    device = attention.mesh.devices.flat[0]
    with product_precision(attention.precision):
        passes = bfloat16_passes()
    parts = [
        *(name, device.device_kind, device.client.platform_version),
        *map(installed_version, _PACKAGES),
        *(file.read_text("utf-8") for file in sorted(Path(__file__).parent.rglob("*.py"))),
        *(attention.x, attention.mesh.shape, attention.scanned, attention.several_seeds, passes),
    ]
    key = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
    return f"self-check-{name}-{key[:16]}.json"


def _folder() -> epath.Path | None:
    """Returns the folder of the compilation cache, or ``None`` if there is none."""
    settings: Any = jax.config
    folder = settings.jax_compilation_cache_dir
    return epath.Path(folder) if folder and settings.jax_enable_compilation_cache else None


def _read(file: str) -> str | None:
    """Returns the failure in a stored result, ``""`` if the check passed, ``None`` if no result."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if folder := _folder():
            return json.loads((folder / file).read_text())["failure"]
    return None


def _write(file: str, reason: str) -> None:
    with contextlib.suppress(OSError):  # the next start checks again
        if folder := _folder():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(json.dumps({"failure": reason}))
