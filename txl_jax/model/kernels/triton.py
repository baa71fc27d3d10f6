"""Fused attention for NVIDIA GPUs, by the Triton kernels of triton_tiles.py.

jax-triton calls the kernels, and is imported on first use. Sums are float32. They are deterministic
because there are no atomic additions. A matrix product of float32 factors is computed as three TF32
products (``tf32x3``), with errors below 1e-5 of the largest entry. For bfloat16 queries, position
scores are stored as float16, which has three more bits of precision than bfloat16. Position scores
beyond +-65,504 overflow.
"""

import dataclasses
import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.model.dropout import threshold as threshold_of
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.parallel.accelerators import cuda_extra, driver_of_gpus


class Tiling(NamedTuple):
    """Triton's launch options, and the sizes of a tile (triton_tiles.py)."""

    num_warps: int
    num_stages: int
    sizes: dict[str, int]


_BY_KEY = ("forward", "gradient_of_keys")
_BY_CLASS = ("position_scores", "gradient_of_queries", "gradient_of_distances")
_TILINGS: dict[str, tuple[Any, ...]] = {  # an entry for each kernel of _BY_KEY, then of _BY_CLASS
    "bfloat16": ((8, 2, 128, 64), (4, 2, 64, 64), (4, 3, 64, 128), (4, 2, 64, 64), (4, 3, 64, 64)),
    "bfloat16 sm_90": ((4, 3, 64, 64), (4, 3, 64, 64), (), (), ()),
    "bfloat16 wide": ((), (4, 2, 32, 64), (), (), (8, 3, 64, 128)),
    "bfloat16 wide sm_90":
        ((8, 3, 128, 64), (8, 1, 128, 64), (), (8, 3, 128, 64), (4, 2, 64, 64)),
    "bfloat16 wide sm_100": ((), (4, 2, 64, 64), (), (), ()),
    "float32": ((4, 1, 64, 32), (4, 1, 16, 32), (4, 1, 64, 32), (4, 1, 32, 32), (4, 2, 32, 64)),
    "float32 sm_90":
        ((8, 2, 128, 32), (4, 1, 16, 64), (8, 2, 128, 64), (4, 2, 64, 32), (8, 2, 32, 128)),
}  # fmt: skip
"""Warps, stages and two tile sizes of each kernel; () means the entry of a less specific name.

``wide`` means heads of more than 64 numbers. On an H100, the sm_90 tilings for bfloat16 were within
4% of the fastest of 207 tilings. The other tilings were chosen with benchmarks/attention_cycles.py.
Tilings without ``sm_`` in their name fit into 99 KiB of shared memory. A matrix product of up to 64
rows has four warps, since more warps would repeat its work.
"""


@dataclasses.dataclass(frozen=True)
class Form:
    """The static sizes of attention: N, B, T, K, the padded H, and the number of rows of r.

    ``far`` is the row of r for the largest distance that the mask allows. ``dropped`` is the result
    of :func:`txl_jax.model.dropout.threshold`. ``capability`` is the GPU's compute capability
    without its dot, such as 90. If ``ring``, the keys and values of memory are [N,B,M,H], and the
    oldest can be in any slot.
    """

    n: int
    b: int
    t: int
    k: int
    h: int
    r: int
    far: int
    dropped: int
    capability: int
    ring: bool = False

    @property
    def every(self) -> int:
        """The step between a tile's queries, chosen to leave few rows of 64-row tiles unused."""
        rows = lambda every: _ceil(_ceil(self.t, every), 64) * 64 * every
        return min((8, 4, 2), key=lambda every: (rows(every), -every))

    @property
    def padded(self) -> int:
        """The number of keys in a stored row of scores: K, rounded up for tiles of every size."""
        return _ceil(self.k, 128) * 128

    def classes(self, sizes: dict[str, int]) -> int:
        """Returns how many tiles of queries one head has, over all rows of a batch.

        These are the tiles that have every EVERY-th query (triton_tiles.py).
        """
        return self.b * self.every * _ceil(_ceil(self.t, self.every), sizes["SX"])


def supports(x: AttentionInputs) -> str | None:
    """Returns the reason why these kernels cannot compute the attention, or ``None``."""
    if reason := x.unsupported_by_fused():
        return reason
    if (width := x.q.shape[-1]) > 128:
        return f"it supports a model.d_head of at most 128, not {width}"
    try:
        importlib.import_module("jax_triton")
    except ImportError as error:
        reason, on_gpu = str(error).splitlines()[0], jax.default_backend() == "gpu"
        extra = (on_gpu and cuda_extra(*driver_of_gpus())) or "compile-cuda"
        return f"it needs jax-triton ({reason}): pip install 'txl_jax[{extra}]'"
    return None


