"""Attention fused for TPUs: scores exist only as tiles in on-chip memory, forward and backward.

The T x K scores are split into square tiles of S x S. Query i and key j need row T-1-i+j of r, for
their distance M+i-j. So a tile needs 2S-1 neighbouring rows of r, its window. The window moves
forward by S rows for the next tile of keys, and back by S rows for the next tile of queries. The
position term is the product of queries and window, of which each row is then moved left to its
place (the relative shift of a tile). For S = 3 (entries are columns of the window; 5 is unused):

    product qv . window          skewed: row i moved left by S-1-i
      0 1 2 3 4 5                  2 3 4
      0 1 2 3 4 5          ->      1 2 3
      0 1 2 3 4 5                  0 1 2

One strided roll computes this. Its transpose, for the gradient, is log2(S) rolls; each moves the
rows whose shift has one bit set. Padding in front of r aligns windows to multiples of S, so a
window is two neighbouring blocks of r.

The softmax is computed tile by tile with a running maximum (Dao et al. 2022, FlashAttention). The
gradient computes each tile again, from the stored logarithm of each softmax's denominator. The
gradients of queries, keys, values and r stay in on-chip memory. Fully masked tiles are not read.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.model.dropout import HEAD_STRIDE, AttentionDropout
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.model.masks import BothWaysMask
from txl_jax.model.precision import bfloat16_passes

LANES = 128
MOST_SUMMED = 16 * 2**20
"""The most bytes of on-chip memory for the gradients of one head's keys, values and r."""
_WORKING = 24 * 2**20
_UNSEEN = -0.7 * float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The split of T x K scores into tiles, and the static part of the attention mask."""

    size: int  # S, the number of queries, and of keys, of a tile
    seg_len: int
    mem_len: int
    reach: int
    rate: float | None  # the dropout rate
    precision: lax.Precision = lax.Precision.DEFAULT  # of all products

    @property
    def n_q(self) -> int:
        """The number of tiles along the queries."""
        return -(-self.seg_len // self.size)

    @property
    def n_k(self) -> int:
        """The number of tiles along the keys."""
        return -(-(self.mem_len + self.seg_len) // self.size)

    @property
    def r_rows(self) -> int:
        """The number of rows of r with its padding."""
        return (self.n_q + self.n_k) * self.size

    def summed(self, h: int) -> int:
        """Returns the bytes of a head's gradients of keys, values and r, padded to 128 columns."""
        return (2 * self.n_k * self.size + self.r_rows) * -(-h // LANES) * LANES * 4

    def spans(self, filled: jax.Array) -> tuple[jax.Array, jax.Array, int]:
        """Returns each query tile's first [B * n_q] and last [n_q] key tile, and the most tiles."""
        start = self.mem_len + self.size * np.arange(self.n_q)
        first = np.maximum(start - self.reach, 0) // self.size
        last = np.minimum((start + self.size - 1) // self.size, self.n_k - 1)
        firsts = jnp.maximum(first, (self.mem_len - filled[:, None]) // self.size)
        as_int = lambda x: jnp.asarray(x, jnp.int32).ravel()
        return as_int(firsts), as_int(last), int(np.max(last - first)) + 1


def precision_of(dtype: Any) -> lax.Precision:
    """Returns the precision of the kernel's products: JAX's own where factors are float32.

    Mosaic has only one pass and float32, and float32 only for float32 factors. Products of other
    factors are exact in one pass.
    """
    exact = dtype == jnp.float32 and bfloat16_passes() > 1
    return lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT


def tile_size(seg_len: int) -> int:
    """Returns the tile size S: 256, or 128 if that needs less padding."""
    return 2 * LANES if -(-seg_len // LANES) % 2 == 0 else LANES


def supports(x: AttentionInputs) -> str | None:
    """Returns the reason why this kernel cannot compute the form, or ``None`` if it can."""
    (t, h), n_keys = x.q.shape[2:], x.mask.n_keys
    if reason := x.unsupported_by_fused():
        return reason
    if isinstance(x.mask, BothWaysMask):
        return "it does not support attention in both directions"
    if Tiles(tile_size(t), t, n_keys - t, n_keys - 1, None).summed(h) > MOST_SUMMED:
        return f"the gradients of {n_keys} keys of {h} numbers do not fit into on-chip memory"
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


class _Inputs(NamedTuple):
    """The padded arrays that the kernels read; inside of a kernel, the blocks of one tile."""

    qu: Any  # q + u and q + v: [N,B,T,H]; of a tile [S,H]
    qv: Any
    k: Any  # [N,B,K,H]; [S,H]
    val: Any
    r: Any  # the array [N,R,H] twice; the window's two blocks, [S,H] each
    episodes: Any  # of queries [B,1,T] and of keys [B,1,K]; [1,S]; or None
    dout: Any = None  # only for gradients: the result's gradient [N,B,T,H]; [S,H]
    lse: Any = None  # logarithm of the softmax's denominator: [N,B,1,T]; [1,S]
    delta: Any = None  # sum of dout * out: [N,B,1,T]; [1,S]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _fused(qu, qv, k, val, r, masks, tiles: Tiles, interpret) -> jax.Array:
    """Computes attention of padded arrays; ``masks`` are filled, seed and episodes."""
    return _forward(qu, qv, k, val, r, masks, tiles, interpret)[0]


def _forward(qu, qv, k, val, r, masks, tiles: Tiles, interpret):
    """Returns the result, and the arrays that the gradient needs."""
    *scalars, episodes = masks
    inputs = _Inputs(qu, qv, k, val, (r, r), episodes)
    row = jax.ShapeDtypeStruct((*qu.shape[:2], 1, qu.shape[2]), jnp.float32)
    outputs, scratch = [("nbi0", qu), ("nb0i", row)], (1, 1, qu.shape[3])
    out, lse = _call(_forward_kernel, tiles, interpret, scalars, inputs, outputs, scratch)
    return out, (inputs, scalars, out, lse)


def _backward(tiles: Tiles, interpret, saved, dout):
    """Returns the gradients of qu, qv, k, val and r."""
    inputs, scalars, out, lse = saved
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=3)[:, :, None]
    inputs = inputs._replace(dout=dout, lse=lse, delta=delta)
    of = (inputs.qu, inputs.qv, inputs.k, inputs.val, inputs.r[0])
    sums = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in of]
    outputs = list(zip(("nbi0", "nbi0", "nb00", "nb00", "n00"), sums, strict=True))
    gradients = _call(_backward_kernel, tiles, interpret, scalars, inputs, outputs)
    return *(g.astype(x.dtype) for g, x in zip(gradients, of, strict=True)), None


_fused.defvjp(_forward, _backward)


def _call(kernel, tiles: Tiles, interpret, scalars, inputs: _Inputs, outputs, scratch=()):
    """Runs a kernel over the tiles that are not fully masked.

    The grid has the axes heads N, rows B, query tiles, and the key tiles of each query tile. A
    string has a letter for each axis of an array, which gives the index of its block: ``n`` the
    head, ``b`` the row, ``i`` the query tile, ``j`` the key tile, ``w`` and ``x`` the two blocks of
    the window; ``0`` means the whole axis. ``scalars`` are filled [B] and seed [2]. ``scratch`` has
    the widths w of float32 arrays [S,w] that persist over the steps of a query tile.
    """
    n, b, _, h = inputs.qu.shape
    firsts, lasts, steps = tiles.spans(scalars[0])

    def blocks(places: str, shape):
        def index(n, b, i, step, filled, seed, firsts, lasts):
            # Steps after the last tile keep its index, so that no block is read again.
            j = jnp.minimum(firsts[b * tiles.n_q + i] + step, lasts[i])
            w = tiles.n_q - 1 - i + j
            at = {"n": n, "b": b, "i": i, "j": j, "w": w, "x": w + 1, "0": 0}
            return tuple(at[place] for place in places)

        size = {"n": None, "b": None} | dict.fromkeys("ijwx", tiles.size)
        sizes = [size.get(place, full) for place, full in zip(places, shape, strict=True)]
        return pl.BlockSpec(sizes, index)

    places = _Inputs(
        "nbi0", "nbi0", "nbj0", "nbj0", ("nw0", "nx0"), inputs.episodes and ("b0i", "b0j"),
        *(("nbi0", "nb0i", "nb0i") if inputs.dout is not None else ()),
    )  # fmt: skip

    def body(filled, seed, firsts, lasts, x, *refs):
        kernel(_Tile(tiles, steps, filled, seed, firsts, lasts, x), x, *refs)

    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(n, b, tiles.n_q, steps),
            in_specs=[jax.tree.map(lambda place, x: blocks(place, x.shape), places, inputs)],
            out_specs=[blocks(place, x.shape) for place, x in outputs],
            scratch_shapes=[pltpu.VMEM((tiles.size, w), jnp.float32) for w in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_WORKING + 2 * tiles.summed(h),
        ),
        interpret=interpret,
    )(*scalars, firsts, lasts, inputs)


def _forward_kernel(at: "_Tile", x: _Inputs, out, lse, largest, total, acc):
    _fill(at.begins, _UNSEEN, largest)
    _fill(at.begins, 0.0, total, acc)

    @pl.when(at.seen)
    def _():
        allowed = at.allowed()
        scores = jnp.where(allowed, at.scores(), _UNSEEN)
        before = largest[...]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(allowed, jnp.exp(scores - now), 0.0)
        shrink = jnp.exp(before - now)
        largest[...] = now
        total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        dropped = (weights * at.kept()).astype(x.val.dtype)
        acc[...] = acc[...] * shrink + at.product(dropped, x.val[...], 1, 0)

    @pl.when(at.ends)
    def _():
        denominator = jnp.where(total[...] == 0.0, 1.0, total[...])  # queries of the padding
        out[...] = (acc[...] / denominator).astype(out.dtype)
        # It is stored as a row; TPUs transpose only whole registers.
        column = largest[...] + jnp.log(denominator)
        lse[...] = jnp.broadcast_to(column, (len(column), LANES)).T[:1]


def _backward_kernel(at: "_Tile", x: _Inputs, dqu, dqv, dk, dval, dr):
    _fill(at.begins, 0.0, dqu, dqv)
    _fill(at.begins_row, 0.0, dk, dval)
    _fill(at.begins_head, 0.0, dr)

    @pl.when(at.seen)
    def _():
        weights, dscores = at.again()
        size, dtype = at.tiles.size, x.k.dtype
        rows = lambda block: pl.ds(pl.multiple_of(block * size, size), size)
        dwindow, dscores = _unskew(dscores).astype(dtype), dscores.astype(dtype)
        dqu[...] += at.product(dscores, x.k[...], 1, 0)
        dk[rows(at.j), :] += at.product(dscores, x.qu[...], 0, 0)
        dval[rows(at.j), :] += at.product(weights.astype(dtype), x.dout[...], 0, 0)
        for half in (0, 1):
            part = dwindow[:, half * size : (half + 1) * size]
            dqv[...] += at.product(part, x.r[half][...], 1, 0)
            dr[rows(at.window + half), :] += at.product(part, x.qv[...], 0, 0)


class _Tile:
    """The position of a kernel in the grid, and the computations of its tile.

    ``begins`` and ``ends`` mark the first and last step of a query tile, and ``begins_row`` and
    ``begins_head`` the first of a row or head. ``seen``: the tile is not fully masked. ``query``
    [S,1] and ``key`` [1,S] are indices, ``j`` is the key tile, ``window`` the first block of r.
    """

    def __init__(self, tiles: Tiles, steps: int, filled, seed, firsts, lasts, x: _Inputs):
        head, row, i, step = (pl.program_id(axis) for axis in range(4))
        self.tiles, self.seed, self.x = tiles, seed, x
        self.begins, self.ends = step == 0, step == steps - 1
        self.begins_row = i + step == 0
        self.begins_head = row + i + step == 0
        self.j = firsts[row * tiles.n_q + i] + step
        self.seen = self.j <= lasts[i]
        s = tiles.size
        self.query = i * s + lax.broadcasted_iota(jnp.int32, (s, 1), 0)
        self.key = self.j * s + lax.broadcasted_iota(jnp.int32, (1, s), 1)
        self.window = tiles.n_q - 1 - i + self.j
        self.row = head * HEAD_STRIDE + row
        self.oldest = tiles.mem_len - filled[row]

    def allowed(self) -> jax.Array:
        """Returns the tile of :meth:`AttentionMask.allowed`: bool [S,S]."""
        distance = self.tiles.mem_len + self.query - self.key
        seen = (distance >= 0) & (distance <= self.tiles.reach) & (self.key >= self.oldest)
        if self.x.episodes is None:
            return seen
        of_queries, of_keys = self.x.episodes
        return seen & (_column(of_queries[...]) == of_keys[...])

    def kept(self) -> jax.Array | float:
        """Returns the tile of :meth:`AttentionDropout.mask`, [S,S]; 1 without dropout."""
        if self.tiles.rate is None:
            return 1.0
        places = (x.astype(jnp.uint32) for x in (self.row, self.query, self.key))
        return AttentionDropout(self.seed, self.tiles.rate).factors(*places)

    def scores(self) -> jax.Array:
        """Returns the content scores plus the skewed position scores: [S,S]."""
        x = self.x
        position = jnp.concatenate([self.product(x.qv[...], r[...], 1, 1) for r in x.r], axis=1)
        return self.product(x.qu[...], x.k[...], 1, 1) + _skew(position)

    def again(self) -> tuple[jax.Array, jax.Array]:
        """Returns the weights after dropout, and the gradient of the scores: [S,S] each."""
        x, kept = self.x, self.kept()
        scores = self.scores() - _column(x.lse[...])
        weights = jnp.where(self.allowed(), jnp.exp(scores), 0.0)
        dweights = self.product(x.dout[...], x.val[...], 1, 1) * kept
        return weights * kept, weights * (dweights - _column(x.delta[...]))

    def product(self, a: jax.Array, b: jax.Array, of_a: int, of_b: int) -> jax.Array:
        """Returns the product over one axis of each array, with float32 sums."""
        axes, precision = (((of_a,), (of_b,)), ((), ())), self.tiles.precision
        return lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)


def _fill(when, value: float, *refs) -> None:
    @pl.when(when)
    def _():
        for ref in refs:
            ref[...] = jnp.full_like(ref, value)


def _skew(x: jax.Array) -> jax.Array:
    """Moves row i of window scores [S,2S] left by S-1-i, which gives key scores [S,S]."""
    size, width = x.shape
    return pltpu.roll(x, width - (size - 1), 1, stride=1, stride_axis=0)[:, :size]


def _unskew(x: jax.Array) -> jax.Array:
    """Transposes :func:`_skew`: moves row i right by S-1-i, with zeros around it."""
    size = len(x)
    x = jnp.concatenate([x, jnp.zeros_like(x)], axis=1)
    shift = (size - 1) - lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for power in range((size - 1).bit_length()):
        x = jnp.where((shift & (1 << power)) != 0, pltpu.roll(x, 1 << power, 1), x)
    return x


def _column(row: jax.Array) -> jax.Array:
    """Transposes [1,S] to [S,1]; TPUs transpose only whole registers."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]
