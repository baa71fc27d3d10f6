"""How far back a token can change a prediction: what the shapes say, and what a model shows.

A layer sees so far, and what it sees was computed by the layer below, which saw as far again:
memory x layers, O(L x M) (paper, section 3.2). Without a window a query sees M positions before
its own *segment*, so the reach of its last target, for L = 2 and M = T = 3, is T + L*M = 9:

    segment       0 0 0 | 1 1 1 | 2 2 2 | target
    layer 2                 x x x   x x x           its query sees memory and segment,
    layer 1         x x x   x x x                   and the oldest of these sees as much
    distance      9 8 7   6 5 4   3 2 1   0
"""

from typing import Any

import jax
import numpy as np

from txl_jax.config import TransformerXLConfig
from txl_jax.model.transformer_xl import TransformerXL

MOST = 512
"""So many distances are tried at most."""


def reach(c: TransformerXLConfig, seg_len: int, mem_len: int) -> int:
    """The largest distance at which a token can change the prediction of a segment's last target.

    In tokens, counted back from the target: 1 is the last input. Exact for a text that is long
    enough; ``c.same_length`` is the window, which with M = 0 does not leave its segment either.
    """
    if c.same_length:
        per_layer = mem_len - 1 if c.same_length == "pytorch" else mem_len
        return 1 + c.n_layer * min(per_layer, mem_len)
    first = seg_len - 1  # the oldest position that matters, counted from the segment's start
    for _ in range(c.n_layer):
        first = first // seg_len * seg_len - mem_len  # memory reaches M before its segment
    return seg_len - first


def changed(
    model: TransformerXL,
    params: Any,
    seg_len: int,
    mem_len: int,
    distances: np.ndarray,
    trials: int = 4,
    seed: int = 0,
) -> np.ndarray:
    """Whether a token at each distance changes the prediction of a segment's last target at all.

    One token of a random text is replaced by another one, and every bit of the last logits is
    compared. True is proof; False may be an influence that rounding swallowed.

    Args:
      distances: int [R], from 1, counted back from the target.
      trials: random texts.

    Returns:
      bool [R].
    """
    rng = np.random.default_rng(seed)
    n_rows, vocab_size = len(distances), model.cfg.vocab_size
    assert vocab_size is not None
    length = -(-int(max(distances)) // seg_len) * seg_len + seg_len
    found = np.zeros(n_rows, bool)
    for _ in range(trials):
        text = np.tile(rng.integers(vocab_size, size=length, dtype=np.int32), (n_rows, 1))
        other = text.copy()
        place = np.arange(n_rows), length - np.asarray(distances)
        other[place] = (text[place] + rng.integers(1, vocab_size, size=n_rows)) % vocab_size
        before, after = (last_logits(model, params, x, seg_len, mem_len) for x in (text, other))
        found |= (before != after).any(axis=-1)
    return found


def measured_reach(
    model: TransformerXL, params: Any, seg_len: int, mem_len: int, seed: int = 0
) -> int:
    """The largest distance at which a change was seen, of those up to T beyond :func:`reach`.

    At most :data:`MOST` distances are tried, spread evenly, the reach and the next one among them.
    """
    limit = reach(model.cfg, seg_len, mem_len)
    spread = np.linspace(1, limit + seg_len, min(MOST, limit + seg_len)).round().astype(int)
    tried = np.union1d(spread, [limit, limit + 1])
    seen = changed(model, params, seg_len, mem_len, tried, seed=seed)
    return int(max(tried[seen], default=0))


def last_logits(
    model: TransformerXL, params: Any, tokens: np.ndarray, seg_len: int, mem_len: int
) -> np.ndarray:
    """The logits after the last token, float32 [B,V]: segments of T, memory from empty.

    ``tokens``: int32 [B,S], S a multiple of T.
    """
    assert tokens.shape[1] % seg_len == 0
    mems = model.init_mems(len(tokens), mem_len)
    for start in range(0, tokens.shape[1], seg_len):
        logits, mems = _segment(model, params, tokens[:, start : start + seg_len], mems)
    return np.asarray(logits)


def _logits(model: TransformerXL, params: Any, tokens: jax.Array, mems: Any):
    logits, mems = model.apply({"params": params}, tokens, mems)
    return logits[:, -1], mems


_segment = jax.jit(_logits, static_argnums=0)
