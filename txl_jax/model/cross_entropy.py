"""Cross entropy over many words, without all logits in memory at once.

Rows are processed in blocks, and the gradient computes the logits of each block again. A block has
at most ``MAX_LOGITS`` logits, or ``MIN_ROWS`` rows if these have more logits. All blocks but the
first have the same size, and the first block has the remaining rows. If their number is known only
when the program runs, the first block computes a quarter, a half, three quarters or all of a
block's rows. On a CPU, a block is computed in tiles of words, so that the logits of a tile stay in
the processor's caches:

    logits [rows, tile] -> softmax -> gradient of the rows      [rows, d], summed over the tiles
                                   -> gradient of the weights   [tile, d], summed over the blocks
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from txl_jax.model.derivatives import opaque, with_derivatives

T = TypeVar("T")

MAX_LOGITS = 2**22  # 16 MiB in float32
MIN_ROWS = 128  # in smaller blocks, reading the weights costs more than the matrix products
TILE_WORDS = {"cpu": 4096}
"""The number of words in a tile on each platform; on other platforms, a tile has all words."""
TIMES_LOGITS = {"gpu": 8}
"""On a GPU, a block has up to 8 times ``MAX_LOGITS``: small matrix products leave a GPU idle."""
MULTIPLE = {"gpu": 8}
"""The number of words and the width of the inputs are padded to multiples of this number.

cuBLAS is fast only if each row of a matrix has a multiple of 16 bytes. In wt103_large, parts of the
vocabulary have 20,003 and 67,735 words. In bfloat16 on an H100, the slow kernels for such rows took
a sixth of an update. With padding to multiples of 8, products took 15 of the 51 ms of an update;
without padding, they took 27 of 68 ms.
"""

_UNIQUE: dict[str, Any] = {"unique_indices": True}
"""Tells XLA that each row is added to only once, so that a GPU needs no atomic additions."""

full_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
searchsorted = functools.partial(jnp.searchsorted, method="compare_all")
"""Finds places in a sorted array by comparing with all entries.

