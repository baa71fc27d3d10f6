"""Attention fused for TPUs: scores exist only as tiles in on-chip memory, forward and backward.

The T x K scores are split into square tiles of S x S. Query i and key j have the distance M+i-j,
and their score needs row T-1-i+j of r. So L queries of a tile need L+S neighbouring rows of r,
which are called their window. The window moves forward by S rows for the next tile of keys, and
back by L rows for the next L queries.

The position scores are the product of the queries and the window. Each row of the product is then
moved left to its place (the relative shift of a tile). This example has L = S = 3. Entries are
columns of the window; column 5 is unused:

    product qv . window          skewed: row i moved left by L-1-i
      0 1 2 3 4 5                  2 3 4
      0 1 2 3 4 5          ->      1 2 3
      0 1 2 3 4 5                  0 1 2

One strided roll computes this shift. The gradient needs the transposed shift, for which a roll
would need a negative stride. So the gradient rotates each part of L columns by one gather. Padding
in front of r aligns windows to multiples of L.

A kernel program has one tile of queries, and all keys of the same row and head. It visits the tiles
of keys in a loop. The softmax is computed tile by tile with a running maximum (Dao et al. 2022,
FlashAttention). The gradient computes each tile again, from the stored logarithm of each softmax's
denominator. The gradients of queries, keys, values and r are summed in on-chip memory. The sums for
keys, values and r are transposed, so that no matrix product has to transpose its factors. Fully
masked tiles are not visited. Without episodes, a tile in which all scores are allowed does not
compute the mask.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.model.dropout import HEAD_STRIDE, AttentionDropout

LANES = 128
_UNSEEN = -0.7 * float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The split of T x K scores into tiles, and the static part of the attention mask."""

    size: int  # S, the number of queries, and of keys, of a tile
    seg_len: int  # T
    mem_len: int  # M
    reach: int  # the largest distance from a query to a key that it may attend to
    rate: float | None  # the dropout rate
    precision: lax.Precision = lax.Precision.DEFAULT  # of all matrix products

    @property
    def part(self) -> int:
        """L, the number of queries of a tile whose gradients are computed at once."""
        return self.size // 2 if self.size % LANES else LANES

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

    def held(self, h: int, dtype: Any) -> int:
        """Returns the bytes of on-chip memory for a head's keys, values and r, and their gradients.

        Each array has two buffers, so that copies overlap with computation. The float32 sums of the
        gradients need one more buffer.
        """
        rows, size = 2 * self.n_k * self.size + self.r_rows, jnp.dtype(dtype).itemsize
        columns, transposed = -(-h // LANES) * LANES, -(-h // 16) * 16
        return rows * (2 * size * (columns + transposed) + 4 * transposed)

    def spans(self, filled: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first key tile [B * n_q] and the last one [n_q] of each query tile: int32."""
        first, last = self._spans()
        firsts = jnp.maximum(first, (self.mem_len - filled[:, None]) // self.size)
        return firsts.astype(jnp.int32).ravel(), jnp.asarray(last, jnp.int32)

    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns each query tile's first and last key tile with a full memory."""
        start = self.mem_len + self.size * np.arange(self.n_q)
        first = np.maximum(start - self.reach, 0) // self.size
        return first, np.minimum((start + self.size - 1) // self.size, self.n_k - 1)

    def scores(self) -> int:
        """Returns the number of scores of a row and head that are computed with a full memory."""
        first, last = self._spans()
        return int(np.sum(last - first + 1)) * self.size**2


class Inputs(NamedTuple):
    """The padded arrays that the kernels read; inside of a kernel, the parts of one query tile."""

    qu: Any  # q + u and q + v: [N,B,T,H]; in a kernel [S,H]
    qv: Any
    k: Any  # [N,B,K,H]; [K,H]
    val: Any
    r: Any  # [N,R,H]; [R,H]
    episodes: Any  # of queries [B,1,T] and of keys [B,1,K]; [1,S] and [1,K]; or None
    dout: Any = None  # only for gradients: the result's gradient [N,B,T,H]; [S,H]
    lse: Any = None  # logarithm of the softmax's denominator: [N,B,1,T]; [1,S]
    delta: Any = None  # sum of dout * out: [N,B,1,T]; [1,S]


def forward_kernel(at: "Queries", x: Inputs, out, lse, largest, total, acc, ahead):
    """Writes the result ``out`` [S,H] and ``lse`` [1,S].

    The last arguments are float32 scratch arrays: the ``largest`` score and the ``total`` of the
    weights [S,128], the sum of weighted values ``acc`` [S,H], and ``ahead``, the scores of the next
    tile [S,S].
    """
    # All columns of largest are equal, and a column of total sums every 128th key. This avoids the
    # slowest part of a softmax, which is moving numbers between the columns of a register.
    largest[...] = jnp.full_like(largest, _UNSEEN)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)
    size, width = at.tiles.size, total.shape[1]
    # The scores of the next tile are computed during the softmax of the current tile, since matrix
    # products and sums run on different units.
    ahead[...] = _Part(at, at.first, 0, size).scores()

    def visit(j: jax.Array, masked: bool) -> None:
        part, following = _Part(at, j, 0, size, masked), jnp.minimum(j + 1, at.last)
        scores, before = part.seen(ahead[...], _UNSEEN), largest[...]
        scores_of_following = _Part(at, following, 0, size).scores()
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = part.seen(jnp.exp(scores - _widened(now, size)), 0.0)
        shrink = jnp.exp(before - now)
        largest[...] = now
        sums = sum(weights[:, first : first + width] for first in range(0, size, width))
        total[...] = total[...] * shrink + sums
        dropped = (weights * part.kept()).astype(x.val.dtype)
        added = at.product(dropped, x.val[part.keys], 1, 0)
        acc[...] = acc[...] * _widened(shrink, added.shape[1]) + added
        ahead[...] = scores_of_following

    at.over_keys(visit)
    denominator = jnp.sum(total[...], axis=1, keepdims=True)
    denominator = jnp.where(denominator == 0.0, 1.0, denominator)  # queries of the padding
    out[...] = (acc[...] / denominator).astype(out.dtype)
    # lse is stored as a row; TPUs transpose only whole registers.
    column = largest[:, :1] + jnp.log(denominator)
    lse[...] = jnp.broadcast_to(column, (len(column), LANES)).T[:1]


def backward_kernel(at: "Queries", x: Inputs, *refs):
    """Writes the gradients of queries [S,H], keys and values [H,K], and r [H,R].

    The gradients of keys and values are written after a row's last tile of queries, and the
    gradient of r after a head's last tile. ``refs`` are arrays for the five gradients, then five
    float32 arrays for their sums.
    """
    gradients, sums = refs[:5], refs[5:]
    dqu, dqv, dk, dval, dr = sums
    _fill_zeros(True, dqu, dqv)
    _fill_zeros(at.begins_row, dk, dval)
    _fill_zeros(at.begins_head, dr)
    lse, delta = _equal_columns(x.lse[...]), _equal_columns(x.delta[...])
    qu, qv, dout = (queries[...].T for queries in (x.qu, x.qv, x.dout))  # [H,S]
    size, dtype = at.tiles.size, x.k.dtype

    def begin(part: _Part) -> tuple[jax.Array, jax.Array]:
        return part.scores(), at.product(x.dout[part.rows], x.val[part.keys], 1, 1)

    def finish(part: _Part, scores: jax.Array, dweights: jax.Array) -> None:
        rows, keys, kept = part.rows, part.keys, part.kept()
        weights = part.seen(jnp.exp(scores - _widened(lse[rows], size)), 0.0)
        dscores = weights * (dweights * kept - _widened(delta[rows], size))
        weights = (weights * kept).astype(dtype)
        dwindow, dscores = _unskew(dscores).astype(dtype), dscores.astype(dtype)
        dqu[rows] += at.product(dscores, x.k[keys], 1, 0)
        dqv[rows] += at.product(dwindow, x.r[part.window], 1, 0)
        dk[:, keys] += at.product(qu[:, rows], dscores, 1, 0)
        dval[:, keys] += at.product(dout[:, rows], weights, 1, 0)
        dr[:, part.window] += at.product(qv[:, rows], dwindow, 1, 0)

    def visit(j: jax.Array, masked: bool) -> None:
        length = at.tiles.part
        parts = [_Part(at, j, first, length, masked) for first in range(0, size, length)]
        begun = begin(parts[0])
        for n, part in enumerate(parts):  # the next part begins before this one is finished
            arrays = begun
            if n + 1 < len(parts):
                begun = begin(parts[n + 1])
            finish(part, *arrays)

    at.over_keys(visit)
    ends: tuple[bool | jax.Array, ...] = (True, True, at.ends_row, at.ends_row, at.ends_head)
    for gradient, total, end in zip(gradients, sums, ends, strict=True):
        pl.when(end)(functools.partial(_store, gradient, total))


class Queries:
    """The place of a kernel program in the grid: a tile of queries of a row and head.

    ``begins_row`` and ``begins_head`` mark the first tile of a row and of a head, ``ends_row`` and
    ``ends_head`` the last one. ``first`` and ``last`` are the first and the last tile of keys that
    the program visits. ``episodes`` [S,128] are the episodes of the queries, in equal columns.
    """

    def __init__(self, tiles: Tiles, filled, seed, firsts, lasts, x: Inputs):
        head, row, i = (pl.program_id(axis) for axis in range(3))
        self.tiles, self.seed, self.x, self.i = tiles, seed, x, i
        self.begins_row, self.ends_row = i == 0, i == tiles.n_q - 1
        self.begins_head = self.begins_row & (row == 0)
        self.ends_head = self.ends_row & (row == pl.num_programs(1) - 1)
        self.first, self.last = firsts[row * tiles.n_q + i], lasts[i]
        self.row = head * HEAD_STRIDE + row
        self.oldest = tiles.mem_len - filled[row]
        self.episodes = None if x.episodes is None else _equal_columns(x.episodes[0][...])

    def over_keys(self, visit: Callable[[jax.Array, bool], None]) -> None:
        """Calls ``visit(j, masked)`` for the key tiles that are not fully masked, one by one.

        ``visit`` is compiled twice, with a mask and without one, since few tiles need a mask.
        """

        def step(j: jax.Array, _) -> None:
            masked = self._has_edge(j)
            pl.when(masked)(lambda: visit(j, True))
            pl.when(jnp.logical_not(masked))(lambda: visit(j, False))

        lax.fori_loop(self.first, self.last + 1, step, None)

    def _has_edge(self, j: jax.Array) -> jax.Array:
        """Returns whether tile ``j`` of the keys needs a mask; with episodes, every tile does."""
        tiles = self.tiles
        distance = tiles.mem_len + (self.i - j) * tiles.size
        nearest, farthest = distance - (tiles.size - 1), distance + tiles.size - 1
        edge = (nearest < 0) | (farthest > tiles.reach) | (j * tiles.size < self.oldest)
        return edge | (self.episodes is not None)

    def product(self, a: jax.Array, b: jax.Array, of_a: int, of_b: int) -> jax.Array:
        """Returns the product that sums over axis ``of_a`` of a and axis ``of_b`` of b: float32."""
        axes, precision = (((of_a,), (of_b,)), ((), ())), self.tiles.precision
        return lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)


class _Part:
    """L queries of a tile and the S keys of tile ``j``, with methods for their scores and mask.

    ``rows`` is the slice of the queries in their tile, ``keys`` the slice of the keys, and
    ``window`` the slice of the L+S rows of r for their distances. ``query`` [L,1] and ``key`` [1,S]
    are the indices of the queries and keys.
    """

    def __init__(
        self, queries: Queries, j: jax.Array, first: int, length: int, masked: bool = False
    ):
        size, n_q = queries.tiles.size, queries.tiles.n_q
        self.of, self.masked = queries, masked
        self.rows = slice(first, first + length)
        self.keys = pl.ds(pl.multiple_of(j * size, size), size)
        window = (n_q - queries.i + j) * size - (first + length)
        self.window = pl.ds(pl.multiple_of(window, length), length + size)
        iota = functools.partial(lax.broadcasted_iota, jnp.int32)
        self.query = queries.i * size + first + iota((length, 1), 0)
        self.key = j * size + iota((1, size), 1)

    def seen(self, x: jax.Array, unseen: float) -> jax.Array:
        """Replaces the masked entries of an array [L,S]; see :meth:`AttentionMask.allowed`."""
        if not self.masked:
            return x
        of, tiles = self.of, self.of.tiles
        distance = tiles.mem_len + self.query - self.key
        allowed = (distance >= 0) & (distance <= tiles.reach) & (self.key >= of.oldest)
        if of.episodes is not None:
            of_keys = of.x.episodes[1][:, self.keys]
            allowed &= _widened(of.episodes[self.rows], of_keys.shape[1]) == of_keys
        return jnp.where(allowed, x, unseen)

    def kept(self) -> jax.Array | float:
        """Returns this part of :meth:`AttentionDropout.mask`, [L,S]; 1 without dropout."""
        of = self.of
        if of.tiles.rate is None:
            return 1.0
        places = (x.astype(jnp.uint32) for x in (of.row, self.query, self.key))
        return AttentionDropout(of.seed, of.tiles.rate).factors(*places)

    def scores(self) -> jax.Array:
        """Returns the content scores plus the skewed position scores: [L,S]."""
        x, product = self.of.x, self.of.product
        position = _skew(product(x.qv[self.rows], x.r[self.window], 1, 1))
        return product(x.qu[self.rows], x.k[self.keys], 1, 1) + position


def _store(into, ref) -> None:
    into[...] = ref[...].astype(into.dtype)


def _fill_zeros(when, *refs) -> None:
    @pl.when(when)
    def _():
        for ref in refs:
            ref[...] = jnp.zeros_like(ref)


def _skew(x: jax.Array) -> jax.Array:
    """Moves row i of window scores [L,L+S] left by L-1-i, which gives key scores [L,S]."""
    length, width = x.shape
    rolled = pltpu.roll(x, width - (length - 1), 1, stride=1, stride_axis=0)
    return rolled[:, : width - length]


def _unskew(x: jax.Array) -> jax.Array:
    """Transposes :func:`_skew`: moves row i of [L,S] right by L-1-i, with zeros around it.

    Each part of L columns is rotated. The columns of a rotated part then belong to two neighbouring
    parts of the result.
    """
    length = len(x)
    column, row = (lax.broadcasted_iota(jnp.int32, (length, length), axis) for axis in (1, 0))
    shift = length - 1 - row
    rotate = lambda part: jnp.take_along_axis(part, (column - shift) % length, axis=1)
    zeros = jnp.zeros((length, length), x.dtype)
    parts = [zeros, *map(rotate, jnp.split(x, x.shape[1] // length, axis=1)), zeros]
    both = itertools.pairwise(parts)
    return jnp.concatenate([jnp.where(column < shift, *two) for two in both], axis=1)


def _widened(x: jax.Array, width: int) -> jax.Array:
    """Returns ``width`` columns, given an array whose columns are all equal."""
    return jnp.concatenate([x] * -(-width // x.shape[1]), axis=1)[:, :width]


def _equal_columns(row: jax.Array) -> jax.Array:
    """Transposes [1,S] to equal columns [S,128]; TPUs transpose only whole registers."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T
