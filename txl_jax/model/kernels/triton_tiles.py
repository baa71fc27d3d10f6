"""The Triton kernels of fused attention, whose relative shift costs no arithmetic.

The relative shift moves the scores of query i by i places. In a tile of neighbouring queries, some
rows would move by an odd number of places, and their vectors would not be aligned. So a tile holds
every second, fourth or eighth query (``EVERY``). Row x of the tile moves by EVERY * x places, which
keeps every vector of EVERY numbers aligned. Plain loads and stores then do the shift.

This example has EVERY = 2, T = 4 and M = 2, and shows the tile of the queries 0 and 2. Entries are
distances, and each column of the product belongs to one row of r:

    product with r                   stored at key  0 1 2 3 4 5
    query 0 (x = 0): 5 4 3 2 1 0                    2 1 0
    query 2 (x = 1): 5 4 3 2 1 0                    4 3 2 1 0

There are five kernels. They exchange two arrays [B*N,T,KP] in device memory: ``scores``, and its
gradient ``dscores``.

    kernel                 computes                                       queries of a tile
    position_scores        scores = (q+v).r, stored by key                every EVERY-th
    forward                softmax((q+u).k + scores) val                  neighbours
    gradient_of_keys       dk, dval and dscores                           neighbours
    gradient_of_queries    dq, du, dv from dscores by key and distance    every EVERY-th
    gradient_of_distances  dr from dscores by distance                    every EVERY-th

A tile computes the attention mask only if the mask hides a part of the tile. No loop reads an array
that it also writes, so Triton can load the next tiles in advance.

The arguments of the kernels:

    q, dout, out    [B,T,N,H]
    k_mem, val_mem  the first M keys and values, [B,M,N,H]
    k, val          the remaining keys and values, [B,K-M,N,H]; no tile has keys of both arrays
    r               [R,N,H]; row c is for the distance K-1-c
    u, v            [N,H]
    lse             base-2 logarithm of each softmax's denominator, float32 [B*N,T]
    delta           sum(out * dout), float32 [B*N,T]
    oldest, newest  first and last key of each query, int32 [B,T]; neither decreases along T
    RING, slot      if RING, k_mem and val_mem are [N,B,M,H], and slot (int32 [1]) has the oldest
    seed            the seed of dropout, uint32 [2]
    far             the first row of r that a query needs
    STRIDE, H, KP   N*H; the width of a head, a power of 2; K padded to a multiple of the tiles
    DROPPED         the threshold of dropout.py, or 0 without dropout
"""

import triton
import triton.language as tl
from triton.language import constexpr

from txl_jax.model import dropout

HEAD_STRIDE = constexpr(dropout.HEAD_STRIDE)
FIRST, SECOND, GOLDEN = (constexpr(x) for x in (*dropout.FACTORS, dropout.GOLDEN))
EVEN, ODD, EVEN_8, ODD_8 = (constexpr(x) for x in dropout.OF_FOUR)
LOG2E, UNSEEN = constexpr(1.4426950408889634), constexpr(-1e30)


@triton.jit
def rows_of(source, row, limit, STRIDE, H: constexpr):
    """Loads rows of an array [limit,STRIDE]: [rows,H]; an index >= limit loads the last row."""
    row = tl.minimum(row, limit - 1)
    return tl.load(source + (row.to(tl.int64) * STRIDE)[:, None] + tl.arange(0, H)[None, :])


@triton.jit
def put_rows(target, x, row, limit, STRIDE: constexpr, H: constexpr):
    """Writes x [rows,H] to the given rows of [limit,STRIDE]; skips rows outside of the array."""
    inside = (row >= 0) & (row < limit)
    at = (row.to(tl.int64) * STRIDE)[:, None] + tl.arange(0, H)[None, :]
    tl.store(target + at, x.to(target.dtype.element_ty), mask=inside[:, None])


@triton.jit
def keys_of(memory, own, first, key, turn, M, K, STRIDE: constexpr, H: constexpr, RING: constexpr):
    """Loads a tile of keys or values, [keys,H]: all from memory, or all from the segment."""
    row, step = key, STRIDE
    if RING:
        slot = tl.where(key + turn < M, key + turn, key + turn - M)
        row, step = tl.where(first < M, slot, key), tl.where(first < M, H, STRIDE)
    return rows_of(tl.where(first < M, memory, own), row, K, step, H)


