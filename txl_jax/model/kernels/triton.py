"""Fused attention for NVIDIA GPUs: device memory never holds an array of size T x K.

The kernels are written in Triton (triton_tiles.py) and called by jax-triton (triton_call.py), which
are imported on first use. Sums are float32 and deterministic: there are no atomic additions.

Float32 factors are cut to TF32, which XLA's products are by default too. For heads of 128 on an
H100 this takes 0.16 of the instructions of factors that are not cut (*compiled*), and errs by
2.4e-3 of the largest entry (*measured*, emulated). Three products (``tf32x3``) would err by 2e-6,
but take 0.67, and up to 22 KB per thread do not fit into registers. So the kernels refuse float32
at ``model.matmul_precision`` ``highest``, and ``auto`` leaves it to XLA.
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp

from txl_jax.model.dropout import threshold as threshold_of
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.model.precision import bfloat16_passes
from txl_jax.parallel.accelerators import cuda_extra, driver_of_gpus

_WIDEST = 128
_ENOUGH_PROGRAMS = 528  # for the gradient of r: four programs for each of an H100's 132 processors


@dataclasses.dataclass(frozen=True)
class Form:
    """The static arguments of a kernel, from the AttentionMask and the AttentionDropout.

    ``capability`` is the compute capability of the GPU, such as 90.
    """

    mem_len: int
    reach: int
    episodes: bool
    threshold: int
    scale: float
    capability: int


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The number of queries, and of keys, of a tile, and Triton's launch options."""

    size: int
    num_warps: int
    num_stages: int


def supports(x: AttentionInputs) -> str | None:
    """Returns the reason why this kernel cannot compute the form, or ``None`` if it can."""
    if reason := x.unsupported_by_fused():
        return reason
    if x.q.dtype == jnp.float32 and bfloat16_passes() == 6:
        return "it rounds float32 factors to TF32, which model.matmul_precision does not allow"
    if x.q.shape[-1] > _WIDEST:
        return f"it supports heads of at most {_WIDEST} numbers, not {x.q.shape[-1]}"
    try:
        importlib.import_module("jax_triton")
    except ImportError as error:
        reason = str(error).splitlines()[0]
        on_gpu = jax.default_backend() == "gpu"
        extra = (on_gpu and cuda_extra(*driver_of_gpus())) or "compile-cuda"
        return f"it needs jax-triton ({reason}): pip install 'txl_jax[{extra}]'"
    return None


def attend(x: AttentionInputs, capability: int = 90) -> jax.Array:
    """Computes :func:`txl_jax.model.kernels.choice.attend` for forms with r and without b.

    ``capability`` is the compute capability of the GPU, which need not be at hand.
    """
    mask, dropout = x.mask, x.dropout
    seed, threshold, scale = mask.filled, 0, 1.0  # any array serves as an unused one
    if dropout is not None:
        seed, threshold, scale = dropout.seed, threshold_of(dropout.rate), dropout.scale
    form = Form(mask.mem_len, mask.reach, mask.episode is not None, threshold, scale, capability)
    where = mask.filled, mask.filled if mask.episode is None else mask.episode, seed
    return _attend(form, *x.biased_queries(), x.k, x.val, x.positions.r, where)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: Form, qu, qv, k, val, r, where):
    """Computes attention [N,B,T,H]; ``where`` has filled, episode and seed."""
    return _forward(form, qu, qv, k, val, r, where)[0]


def _forward(form: Form, qu, qv, k, val, r, where):
    n, b, t, _ = qu.shape
    results = [qu, jax.ShapeDtypeStruct((n, b, t), jnp.float32)]
    grid = lambda size: (n * b * _ceil(t, size),)
    given = (qu, qv, k, val, r, *where, b, t, form.mem_len, form.reach)
    out, lse = launch("forward", given, results, grid, form)
    return out, (qu, qv, k, val, r, where, out, lse)


def _backward(form: Form, kept, dout):
    qu, qv, k, val, r, where, out, lse = kept
    (n, b, t, _), m, n_keys = qu.shape, form.mem_len, k.shape[2]
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    given = (qu, qv, k, val, r, dout, lse, delta, *where, b, t, m, form.reach)

    of_queries = lambda size: (n * b * _ceil(t, size),)
    dqu, dqv = launch("gradient_of_queries", given, [qu, qv], of_queries, form)
    of_keys = lambda size: (n * b * (_ceil(m, size) + _ceil(t, size)),)
    dk, dval = launch("gradient_of_keys", given, [k, val], of_keys, form)

    # A program sums a block of distances over some rows, over fewer rows if there are few blocks.
    size = tiling("gradient_of_distances", r.shape[-1], r.dtype, form.capability).size
    each = _ceil(b, min(b, _ceil(_ENOUGH_PROGRAMS, n * _ceil(n_keys, size))))
    parts = _ceil(b, each)
    results = [jax.ShapeDtypeStruct((parts, *r.shape), jnp.float32)]
    of_distances = lambda size: (_ceil(n_keys, size), n, parts)
    (dr,) = launch("gradient_of_distances", (*given, each), results, of_distances, form)
    return dqu, dqv, dk, dval, jnp.sum(dr, axis=0).astype(r.dtype), None


_attend.defvjp(_forward, _backward)


def tiling(kernel: str, h: int, dtype, capability: int) -> Tiling:
    """Returns the tiling of a kernel for heads of width H, with almost no spilled registers.

    Asynchronous products on Hopper need S of at least 64. Other GPUs, and float32, have too few
    registers for that. With one stage, float32 heads of 128 fit into 99 KiB of shared memory.
    """
    if dtype == jnp.float32:
        return Tiling(32, num_warps=4, num_stages=1)
    if capability // 10 != 9:
        return Tiling(32, num_warps=4, num_stages=2)
    if h <= 64:
        return Tiling(64, num_warps=4, num_stages=2)
    # Two stages of seven arrays of 64 x 128 exceed the 227 KiB of shared memory.
    return Tiling(64, num_warps=8, num_stages=1 if kernel == "gradient_of_distances" else 2)


def _ceil(x: int, of: int) -> int:
    return -(-x // of)


def launch(kernel: str, given, results, grid, form: Form) -> list[jax.Array]:
    """Runs a kernel of triton_tiles.py by name.

    ``given`` are the arrays and integers that the kernel reads, qu first. ``results`` have the
    shapes and dtypes of its outputs. ``grid`` gives the number of programs for a tile size.
    """
    from txl_jax.model.kernels import triton_tiles
    from txl_jax.model.kernels.triton_call import triton_call

    h = given[0].shape[-1]
    tiles = tiling(kernel, h, given[0].dtype, form.capability)
    options = {
        "grid": grid(tiles.size),
        "name": f"attention_{kernel}",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **constants(tiles, form, h),
    }
    return triton_call(getattr(triton_tiles, kernel), given, results, form.capability, options)


def constants(tiles: Tiling, form: Form, h: int) -> dict:
    """Returns the constants of a kernel; its width is H rounded up to a power of 2."""
    sizes = {"H": h, "WIDTH": max(16, 1 << (h - 1).bit_length()), "SIZE": tiles.size}
    return {**sizes, "EPISODES": form.episodes, "THRESHOLD": form.threshold, "SCALE": form.scale}