def form_of(x: AttentionInputs, capability: int) -> Form:
    """Returns the static sizes of the attention ``x``."""
    (n, b, t, h), k = x.q.shape, x.mask.n_keys
    r = x.positions.r.shape[1]  # type: ignore[union-attr]
    dropped = threshold_of(x.dropout.rate) if x.dropout else 0
    width = max(16, 1 << (h - 1).bit_length())
    far, ring = k - 1 - x.mask.reach, x.oldest is not None
    return Form(n, b, t, k, width, r, far, dropped, capability, ring)


def attend(x: AttentionInputs, capability: int = 90) -> jax.Array:
    """Computes :func:`txl_jax.model.kernels.choice.attend` for positions with r and without b.

    ``capability`` is the compute capability of the GPU; the GPU itself can be absent. The kernels
    use the layout [B,T,N,H]. The matrix products that project states to heads have this layout too,
    so XLA transposes nothing. If M is not a multiple of 128, memory and segment are first joined
    into one array. A ring of memory is read in its own layout, [N,B,M,H].
    """
    x = x.joined() if x.mask.mem_len % 128 else x
    p, f, h = x.positions, form_of(x, capability), x.q.shape[-1]
    bias = lambda of: jnp.zeros((f.n, h), x.q.dtype) if of is None else of
    wide = lambda a: jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, f.h - h)])
    pair = lambda a: a if isinstance(a, tuple) else (a[:, :, :0], a)
    heads = (x.q, pair(x.k), pair(x.val), p.r[:, None])  # type: ignore[index]
    q, k, val, r = jax.tree.map(lambda a: wide(a).transpose(1, 2, 0, 3), heads)
    if f.ring:
        k, val = ((wide(whole[0]), own) for whole, (_, own) in ((x.k, k), (x.val, val)))
    seed = x.dropout.seed if x.dropout else jnp.zeros(2, jnp.uint32)
    oldest = jnp.zeros(1, jnp.int32) if x.oldest is None else x.oldest[None]
    where = (*x.mask.interval(), oldest, seed)
    out = _attend(f, q, k, val, r[0], wide(bias(p.u)), wide(bias(p.v)), where)
    return out[..., :h].transpose(2, 0, 1, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(f: Form, q, k, val, r, u, v, where):
    """Computes attention; ``where`` has each query's first and last key, the oldest slot, seed."""
    return _forward(f, q, k, val, r, u, v, where)[0]


def _position_scores(f: Form, q, v, r, where):
    kind = jnp.float16 if q.dtype == jnp.bfloat16 else q.dtype
    given = (q, v, r, *where[:2], f.n, f.t, f.r)
    results = [jax.ShapeDtypeStruct((f.b * f.n, f.t, f.padded), kind)]
    return launch("position_scores", given, results, lambda s: (f.n * f.classes(s),), f)[0]


def _forward(f: Form, q, k, val, r, u, v, where):
    scores = _position_scores(f, q, v, r, where)
    given = (q, u, *k, *val, scores, *where, f.b, f.n, f.t, f.k, f.k - k[1].shape[1])
    results = [q, jax.ShapeDtypeStruct((f.b * f.n, f.t), jnp.float32)]
    groups = lambda s: (f.n * f.b * _ceil(f.t, s["SQ"]),)
    out, lse = launch("forward", given, results, groups, f)
    return out, (q, k, val, r, u, v, where, out, lse)


def _backward(f: Form, saved, dout):
    q, k, val, r, u, v, where, out, lse = saved
    if f.ring:  # sorts the slots by age, [B,M,N,H], and moves the gradients back to the slots
        order = lambda ring: jnp.roll(ring, -where[2][0], axis=2).transpose(1, 2, 0, 3)
        (keys, values), back = jax.vjp(lambda *rings: tuple(map(order, rings)), k[0], val[0])
        saved = q, (keys, k[1]), (values, val[1]), r, u, v, where, out, lse
        dq, dk, dval, *rest = _backward(dataclasses.replace(f, ring=False), saved, dout)
        dkeys, dvalues = back((dk[0], dval[0]))
        return dq, (dkeys, dk[1]), (dvalues, dval[1]), *rest
    *where, _, seed = where
    # In a loop over layers, this launch computes the scores again: stored scores would be copied
    # twice. Without a loop and without model.remat, XLA merges it with the forward pass's launch.
    scores = _position_scores(f, q, v, r, where)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).transpose(0, 2, 1)
    spans = _spans(f.k, tiling("gradient_of_keys", q.dtype, f).sizes, *where)
    sizes = (f.n, f.t, f.k, k[0].shape[1])
    given = (q, u, *k, *val, scores, dout, lse, delta, *where, spans, seed, *sizes)
    results = [*k, *val, jax.ShapeDtypeStruct(scores.shape, q.dtype)]
    blocks = lambda s: (f.n * f.b * _ceil(f.k, s["SK"]),)
    *dkeys, dscores = launch("gradient_of_keys", given, results, blocks, f)

    parts = f.classes(tiling("gradient_of_queries", q.dtype, f).sizes)
    given = (*k, r, dscores, *where, f.b, *sizes, f.r)
    results = [q, jax.ShapeDtypeStruct((2, parts, f.n, f.h), jnp.float32)]
    dq, of_biases = launch("gradient_of_queries", given, results, lambda _: (f.n * parts,), f)

    given = (q, v, dscores, *where, f.b, f.t, f.k, f.r, f.far)
    results = [jax.ShapeDtypeStruct((f.every, *r.shape), jnp.float32)]
    distances = lambda s: (_ceil(f.r + f.every, s["SD"]), f.n, f.every)
    (dr,) = launch("gradient_of_distances", given, results, distances, f)
    pairs = zip((jnp.sum(dr, axis=0), *jnp.sum(of_biases, axis=1)), (r, u, v), strict=True)
    return dq, tuple(dkeys[:2]), tuple(dkeys[2:]), *(x.astype(of.dtype) for x, of in pairs), None