@triton.jit
def queries_of(q, bias, query, T, STRIDE: constexpr, H: constexpr):
    """Loads queries, and adds the bias [1,H]."""
    tile = rows_of(q, query, T, STRIDE, H)
    return (tile + bias).to(tile.dtype)


@triton.jit
def class_of(N, T, SX: constexpr, EVERY: constexpr):
    """Returns which queries a program computes: (row, b, head, number, p, x).

    The row is b * N + head, and ``number`` counts the programs of a row from 0. The program's SX
    queries are x * EVERY + p, where x is an array and p (the class) is one number. The first
    programs of a row have the last queries, which see most keys.
    """
    tiles = tl.cdiv(tl.cdiv(T, EVERY), SX)
    row, number = tl.program_id(0) // (tiles * EVERY), tl.program_id(0) % (tiles * EVERY)
    x = (tiles - 1 - number // EVERY) * SX + tl.arange(0, SX)
    return row, (row // N).to(tl.int64), row % N, number, number % EVERY, x


@triton.jit
def mix(x):
    """Computes dropout.mix."""
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


@triton.jit
def line_of(seed, head, b, query):
    """Hashes each query, as AttentionDropout.factors does."""
    row = (head * HEAD_STRIDE + b).to(tl.uint32)
    return mix(mix(tl.load(seed) + row) ^ query.to(tl.uint32)) ^ tl.load(seed + 1)


@triton.jit
def kept(line, start, SK: constexpr, DROPPED: constexpr):
    """Returns which weights dropout keeps: bool [queries,SK], for the SK keys from ``start`` on.

    The four keys of a GPU thread share a hash, as in AttentionDropout.factors.
    """
    column = tl.arange(0, SK)  # from the range SK .. 2*SK below, LLVM sees which keys share a hash
    shared = (tl.arange(SK, 2 * SK) & ((SK - 1) & -10)).to(tl.uint32) * GOLDEN
    x = (line + tl.full((), start, tl.uint32) * GOLDEN)[:, None] + shared[None, :]
    x = (x ^ (x >> 16)) * FIRST
    x = x ^ (x >> 15)
    even = tl.where((column & 8) == 0, EVEN, EVEN_8).to(tl.uint32)
    odd = tl.where((column & 8) == 0, ODD, ODD_8).to(tl.uint32)
    own = tl.where((column & 1) == 0, even, odd)
    return x * own[None, :] >= tl.full((), DROPPED, tl.uint32)


@triton.jit
def position_scores(
    q, v, r, oldest, newest, N, T, R, scores,
    STRIDE: constexpr, H: constexpr, KP: constexpr, PRECISION: constexpr, SX: constexpr,
    SD: constexpr, EVERY: constexpr,
):  # fmt: skip
    """Writes (q+v).r for the keys that each query sees; grid: B * N * EVERY * ceil(T/EVERY/SX)."""
    row, b, head, _, p, x = class_of(N, T, SX, EVERY)
    query = x * EVERY + p
    exists = query < T
    bias = tl.load(v + head * H + tl.arange(0, H))[None, :]
    tile_q = queries_of(q + b * T * STRIDE + head * H, bias, query, T, STRIDE, H)
    # The score of query x with key (x + y) * EVERY + d needs row T-1-p + y * EVERY + d of r.
    low = tl.load(oldest + b * T + query, mask=exists, other=1 << 30) // EVERY - x
    high = tl.load(newest + b * T + query, mask=exists, other=0) // EVERY - x
    scores += ((row.to(tl.int64) * T + query) * KP)[:, None]
    place = tl.arange(0, SD)
    for y in range(tl.min(low), tl.max(high) + 1, SD // EVERY):
        tile_r = rows_of(r + head * H, tl.maximum(T - 1 - p + y * EVERY + place, 0), R, STRIDE, H)
        band = tl.dot(tile_q, tl.trans(tile_r), input_precision=PRECISION)
        key = (x + y)[:, None] * EVERY + place[None, :]
        inside = (key >= 0) & (key < KP) & exists[:, None]
        tl.store(scores + key, band.to(scores.dtype.element_ty), mask=inside)


@triton.jit
def forward(
    q, u, k_mem, k, val_mem, val, scores, oldest, newest, slot, seed, B, N, T, K, M, out, lse,
    STRIDE: constexpr, H: constexpr, KP: constexpr, PRECISION: constexpr, SQ: constexpr,
    SK: constexpr, RING: constexpr, STAGES: constexpr, DROPPED: constexpr,
):  # fmt: skip
    """Computes ``out`` and ``lse`` for SQ queries of a row; grid: B * N * ceil(T/SQ).

    The loop over tiles of keys has three parts. In the second part, all queries see all keys, so
    no mask is needed. In the first and the third part, only some queries see some of the keys.
    """
    groups = tl.cdiv(T, SQ)
    row = tl.program_id(0) // groups
    b, head = (row // N).to(tl.int64), row % N
    first = (groups - 1 - tl.program_id(0) % groups) * SQ
    last = tl.minimum(first + SQ, T) - 1
    query = tl.minimum(first + tl.arange(0, SQ), T - 1)
    old, own = b * M * STRIDE + head * H, (b * (K - M) - M) * STRIDE + head * H
    turn = 0
    if RING:
        old, turn = (head * B + b) * M * H, tl.load(slot)
    k_mem, val_mem, k, val = k_mem + old, val_mem + old, k + own, val + own
    scores += ((row.to(tl.int64) * T + query) * KP)[:, None]
    oldest, newest = oldest + b * T, newest + b * T
    line = line_of(seed, head, b, query) if DROPPED else query
    bias = tl.load(u + head * H + tl.arange(0, H))[None, :]
    tile_q = queries_of(q + b * T * STRIDE + head * H, bias, query, T, STRIDE, H)
    low, high = tl.load(oldest + query)[:, None], tl.load(newest + query)[:, None]
    largest, total = tl.full((SQ,), UNSEEN, tl.float32), tl.zeros((SQ,), tl.float32)
    gathered = tl.zeros((SQ, H), tl.float32)
    begin, end = tl.load(oldest + first) // SK, tl.load(newest + last) // SK + 1
    whole = tl.minimum(tl.cdiv(tl.load(oldest + last), SK), end)
    edge = tl.maximum((tl.load(newest + first) + 1) // SK, whole)
    bounds = (begin, whole, edge, end)
    for part in tl.static_range(3):
        for t in tl.range(bounds[part], bounds[part + 1], num_stages=STAGES):
            key = t * SK + tl.arange(0, SK)
            by_position = tl.load(scores + key[None, :]).to(tl.float32)
            tile_k = keys_of(k_mem, k, t * SK, key, turn, M, K, STRIDE, H, RING)
            s = tl.dot(tile_q, tl.trans(tile_k), by_position, input_precision=PRECISION)
            if part != 1:
                s = tl.where((key[None, :] >= low) & (key[None, :] <= high), s, UNSEEN)
            larger = tl.maximum(largest, tl.max(s, 1) * LOG2E)
            weights = tl.exp2(s * LOG2E - larger[:, None])
            before = tl.exp2(largest - larger)
            largest = larger
            total = total * before + tl.sum(weights, 1)
            if DROPPED:
                weights = tl.where(kept(line, t * SK, SK, DROPPED), weights, 0.0)
            tile_val = keys_of(val_mem, val, t * SK, key, turn, M, K, STRIDE, H, RING)
            gathered, weights = gathered * before[:, None], weights.to(tile_val.dtype)
            gathered = tl.dot(weights, tile_val, gathered, input_precision=PRECISION)
    keeps: constexpr = 1 - DROPPED / 4294967296
    gathered = gathered / (total * keeps)[:, None]
    put_rows(out + b * T * STRIDE + head * H, gathered, query, T, STRIDE, H)
    tl.store(lse + row.to(tl.int64) * T + query, largest + tl.log2(total))


@triton.jit
def gradient_of_keys(
    q, u, k_mem, k, val_mem, val, scores, dout, lse, delta, oldest, newest, spans, seed, N, T, K, M,
    dk_mem, dk, dval_mem, dval, dscores,
    STRIDE: constexpr, H: constexpr, KP: constexpr, PRECISION: constexpr,
    SQ: constexpr, SK: constexpr, STAGES: constexpr, DROPPED: constexpr,
):  # fmt: skip
    """Computes dk, dval and dscores for SK keys of a row; grid: B * N * ceil(K/SK).

    The loop over groups of SQ queries has three parts, whose bounds are ``spans``, int32
    [B,ceil(K/SK),4]. In the second part, all queries see all SK keys, so no mask is needed. In the
    first and the third part, only some queries see some of the keys.
    """
    blocks = tl.cdiv(K, SK)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, head = (row // N).to(tl.int64), row % N
    q, dout = q + b * T * STRIDE + head * H, dout + b * T * STRIDE + head * H
    lse, delta = lse + row.to(tl.int64) * T, delta + row.to(tl.int64) * T
    scores, dscores = scores + row.to(tl.int64) * T * KP, dscores + row.to(tl.int64) * T * KP
    oldest, newest = oldest + b * T, newest + b * T
    spans += (b * blocks + block) * 4
    keeps: constexpr = 1 - DROPPED / 4294967296
    key = block * SK + tl.arange(0, SK)
    bias = tl.load(u + head * H + tl.arange(0, H))[None, :]
    old = block * SK < M
    of_keys = tl.where(old, b * M, b * (K - M) - M) * STRIDE + head * H
    tile_k = rows_of(tl.where(old, k_mem, k) + of_keys, key, K, STRIDE, H)
    tile_val = rows_of(tl.where(old, val_mem, val) + of_keys, key, K, STRIDE, H)
    sum_k, sum_val = tl.zeros((SK, H), tl.float32), tl.zeros((SK, H), tl.float32)
    for part in tl.static_range(3):
        begin, end = tl.load(spans + part), tl.load(spans + part + 1)
        for g in tl.range(begin, end, num_stages=STAGES):
            exists = g * SQ + tl.arange(0, SQ) < T
            query = tl.minimum(g * SQ + tl.arange(0, SQ), T - 1)
            at = (query.to(tl.int64) * KP)[:, None] + key[None, :]
            by_position = tl.load(scores + at).to(tl.float32)
            tile_q = queries_of(q, bias, query, T, STRIDE, H)
            s = tl.dot(tile_q, tl.trans(tile_k), by_position, input_precision=PRECISION)
            if part != 1:
                low, high = tl.load(oldest + query)[:, None], tl.load(newest + query)[:, None]
                s = tl.where((key[None, :] >= low) & (key[None, :] <= high), s, UNSEEN)
            line_lse = tl.load(lse + query, mask=exists, other=1e30)  # queries >= T: weight 0
            weights = tl.exp2(s * LOG2E - line_lse[:, None])
            tile_dout = rows_of(dout, query, T, STRIDE, H)
            dweights = tl.dot(tile_dout, tl.trans(tile_val), input_precision=PRECISION)
            dropped = weights
            if DROPPED:
                keep = kept(line_of(seed, head, b, query), block * SK, SK, DROPPED)
                dropped = tl.where(keep, weights, 0.0)
                dweights = tl.where(keep, dweights, 0.0)
            ds = weights * (dweights * (1 / keeps) - tl.load(delta + query)[:, None])
            ds = ds.to(tile_k.dtype)
            dropped = tl.trans(dropped.to(tile_k.dtype))
            sum_val = tl.dot(dropped, tile_dout, sum_val, input_precision=PRECISION)
            sum_k = tl.dot(tl.trans(ds), tile_q, sum_k, input_precision=PRECISION)
            tl.store(dscores + at, ds, mask=exists[:, None])
    put_rows(tl.where(old, dk_mem, dk) + of_keys, sum_k, key, K, STRIDE, H)
    put_rows(tl.where(old, dval_mem, dval) + of_keys, sum_val * (1 / keeps), key, K, STRIDE, H)


@triton.jit
def written(oldest, newest, query, T, KP: constexpr, SQ: constexpr, SK: constexpr):
    """Returns the range of keys for which gradient_of_keys writes each query's dscores.

    The range begins with the first result and ends before the second. Both are [queries,1] and
    multiples of SK, so the numbers of one vector load are all inside or all outside. The range of a
    query >= T is empty.
    """
    exists = query < T
    first = query // SQ * SQ
    last = tl.minimum(first + SQ, T) - 1
    low = tl.load(oldest + first, mask=exists, other=KP) // SK * SK
    limit = (tl.load(newest + last, mask=exists, other=-SK) // SK + 1) * SK
    return low[:, None], limit[:, None]


@triton.jit
def gradient_of_queries(
    k_mem, k, r, dscores, oldest, newest, B, N, T, K, M, R, dq, sums,
    STRIDE: constexpr, H: constexpr, KP: constexpr, PRECISION: constexpr, SX: constexpr,
    SD: constexpr, EVERY: constexpr, SQ: constexpr, SK: constexpr,
):  # fmt: skip
    """Computes ``dq``, and partial ``sums`` for du and dv; the grid is that of position_scores.

    ``sums`` [2,B*EVERY*tiles,N,H] has the contribution of each program's queries to du and dv. One
    loop multiplies dscores both with k and with r, so the L2 cache serves the second load.
    """
    row, b, head, number, p, x = class_of(N, T, SX, EVERY)
    query = x * EVERY + p
    low, limit = written(oldest + b * T, newest + b * T, query, T, KP, SQ, SK)
    k_mem, k = k_mem + b * M * STRIDE + head * H, k + (b * (K - M) - M) * STRIDE + head * H
    dscores += ((row.to(tl.int64) * T + query) * KP)[:, None]
    place = tl.arange(0, SD)
    sum_u, sum_v = tl.zeros((SX, H), tl.float32), tl.zeros((SX, H), tl.float32)
    begin = tl.min(low) // SD
    y0 = tl.min(low // EVERY - x[:, None])
    more = tl.max(limit // EVERY - x[:, None]) - y0
    for n in range(0, tl.maximum(tl.cdiv(tl.max(limit), SD) - begin, tl.cdiv(more * EVERY, SD))):
        y = y0 + n * (SD // EVERY)
        key = (x + y)[:, None] * EVERY + place[None, :]
        ds = tl.load(dscores + key, mask=(key >= low) & (key < limit), other=0.0)
        tile_r = rows_of(r + head * H, tl.maximum(T - 1 - p + y * EVERY + place, 0), R, STRIDE, H)
        sum_v = tl.dot(ds, tile_r, sum_v, input_precision=PRECISION)
        key = (begin + n) * SD + place
        inside = (key[None, :] >= low) & (key[None, :] < limit)
        ds = tl.load(dscores + key[None, :], mask=inside, other=0.0)
        tile_k = rows_of(tl.where((begin + n) * SD < M, k_mem, k), key, K, STRIDE, H)
        sum_u = tl.dot(ds, tile_k, sum_u, input_precision=PRECISION)
    put_rows(dq + b * T * STRIDE + head * H, sum_u + sum_v, query, T, STRIDE, H)
    parts = tl.num_programs(0) // N
    sums += (b * parts // B + number) * STRIDE + head * H + tl.arange(0, H)
    tl.store(sums, tl.sum(sum_u, 0))
    tl.store(sums + parts.to(tl.int64) * STRIDE, tl.sum(sum_v, 0))


@triton.jit
def gradient_of_distances(
    q, v, dscores, oldest, newest, B, T, K, R, far, dr,
    STRIDE: constexpr, H: constexpr, KP: constexpr, PRECISION: constexpr, SX: constexpr,
    SD: constexpr, EVERY: constexpr, SQ: constexpr, SK: constexpr,
):  # fmt: skip
    """Computes dr of each class p of queries: [EVERY,R,N,H]; grid: ceil((R+EVERY)/SD), N, EVERY."""
    head, p = tl.program_id(1), tl.program_id(2)
    last = T - 1 - p
    y = tl.program_id(0) * (SD // EVERY) - tl.cdiv(last, EVERY)
    place = tl.arange(0, SD)
    bias = tl.load(v + head * H + tl.arange(0, H))[None, :]
    begin = tl.maximum(-y - SD // EVERY + 1, 0) // SX  # the first x with a key at these distances
    end = tl.minimum(tl.cdiv(tl.cdiv(K, EVERY) - y, SX), tl.cdiv(tl.cdiv(T, EVERY), SX))
    each = tl.where(last + y * EVERY + SD <= far, 0, tl.maximum(end - begin, 0))
    sum_r = tl.zeros((SD, H), tl.float32)
    for n in range(0, B * each):
        b = (n // each).to(tl.int64)
        x = (begin + n % each) * SX + tl.arange(0, SX)
        query = x * EVERY + p
        key = (x + y)[:, None] * EVERY + place[None, :]
        low, limit = written(oldest + b * T, newest + b * T, query, T, KP, SQ, SK)
        line = ((b * tl.num_programs(1) + head) * T + query) * KP
        ds = tl.load(dscores + line[:, None] + key, mask=(key >= low) & (key < limit), other=0.0)
        tile_q = queries_of(q + b * T * STRIDE + head * H, bias, query, T, STRIDE, H)
        sum_r = tl.dot(tl.trans(ds), tile_q, sum_r, input_precision=PRECISION)
    dr += p.to(tl.int64) * R * STRIDE + head * H
    put_rows(dr, sum_r, last + y * EVERY + place, R, STRIDE, H)
