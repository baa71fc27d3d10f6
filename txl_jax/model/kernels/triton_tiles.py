"""The Triton kernels of fused attention; triton.py calls them.

A tile has S queries and S keys. Tiles are numbered from the diagonal back: tile m of a group of S
queries starts m * S keys before the group's first query. So all groups share the blocks of
distances. Block D_m has the rows of r for the distances m*S + S-1 .. m*S, and tile m needs only D_m
and D_{m-1}. For S = 4, m = 1 (entries are distances; a row is a query, a column a key):

    q.D_1    q.D_0         mixed         rotated: the tile
    7 6 5 4  3 2 1 0       3 2 1 4       4 3 2 1
    7 6 5 4  3 2 1 0  ->   3 2 5 4  ->   5 4 3 2
    7 6 5 4  3 2 1 0       3 6 5 4       6 5 4 3
    7 6 5 4  3 2 1 0       7 6 5 4       7 6 5 4

The kernel takes each entry from one of the two products, and then rotates row i by i+1 places
(`tl.gather`, within the tile). The gradient rotates back, and adds each entry to the block, D_m or
D_{m-1}, that it came from. The diagonal tile comes first: there every query attends to itself, so
no softmax is ever empty. No tile is stored; each gradient kernel computes its tiles again.

Arguments: qu = q + u, qv = q + v [N*B,T,H]; k, val [N*B,K,H]; r [N,K,H]; filled [B]; episode [B,T]
and seed [2] (any array if unused); out, dout like q; lse and delta = sum(out * dout) float32
[N*B,T]; lse is a logarithm to base 2. Entries beyond T, K or H are 0. ``SIZE`` is S, a power of 2;
``WIDTH`` is H rounded up to a power of 2. ``THRESHOLD`` and ``SCALE``: see dropout.py; 0 and 1
without dropout.
"""

import triton
import triton.language as tl

from txl_jax.model import dropout

HEAD_STRIDE = tl.constexpr(dropout.HEAD_STRIDE)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b):
    """Returns a @ b with float32 sums; float32 factors are rounded to TF32."""
    return tl.dot(a, b, input_precision="tf32")


@triton.jit
def load_rows(source, first, limit, SIZE: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr):
    """Loads rows first .. first+SIZE-1 of [limit,H] as [SIZE,WIDTH]; 0 outside of the array."""
    row = first + tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row >= 0) & (row < limit)
    if WIDTH != H:
        inside = inside & (column < H)
    return tl.load(source + row * H + column, mask=inside, other=0.0)


