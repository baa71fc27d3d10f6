"""Fused attention for TPUs: prepares inputs of the kernels in pallas_tpu_tiles.py and runs them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.model.kernels.pallas_tpu_tiles import (
    LANES,
    Inputs,
    Queries,
    Tiles,
    backward_kernel,
    forward_kernel,
)
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.model.masks import BothWaysMask
from txl_jax.model.precision import bfloat16_passes

MOST_HELD = 44 * 2**20
"""The most bytes of on-chip memory for one head's keys, values, r and their gradients."""
_WORKING = 16 * 2**20


def precision_of(dtype: Any) -> lax.Precision:
    """Returns the precision of the kernel's matrix products.

    Mosaic can multiply in one bfloat16 pass, or in float32 if the factors are float32. This
    function chooses float32 if JAX's own precision asks for more than one pass. For bfloat16
    factors, one pass is exact.
    """
    exact = dtype == jnp.float32 and bfloat16_passes() > 1
    return lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT


def tile_size(seg_len: int) -> int:
    """Returns the tile size S: 256, or 128 if that needs less padding."""
    return 2 * LANES if -(-seg_len // LANES) % 2 == 0 else LANES


def supports(x: AttentionInputs) -> str | None:
    """Returns the reason why this kernel cannot compute the attention, or ``None`` if it can."""
    (t, h), n_keys = x.q.shape[2:], x.mask.n_keys
    if reason := x.unsupported_by_fused():
        return reason
    if isinstance(x.mask, BothWaysMask):
        return "it does not support attention in both directions"
    if Tiles(tile_size(t), t, n_keys - t, n_keys - 1, None).held(h, x.q.dtype) > MOST_HELD:
        return f"{n_keys} keys of {h} numbers and their gradients do not fit into on-chip memory"
    return None


def attend(
    x: AttentionInputs, *, tile: int | None = None, interpret: bool | pltpu.InterpretParams = False
) -> jax.Array:
    """Computes :func:`txl_jax.model.kernels.choice.attend`, and can be differentiated once.

    ``tile`` is S, a multiple of 128 on a TPU. ``interpret`` runs the kernel's operations one by one
    on any device, slowly; ``InterpretParams`` also simulate a TPU's memories.
    """
    mask, dropout, r = x.mask, x.dropout, x.positions.r
    assert r is not None
    t, m, size = mask.seg_len, mask.mem_len, tile or tile_size(mask.seg_len)
    rate, seed = (dropout.rate, dropout.seed) if dropout else (None, jnp.zeros(2, jnp.uint32))
    tiles = Tiles(size, t, m, mask.reach, rate, precision_of(x.q.dtype))
    more_t, more_k = tiles.n_q * size - t, tiles.n_k * size - (m + t)
    queries = [_pad(biased, 2, 0, more_t) for biased in x.biased_queries()]
    keys = [_pad(heads.astype(x.q.dtype), 2, 0, more_k) for heads in (x.k, x.val)]
    r = _pad(r.astype(x.q.dtype), 1, more_t, tiles.r_rows - more_t - r.shape[1])
    episodes = None
    if mask.episode is not None:
        own = mask.episode[:, None]
        episodes = _pad(own, 2, 0, more_t), _pad(own, 2, m, more_k)
    masks = (mask.filled, seed, episodes)
    return _fused(*queries, *keys, r, masks, tiles, interpret)[:, :, :t].astype(x.val.dtype)


def _pad(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    return jnp.pad(x, [(before, after) if a == axis else (0, 0) for a in range(x.ndim)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _fused(qu, qv, k, val, r, masks, tiles: Tiles, interpret) -> jax.Array:
    """Computes attention of padded arrays; ``masks`` are filled, seed and episodes."""
    return _forward(qu, qv, k, val, r, masks, tiles, interpret)[0]


def _forward(qu, qv, k, val, r, masks, tiles: Tiles, interpret):
    """Returns the result, and the arrays that the gradient needs."""
    *scalars, episodes = masks
    inputs = Inputs(qu, qv, k, val, r, episodes)
    row = jax.ShapeDtypeStruct((*qu.shape[:2], 1, qu.shape[2]), jnp.float32)
    outputs, width = [("nbi0", qu), ("nb0i", row)], min(tiles.size, LANES)
    scratch = [(tiles.size, columns) for columns in (width, width, qu.shape[3], tiles.size)]
    out, lse = _call(forward_kernel, tiles, interpret, scalars, inputs, outputs, scratch)
    return out, (inputs, scalars, out, lse)


def _backward(tiles: Tiles, interpret, saved, dout):
    """Returns the gradients of qu, qv, k, val and r."""
    inputs, scalars, out, lse = saved
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=3)[:, :, None]
    inputs = inputs._replace(dout=dout, lse=lse, delta=delta)
    of = (inputs.qu, inputs.qv, inputs.k, inputs.val, inputs.r)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in of[:2]]
    shapes += [jax.ShapeDtypeStruct(x.mT.shape, x.dtype) for x in of[2:]]
    outputs = list(zip(("nbi0", "nbi0", "nb00", "nb00", "n00"), shapes, strict=True))
    h, rows = inputs.qu.shape[-1], [x.shape[-1] for x in shapes[2:]]
    sums = [(tiles.size, h)] * 2 + [(h, n) for n in rows]
    dqu, dqv, *others = _call(backward_kernel, tiles, interpret, scalars, inputs, outputs, sums)
    return dqu, dqv, *(x.mT for x in others), None


_fused.defvjp(_forward, _backward)


def _call(kernel, tiles: Tiles, interpret, scalars, inputs: Inputs, outputs, scratch):
    """Runs a kernel once for each query tile; a run visits key tiles that are not fully masked.

    The grid has the axes heads N, rows B and query tiles. ``outputs`` are pairs of a string and an
    array. A string such as ``nbi0`` names for each axis of the array the index of a run's block:
    ``n`` is the head, ``b`` the row and ``i`` the query tile; ``0`` means the whole axis.
    ``scalars`` are filled [B] and seed [2]. ``scratch`` has the shapes of float32 scratch arrays.
    """
    (n, b, _, h), backward = inputs.qu.shape, inputs.dout is not None

    def blocks(places: str, shape):
        def index(n, b, i, *_):
            at = {"n": n, "b": b, "i": i, "0": 0}
            return tuple(at[place] for place in places)

        size = {"n": None, "b": None, "i": tiles.size}
        sizes = [size.get(place, full) for place, full in zip(places, shape, strict=True)]
        return pl.BlockSpec(sizes, index)

    places = Inputs(
        "nbi0", "nbi0", "nb00", "nb00", "n00", inputs.episodes and ("b0i", "b00"),
        *(("nbi0", "nb0i", "nb0i") if backward else ()),
    )  # fmt: skip

    def body(filled, seed, firsts, lasts, x, *refs):
        kernel(Queries(tiles, filled, seed, firsts, lasts, x), x, *refs)

    scores, moved = n * b * tiles.scores(), (*jax.tree.leaves(inputs), *(x for _, x in outputs))
    window = 1 + (tiles.part if backward else tiles.size) / tiles.size  # rows of r per key
    products = 5 + 3 * window if backward else 2 + window
    return pl.pallas_call(
        body,
        cost_estimate=pl.CostEstimate(
            flops=int(2 * h * products * scores),
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
            transcendentals=scores,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(n, b, tiles.n_q),
            in_specs=[jax.tree.map(lambda place, x: blocks(place, x.shape), places, inputs)],
            out_specs=[blocks(place, x.shape) for place, x in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_WORKING + tiles.held(h, inputs.k.dtype),
        ),
        interpret=interpret,
    )(*scalars, *tiles.spans(scalars[0]), inputs)