_attend.defvjp(_forward, _backward)


def _spans(n_keys: int, sizes: dict[str, int], oldest, newest) -> jax.Array:
    """Returns ``spans``, an argument of ``gradient_of_keys`` (triton_tiles.py)."""
    queries, keys = sizes.values()
    first = jnp.arange(0, n_keys, keys)
    count = lambda of_queries: jnp.sum(of_queries, axis=1, dtype=jnp.int32)
    oldest, newest, last = oldest[:, :, None], newest[:, :, None], first + keys - 1
    begin = count(newest < first) // queries
    end = jnp.maximum(_ceil(count(oldest <= last), queries), begin)
    whole = jnp.clip(_ceil(count(newest < last), queries), begin, end)
    edge = jnp.clip(count(oldest <= first) // queries, whole, end)
    return jnp.stack([begin, whole, edge, end], axis=-1)


def tiling(kernel: str, dtype: Any, f: Form) -> Tiling:
    """Returns the tiling of a kernel from the most specific entry of :data:`_TILINGS`."""
    of_all, family = jnp.dtype(dtype).name, f" sm_{f.capability // 10}0"
    wide = f"{of_all} wide" if f.h > 64 else of_all
    rows = (_TILINGS.get(name) for name in (wide + family, of_all + family, wide, of_all))
    column = (*_BY_KEY, *_BY_CLASS).index(kernel)
    num_warps, num_stages, *sizes = next(row[column] for row in rows if row and row[column])
    sides = ("SQ", "SK") if kernel in _BY_KEY else ("SX", "SD")
    return Tiling(num_warps, num_stages, dict(zip(sides, sizes, strict=True)))


def _ceil(x, of: int):
    return -(-x // of)


def constants(kernel: str, dtype: Any, f: Form) -> dict[str, Any]:
    """Returns the arguments of a kernel of triton_tiles.py that are known when it is compiled."""
    tiles, precision = tiling(kernel, dtype, f), "tf32x3" if dtype == jnp.float32 else "ieee"
    own = {"STRIDE": f.n * f.h, "H": f.h, "KP": f.padded, "PRECISION": precision, **tiles.sizes}
    if kernel in _BY_KEY:
        own |= {"RING": f.ring} if kernel == "forward" else {}
        return {**own, "STAGES": tiles.num_stages, "DROPPED": f.dropped}
    if kernel != "position_scores":  # other kernels read what gradient_of_keys wrote
        own |= tiling("gradient_of_keys", dtype, f).sizes
    return {**own, "EVERY": f.every}


def launch(kernel: str, given, results, grid, f: Form) -> list[jax.Array]:
    """Runs a kernel of triton_tiles.py by name.

    ``given`` are the arrays and integers that the kernel reads; the first array has the dtype of
    queries and keys. ``results`` have the shapes and dtypes of the outputs. ``grid`` maps the
    tile's sizes to the number of programs.

    jax-triton has no rule for ``jax.vmap``, so ``sequential_vmap`` runs the kernel once for each
    index. ``sequential_vmap`` also hides the call from a step of JAX 0.12 that removes unused
    results. jax-triton 0.4.1 has a rule for this step with a wrong signature: without
    ``sequential_vmap``, any gradient would raise a TypeError.
    """
    import jax_triton

    from txl_jax.model.kernels import triton_tiles

    tiles, options = tiling(kernel, given[0].dtype, f), constants(kernel, given[0].dtype, f)
    options |= {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    options |= {"kernel": getattr(triton_tiles, kernel), "name": f"attention_{kernel}"}
    options |= {"grid": grid(tiles.sizes), "compute_capability": f.capability}
    options["out_type" if jax_triton.__version_info__ >= (0, 4) else "out_shape"] = results

    @jax.custom_batching.sequential_vmap
    def call(*arrays):
        rest = iter(arrays)
        every = [next(rest) if isinstance(x, jax.Array) else x for x in given]
        return jax_triton.triton_call(*every, **options)

    return call(*(x for x in given if isinstance(x, jax.Array)))