@triton.jit
def store_rows(target, x, first, limit, SIZE: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr):
    """Writes [SIZE,WIDTH] to rows first .. of [limit,H], without those outside of the array."""
    row = first + tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row >= 0) & (row < limit) & (column < H)
    tl.store(target + row * H + column, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def along(x, AXIS: tl.constexpr):
    """Returns a vector along an axis of the tile; it broadcasts along the other axis."""
    return x[:, None] if AXIS == 0 else x[None, :]


@triton.jit
def load_along(source, first, limit, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """Loads entries first .. first+SIZE-1 of [limit] along an axis; 0 outside of the array."""
    at = first + tl.arange(0, SIZE)
    return along(tl.load(source + at, mask=(at >= 0) & (at < limit), other=0), AXIS)


@triton.jit
def nothing(m, reach):
    """Returns a 0 unknown to the compiler; added to an index, it saves registers in loops."""
    return m & (reach >> 31)


@triton.jit
def skewed(far, near, zero, KEYS: tl.constexpr, SIZE: tl.constexpr):
    """Reorders scores by distance, D_m (far) and D_{m-1} (near), to scores by key (axis KEYS)."""
    row = along(tl.arange(0, SIZE), 1 - KEYS)
    place = along(tl.arange(0, SIZE), KEYS)
    mixed = tl.where(of_far(zero, KEYS, SIZE), far, near)
    return tl.gather(mixed, (place - row - 1 + zero) & (SIZE - 1), KEYS)


@triton.jit
def unskewed(x, zero, KEYS: tl.constexpr, SIZE: tl.constexpr):
    """Undoes the rotation: entries belong to D_m where `of_far` is true, else to D_{m-1}."""
    row = along(tl.arange(0, SIZE), 1 - KEYS)
    place = along(tl.arange(0, SIZE), KEYS)
    return tl.gather(x, (place + row + 1 + zero) & (SIZE - 1), KEYS)


@triton.jit
def of_far(zero, KEYS: tl.constexpr, SIZE: tl.constexpr):
    """Returns a mask of the entries of an unskewed tile that belong to D_m."""
    row = along(tl.arange(0, SIZE), 1 - KEYS)
    return along(tl.arange(0, SIZE), KEYS) >= SIZE - 1 - row + zero


@triton.jit
def episodes_of(episode, first, T, AXIS: tl.constexpr, SIZE: tl.constexpr, EPISODES: tl.constexpr):
    """Loads the episodes of S positions along an axis; 0 for positions of the memory."""
    return load_along(episode, first, T, AXIS, SIZE) if EPISODES else 0


@triton.jit
def seen(query, key, of_query, of_key, M, reach, empty, EPISODES: tl.constexpr):
    """Returns the attention mask (masks.AttentionMask); ``empty`` is the number of empty slots."""
    distance = M + query - key
    allowed = (distance >= 0) & (distance <= reach) & (key >= empty)
    return allowed & (of_query == of_key) if EPISODES else allowed


@triton.jit
def mix(x):
    """Computes dropout.mix."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropped(x, seed, head, b, query, key, THRESHOLD: tl.constexpr, SCALE: tl.constexpr):
    """Applies dropout of attention weights to a tile, with the bits of AttentionDropout.factors."""
    if THRESHOLD:
        row = (head * HEAD_STRIDE + b).to(tl.uint32)
        line = mix(mix(tl.load(seed) + row) ^ query.to(tl.uint32))
        bits = mix(mix(line ^ tl.load(seed + 1)) + key.to(tl.uint32) * 0x9E3779B9)
        x = tl.where(bits >= tl.full((), THRESHOLD, tl.uint32), x * SCALE, 0.0)
    return x


@triton.jit
def product_of_either(
    source, start, limit, columns, of_next,
    SIZE: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Multiplies rows from start - S where ``of_next``, else rows from start, by ``columns``."""
    here = dot(load_rows(source, start, limit, SIZE, H, WIDTH), columns)
    there = dot(load_rows(source, start - SIZE, limit, SIZE, H, WIDTH), columns)
    return tl.where(of_next, there, here)


@triton.jit
def forward(
    qu, qv, k, val, r, filled, episode, seed, B, T, M, reach, out, lse,
    H: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, EPISODES: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Computes ``out`` and ``lse`` of S queries of a row; grid: N * B * ceil(T/S)."""
    groups = tl.cdiv(T, SIZE)
    row = (tl.program_id(0) // groups).to(tl.int64)
    head = row // B
    b = row % B
    first = (groups - 1 - tl.program_id(0) % groups) * SIZE  # the groups with most keys start first
    K = M + T
    qu += row * T * H
    qv += row * T * H
    k += row * K * H
    val += row * K * H
    r += head * K * H
    episode += b * T
    empty = M - tl.load(filled + b)

    query = along(first + tl.arange(0, SIZE), 0)
    of_query = episodes_of(episode, first, T, 0, SIZE, EPISODES)
    tile_qu = load_rows(qu, first, T, SIZE, H, WIDTH)
    tile_qv = load_rows(qv, first, T, SIZE, H, WIDTH)
    near = tl.zeros((SIZE, SIZE), tl.float32)
    largest = tl.full((SIZE,), -1e30, tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    gathered = tl.zeros((SIZE, WIDTH), tl.float32)
    lowest = tl.maximum(tl.maximum(M + first - reach, empty), 0)
    for m in range(0, tl.cdiv(M + first + SIZE - lowest, SIZE)):
        start = M + first - m * SIZE
        tile_k = load_rows(k, start, K, SIZE, H, WIDTH)
        far = dot(tile_qv, tl.trans(load_rows(r, K - (m + 1) * SIZE, K, SIZE, H, WIDTH)))
        scores = dot(tile_qu, tl.trans(tile_k)) + skewed(far, near, nothing(m, reach), 1, SIZE)
        near = far

        key = along(start + tl.arange(0, SIZE), 1)
        of_key = episodes_of(episode, start - M, T, 1, SIZE, EPISODES)
        allowed = seen(query, key, of_query, of_key, M, reach, empty, EPISODES)
        scores = tl.where(allowed, scores * LOG2E, -1e30)
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(allowed, tl.exp2(scores - larger[:, None]), 0.0)
        before = tl.exp2(largest - larger)
        total = total * before + tl.sum(weights, 1)
        largest = larger
        weights = dropped(weights, seed, head, b, query, key, THRESHOLD, SCALE)
        tile_val = load_rows(val, start, K, SIZE, H, WIDTH)
        gathered = gathered * before[:, None] + dot(weights.to(tile_val.dtype), tile_val)

    store_rows(out + row * T * H, gathered / total[:, None], first, T, SIZE, H, WIDTH)
    at = first + tl.arange(0, SIZE)
    tl.store(lse + row * T + at, largest + tl.log2(total), mask=at < T)


@triton.jit
def gradient_of_queries(
    qu, qv, k, val, r, dout, lse, delta, filled, episode, seed, B, T, M, reach, dqu, dqv,
    H: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, EPISODES: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Computes ``dqu`` and ``dqv`` of S queries of a row; grid: N * B * ceil(T/S)."""
    groups = tl.cdiv(T, SIZE)
    row = (tl.program_id(0) // groups).to(tl.int64)
    head = row // B
    b = row % B
    first = (groups - 1 - tl.program_id(0) % groups) * SIZE
    K = M + T
    k += row * K * H
    val += row * K * H
    r += head * K * H
    episode += b * T
    empty = M - tl.load(filled + b)

    query = along(first + tl.arange(0, SIZE), 0)
    of_query = episodes_of(episode, first, T, 0, SIZE, EPISODES)
    tile_qu = load_rows(qu + row * T * H, first, T, SIZE, H, WIDTH)
    tile_qv = load_rows(qv + row * T * H, first, T, SIZE, H, WIDTH)
    tile_dout = load_rows(dout + row * T * H, first, T, SIZE, H, WIDTH)
    line_lse = load_along(lse + row * T, first, T, 0, SIZE)
    line_delta = load_along(delta + row * T, first, T, 0, SIZE)
    before = tl.zeros((SIZE, SIZE), tile_qu.dtype)
    sum_qu = tl.zeros((SIZE, WIDTH), tl.float32)
    sum_qv = tl.zeros((SIZE, WIDTH), tl.float32)
    lowest = tl.maximum(tl.maximum(M + first - reach, empty), 0)
    tiles = tl.cdiv(M + first + SIZE - lowest, SIZE)
    for m in range(0, tiles):
        start = M + first - m * SIZE
        tile_k = load_rows(k, start, K, SIZE, H, WIDTH)
        far = dot(tile_qv, tl.trans(load_rows(r, K - (m + 1) * SIZE, K, SIZE, H, WIDTH)))
        of_near = load_rows(r, K - m * SIZE, K, SIZE, H, WIDTH)
        near = dot(tile_qv, tl.trans(of_near))
        scores = dot(tile_qu, tl.trans(tile_k)) + skewed(far, near, nothing(m, reach), 1, SIZE)

        key = along(start + tl.arange(0, SIZE), 1)
        of_key = episodes_of(episode, start - M, T, 1, SIZE, EPISODES)
        allowed = seen(query, key, of_query, of_key, M, reach, empty, EPISODES)
        weights = tl.where(allowed, tl.exp2(scores * LOG2E - line_lse), 0.0)
        dweights = dot(tile_dout, tl.trans(load_rows(val, start, K, SIZE, H, WIDTH)))
        dweights = dropped(dweights, seed, head, b, query, key, THRESHOLD, SCALE)
        dscores = weights * (dweights - line_delta)
        sum_qu += dot(dscores.to(tile_k.dtype), tile_k)

        # D_{m-1} is complete now: it has far entries of the last tile and near ones of this tile.
        now = unskewed(dscores.to(tile_k.dtype), nothing(m, reach), 1, SIZE)
        sum_qv += dot(tl.where(of_far(nothing(m, reach), 1, SIZE), before, now), of_near)
        before = now
    of_last = load_rows(r, K - tiles * SIZE, K, SIZE, H, WIDTH)
    sum_qv += dot(tl.where(of_far(0, 1, SIZE), before, tl.zeros_like(before)), of_last)

    store_rows(dqu + row * T * H, sum_qu, first, T, SIZE, H, WIDTH)
    store_rows(dqv + row * T * H, sum_qv, first, T, SIZE, H, WIDTH)


@triton.jit
def gradient_of_keys(
    qu, qv, k, val, r, dout, lse, delta, filled, episode, seed, B, T, M, reach, dk, dval,
    H: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, EPISODES: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Computes ``dk`` and ``dval`` of S keys of a row; grid: N * B * (ceil(M/S) + ceil(T/S)).

    Its tiles are [key,query].
    """
    old = tl.cdiv(M, SIZE)
    groups = old + tl.cdiv(T, SIZE)
    row = (tl.program_id(0) // groups).to(tl.int64)
    head = row // B
    b = row % B
    group = tl.program_id(0) % groups - old  # negative for keys of the memory
    start = M + group * SIZE
    K = M + T
    qu += row * T * H
    qv += row * T * H
    dout += row * T * H
    lse += row * T
    delta += row * T
    r += head * K * H
    episode += b * T
    empty = M - tl.load(filled + b)

    key = along(start + tl.arange(0, SIZE), 0)
    of_key = episodes_of(episode, start - M, T, 0, SIZE, EPISODES)
    tile_k = load_rows(k + row * K * H, start, K, SIZE, H, WIDTH)
    tile_val = load_rows(val + row * K * H, start, K, SIZE, H, WIDTH)
    sum_k = tl.zeros((SIZE, WIDTH), tl.float32)
    sum_val = tl.zeros((SIZE, WIDTH), tl.float32)
    beyond = tl.minimum(tl.cdiv(T, SIZE), group + 1 + tl.cdiv(reach, SIZE))
    if start + SIZE <= empty:
        beyond = 0
    for g in range(tl.maximum(group, 0), beyond):
        first = g * SIZE
        m = g - group
        tile_qu = load_rows(qu, first, T, SIZE, H, WIDTH)
        tile_qv = tl.trans(load_rows(qv, first, T, SIZE, H, WIDTH))
        far = dot(load_rows(r, K - (m + 1) * SIZE, K, SIZE, H, WIDTH), tile_qv)
        near = dot(load_rows(r, K - m * SIZE, K, SIZE, H, WIDTH), tile_qv)
        scores = dot(tile_k, tl.trans(tile_qu)) + skewed(far, near, nothing(m, reach), 0, SIZE)

        query = along(first + tl.arange(0, SIZE), 1)
        of_query = episodes_of(episode, first, T, 1, SIZE, EPISODES)
        line_lse = load_along(lse, first, T, 1, SIZE)
        line_delta = load_along(delta, first, T, 1, SIZE)
        allowed = seen(query, key, of_query, of_key, M, reach, empty, EPISODES)
        weights = tl.where(allowed, tl.exp2(scores * LOG2E - line_lse), 0.0)
        tile_dout = load_rows(dout, first, T, SIZE, H, WIDTH)
        dweights = dot(tile_val, tl.trans(tile_dout))
        dweights = dropped(dweights, seed, head, b, query, key, THRESHOLD, SCALE)
        dscores = weights * (dweights - line_delta)
        weights = dropped(weights, seed, head, b, query, key, THRESHOLD, SCALE)
        sum_val += dot(weights.to(tile_dout.dtype), tile_dout)
        sum_k += dot(dscores.to(tile_qu.dtype), tile_qu)

    store_rows(dk + row * K * H, sum_k, start, K, SIZE, H, WIDTH)
    store_rows(dval + row * K * H, sum_val, start, K, SIZE, H, WIDTH)


@triton.jit
def gradient_of_distances(
    qu, qv, k, val, r, dout, lse, delta, filled, episode, seed, B, T, M, reach, each, dr,
    H: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, EPISODES: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Computes ``dr`` [ceil(B/each),N,K,H], a part for every ``each`` rows of the batch.

    Grid: ceil(K/S), N, ceil(B/each). For each S queries, the kernel computes the S x S entries of
    the tiles m and m+1 that belong to D_m, in the order before the rotation.
    """
    m = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    K = M + T
    tile_r = load_rows(r + head * K * H, K - (m + 1) * SIZE, K, SIZE, H, WIDTH)
    sum_r = tl.zeros((SIZE, WIDTH), tl.float32)
    line = along(tl.arange(0, SIZE), 1)
    place = along(tl.arange(0, SIZE), 0)
    of_next = place > line  # by key: from tile m+1, else from tile m

    # Starts at the first query with a key at the distance m*S, if that is within the window.
    group0 = tl.maximum(m * SIZE - M, 0) // SIZE
    groups = tl.cdiv(T, SIZE) - group0
    rows = tl.minimum(B - part * each, each)
    if m * SIZE > reach:
        rows = 0
    for x in range(0, rows * groups):
        b = part * each + x // groups
        row = head * B + b
        first = (group0 + x % groups) * SIZE
        start = M + first - m * SIZE
        own = row * T * H
        tile_qu = tl.trans(load_rows(qu + own, first, T, SIZE, H, WIDTH))
        tile_qv = load_rows(qv + own, first, T, SIZE, H, WIDTH)
        tile_dout = tl.trans(load_rows(dout + own, first, T, SIZE, H, WIDTH))

        scores = product_of_either(k + row * K * H, start, K, tile_qu, of_next, SIZE, H, WIDTH)
        far = dot(tile_r, tl.trans(tile_qv))
        scores += skewed(far, far, nothing(x, reach), 0, SIZE)
        own_val = val + row * K * H
        dweights = product_of_either(own_val, start, K, tile_dout, of_next, SIZE, H, WIDTH)

        query = first + line
        key = start + place - tl.where(of_next, SIZE, 0)
        ids = episode + b * T
        of_query = episodes_of(ids, first, T, 1, SIZE, EPISODES)
        here = episodes_of(ids, start - M, T, 0, SIZE, EPISODES)
        there = episodes_of(ids, start - M - SIZE, T, 0, SIZE, EPISODES)
        of_key = tl.where(of_next, there, here) if EPISODES else 0
        empty = M - tl.load(filled + b)
        allowed = seen(query, key, of_query, of_key, M, reach, empty, EPISODES)
        line_lse = load_along(lse + row * T, first, T, 1, SIZE)
        line_delta = load_along(delta + row * T, first, T, 1, SIZE)
        weights = tl.where(allowed, tl.exp2(scores * LOG2E - line_lse), 0.0)
        dweights = dropped(dweights, seed, head, b, query, key, THRESHOLD, SCALE)
        dscores = weights * (dweights - line_delta)
        sum_r += dot(unskewed(dscores.to(tile_qv.dtype), nothing(x, reach), 0, SIZE), tile_qv)

    dr += (part * tl.num_programs(1) + head) * K * H
    store_rows(dr, sum_r, K - (m + 1) * SIZE, K, SIZE, H, WIDTH)
