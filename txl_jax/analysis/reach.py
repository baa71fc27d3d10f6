"""How far back a token can change a prediction: by the model's shapes, and as measured.

Each layer attends to states of the layer below, which attends as far back again, so the reach is
O(L x M), layers times memory (paper, section 3.2). Without a window a query attends to M positions
before its *segment*. For L = 2 and M = T = 3 the reach of the last target is T + L*M = 9:

    segment       0 0 0 | 1 1 1 | 2 2 2 | target
    layer 2                 x x x   x x x           the query attends to memory and segment,
    layer 1         x x x   x x x                   and the oldest of these attends as far again
    distance      9 8 7   6 5 4   3 2 1   0
"""

import functools
from typing import Any

import jax
import numpy as np

from txl_jax.config import TransformerXLConfig
from txl_jax.model.transformer_xl import TransformerXL

MAX_DISTANCES = 512


def reach(c: TransformerXLConfig, seg_len: int, mem_len: int) -> int:
    """The largest distance at which a token can change the prediction of a segment's last target.

    Counted back from the target: 1 is the last input. Exact if the text is long enough.
    """
    if c.same_length:
        per_layer = mem_len - 1 if c.same_length == "pytorch" else mem_len
        return 1 + c.n_layer * min(per_layer, mem_len)
    first = seg_len - 1  # the oldest position that matters, counted from the segment's start
    for _ in range(c.n_layer):
        first = first // seg_len * seg_len - mem_len  # memory reaches M before its segment
    return seg_len - first


def changes_prediction(
    model: TransformerXL, params: Any, seg_len: int, mem_len: int, distances: np.ndarray
) -> np.ndarray:
    """Whether changing the token at each distance changes the prediction of the last target.

    One token of each of four random texts is replaced, and every bit of the last logits is
    compared. True is proof. False may be an influence lost in rounding.

    ``distances``: int [R], from 1, counted back from the target. Returns bool [R].
    """
    rng = np.random.default_rng(0)
    n_rows, vocab_size = len(distances), model.cfg.vocab_size
    assert vocab_size is not None
    length = -(-int(max(distances)) // seg_len) * seg_len + seg_len
    changed = np.zeros(n_rows, bool)
    for _ in range(4):
        text = np.tile(rng.integers(vocab_size, size=length, dtype=np.int32), (n_rows, 1))
        other = text.copy()
        index = np.arange(n_rows), length - np.asarray(distances)
        other[index] = (text[index] + rng.integers(1, vocab_size, size=n_rows)) % vocab_size
        before, after = (last_logits(model, params, x, seg_len, mem_len) for x in (text, other))
        changed |= (before != after).any(axis=-1)
    return changed


def measured_reach(model: TransformerXL, params: Any, seg_len: int, mem_len: int) -> int:
    """The largest distance at which a change was measured; tries up to T beyond :func:`reach`."""
    limit = reach(model.cfg, seg_len, mem_len)
    count = min(MAX_DISTANCES, limit + seg_len)
    spread = np.linspace(1, limit + seg_len, count).round().astype(int)
    distances = np.union1d(spread, [limit, limit + 1])
    changed = changes_prediction(model, params, seg_len, mem_len, distances)
    return int(max(distances[changed], default=0))


def last_logits(
    model: TransformerXL, params: Any, tokens: np.ndarray, seg_len: int, mem_len: int
) -> np.ndarray:
    """The logits after the last of ``tokens`` int32 [B,S], float32 [B,V]; S a multiple of T."""
    assert tokens.shape[1] % seg_len == 0
    mems = model.init_mems(len(tokens), mem_len)
    for start in range(0, tokens.shape[1], seg_len):
        logits, mems = _segment(model, params, tokens[:, start : start + seg_len], mems)
    return np.asarray(logits)


@functools.partial(jax.jit, static_argnums=0)
def _segment(model: TransformerXL, params: Any, tokens: jax.Array, mems: Any):
    logits, mems = model.apply({"params": params}, tokens, mems)
    return logits[:, -1], mems