JAX's default method is a loop, which is dozens of kernels on a GPU.
"""


def cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    targets: jax.Array,
    members: tuple[jax.Array, jax.Array] | None = None,
    platform: str = "",
) -> jax.Array:
    """Returns -log softmax(weight x + bias)[target] in nats, float32 [S].

    Args:
      x: inputs [S,d] in the compute dtype.
      weight, bias: [V,d] and [V], which become float32.
      targets: int32 [S], from 0 to V-1.
      members: a pair that selects the rows to score: a permutation of all rows, int32 [S], which
        starts with the selected rows, and their number, int32 []. The other rows have loss 0 and
        cost nothing. ``None`` scores all rows.
      platform: the platform for which the sizes of blocks and tiles are chosen, such as ``cpu``;
        an empty name if the words are sharded over devices.

    With more than one block, or with ``members``, reverse mode can be applied at most once.
    """
    weight, bias = weight.astype(jnp.float32), bias.astype(jnp.float32)
    multiple = MULTIPLE.get(platform, 1)
    more, wider = (-n % multiple for n in weight.shape)
    if more or wider:
        weight = jnp.pad(weight, ((0, more), (0, wider)))
        bias = jnp.pad(bias, (0, more), constant_values=-jnp.inf)
        x = jnp.pad(x, ((0, 0), (0, wider)))
    targets = jnp.asarray(targets)  # a traced index cannot index a NumPy array
    n, v = x.shape[0], weight.shape[0]
    block = min(n, max(MIN_ROWS, MAX_LOGITS * TIMES_LOGITS.get(platform, 1) // v))
    if members is None and block == n:
        z = _logits(x, weight.astype(x.dtype), bias)
        chosen = z.at[jnp.arange(n), targets].get(mode="fill", **_UNIQUE)
        return jax.nn.logsumexp(z, axis=-1) - chosen
    sizes = block, min(v, TILE_WORDS.get(platform, v)), members is None
    rows, count = members or (jnp.arange(n, dtype=jnp.int32), jnp.int32(n))
    return _blocks(sizes, (x, weight, bias), (targets, rows, count))


def _forward(sizes, inputs, constants):
    (x, weight, bias), (targets, rows, count) = inputs, constants
    words, low = sizes[1], weight.astype(x.dtype)

    def add(at, real, totals, first):
        def scan_tile(start, size, sums):
            largest, total, chosen = sums
            z = _logits(x[at], *_slice((low, bias), start, size))
            higher = jnp.maximum(largest, z.max(axis=-1))
            exponentials = jnp.exp(z - higher[:, None]).sum(axis=-1)
            total = total * jnp.exp(largest - higher) + exponentials
            own = _is_target(targets[at], start, size)
            return higher, total, chosen + jnp.where(own, z, 0.0).sum(axis=-1)

        zeros = _zeros(x, *at.shape)
        sums = _over_tiles(scan_tile, (zeros - jnp.inf, zeros, zeros), weight.shape[0], words)
        log_sum = sums[0] + jnp.log(sums[1])
        nll, normaliser = totals
        # A row of padding has the index of a row outside the block, and adds 0 to it.
        nll = nll.at[at].add(jnp.where(real, log_sum - sums[2], 0.0), **_UNIQUE)
        return nll, normaliser.at[at].add(jnp.where(real, log_sum, 0.0), **_UNIQUE)

    zeros = _zeros(x, x.shape[0])
    nll, normaliser = _over_blocks(add, (zeros, zeros), sizes, rows, count)
    return nll, (inputs, constants, normaliser)


def _tangent(sizes, saved, tangents):
    """Returns the change of the loss, sum_v (p_v - [v is the target]) (change of logit v)."""
    (x, weight, bias), (targets, rows, count), normaliser = saved
    words, of_words = sizes[1], (weight.astype(x.dtype), bias)
    dx, dweight, dbias = tangents
    new_of_words = dweight.astype(x.dtype), dbias

    def add(at, real, total, first):
        log_sum = jnp.where(real, normaliser[at], jnp.inf)[:, None]

        def add_tile(start, size, sums):
            weight_tile, bias_tile = _slice(of_words, start, size)
            new_weight_tile, new_bias_tile = _slice(new_of_words, start, size)
            p = jnp.exp(_logits(x[at], weight_tile, bias_tile) - log_sum)
            change = _logits(dx[at], weight_tile, new_bias_tile)
            change = change + full_einsum("sd,vd->sv", x[at], new_weight_tile)
            return sums + ((p - _is_target(targets[at], start, size)) * change).sum(axis=1)

        change = _over_tiles(add_tile, _zeros(x, *at.shape), weight.shape[0], words)
        return total.at[at].add(jnp.where(real, change, 0.0), **_UNIQUE)

    return _over_blocks(add, _zeros(x, x.shape[0]), sizes, rows, count)


def _backward(sizes, saved, gradient):
    (x, weight, bias), (targets, rows, count), normaliser = saved
    words, low = sizes[1], weight.astype(x.dtype)

    def add(at, real, totals, first):
        scale = jnp.where(real, gradient[at], 0.0)[:, None]
        log_sum = jnp.where(real, normaliser[at], jnp.inf)[:, None]

        def add_tile(start, size, sums):
            dx, *of_words = sums
            weight_tile, bias_tile = _slice((low, bias), start, size)
            p = jnp.exp(_logits(x[at], weight_tile, bias_tile) - log_sum)
            dz = (p - _is_target(targets[at], start, size)) * scale
            dbias, dz = dz.sum(axis=0), dz.astype(x.dtype)
            new = [full_einsum("sv,sd->vd", dz, x[at]), dbias]
            if not first:
                new = jax.tree.map(jnp.add, new, _slice(of_words, start, size))
            put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0)
            dx = dx + full_einsum("sv,vd->sd", dz, weight_tile)
            return dx, *map(put, of_words, new)

        zeros = _zeros(x, len(at), x.shape[1])
        dx, *of_words = _over_tiles(add_tile, (zeros, *totals[1:]), weight.shape[0], words)
        return totals[0].at[at].add(dx, **_UNIQUE), *of_words

    zeros = _zeros(x, *x.shape), jnp.zeros_like(weight), jnp.zeros_like(bias)
    dx, dweight, dbias = _over_blocks(add, zeros, sizes, rows, count)
    return dx.astype(x.dtype), dweight, dbias


_blocks = with_derivatives(opaque(_forward), _tangent, _backward)


def _over_blocks(add: Callable[..., T], totals: T, sizes, rows: jax.Array, count) -> T:
    """Applies ``add(row indices, which rows are real, totals, is first)`` to the blocks of rows."""
    block, _, is_all = sizes
    if is_all:
        n = len(rows)
        block = -(-n // -(-n // block))  # blocks of nearly equal sizes
        left, count = (n - 1) % block + 1, n
        totals = add(rows[:left], True, totals, True)
    else:
        left = jnp.where(count > 0, (count - 1) % block + 1, 0)
        parts = sorted({-(-block * quarters // 4) for quarters in range(1, 5)})

        def add_first(part):
            return lambda totals: add(rows[:part], jnp.arange(part) < left, totals, True)

        branches = [lambda totals: totals, *map(add_first, parts)]
        chosen = searchsorted(jnp.array([0, *parts]), left)
        totals = jax.lax.switch(chosen, branches, totals)
    if block >= len(rows):
        return totals

    def add_block(k, totals):
        at = jax.lax.dynamic_slice_in_dim(rows, left + k * block, block)
        return add(at, True, totals, False)

    return jax.lax.fori_loop(0, (count - left) // block, add_block, totals)


def _over_tiles(body: Callable[..., T], sums: T, v: int, words: int) -> T:
    """Applies ``body(first word, number of words, sums)`` to tiles of ``words`` words."""
    if words == v:
        return body(0, v, sums)
    sums = jax.lax.fori_loop(0, v // words, lambda k, sums: body(k * words, words, sums), sums)
    return body(v - v % words, v % words, sums) if v % words else sums


def _zeros(x: jax.Array, *shape: int) -> jax.Array:
    """Returns float32 zeros that vary over devices as ``x`` does."""
    return jnp.zeros_like(x, jnp.float32, shape)


def _slice(arrays, start, size):
    return [jax.lax.dynamic_slice_in_dim(array, start, size) for array in arrays]


def _is_target(targets, start, size):
    """Returns which words of a tile are the target of each row, bool [rows,size]."""
    return start + jnp.arange(size) == targets[:, None]


def _logits(x, weight, bias):
    return full_einsum("sd,vd->sv", x, weight) + bias
