"""Scores simple models on the targets of the Transformer-XL: unigram, bigram and xz."""

import concurrent.futures
import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from txl_jax.config import ConfigError
from txl_jax.data.pieces import flat_tokens
from txl_jax.data.symbols import check_ids
from txl_jax.progress import waiting_for
from txl_jax.units import in_unit

Model = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Returns p(target | previous), float64, for previous tokens and targets of the same shape."""

CHUNK = 1 << 22
"""The number of tokens that are counted or scored at a time."""
PRIMED_LIMIT = 128 << 20
"""The size of the largest training text that xz compresses before the split, in bytes. Each of two
threads needs 11 bytes of memory per byte, and 5 seconds per 10 MB (measured, Python 3.11, 2026)."""

DESCRIPTIONS = {
    "unigram": "counted on the train split",
    "bigram": "counted on the train split",
    "xz": "compressed alone",
    "xz primed": "compressed after the train split",
}
"""The text that each model learns from before it is scored, by the model's name in the results."""

_STRONGEST = 9 | lzma.PRESET_EXTREME


def score_baselines(
    names: Sequence[str], corpus: Any, split: str, indices: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Scores the named models on a split of at least two tokens, in the order of the names.

    ``corpus`` has ``vocab``, ``train`` and the split. ``indices``, int [N], are the increasing
    indices of the targets, from 1. ``None`` selects all tokens except the first.

    Returns one dict per model with ``name``, ``loss`` in nats per target, the loss in the unit of
    the text, and the number of ``targets``. ``xz`` compresses the concatenated targets. A second
    result, ``xz primed``, compresses them after a training text of at most :data:`PRIMED_LIMIT`
    bytes. Raises the errors of :func:`check_baselines`.
    """
    check_baselines(names, corpus.vocab)
    train, tokens = flat_tokens(corpus.train), flat_tokens(getattr(corpus, split))
    size, unit = len(corpus.vocab), corpus.vocab.unit
    targets = tokens[1:] if indices is None else tokens[indices]
    losses: dict[str, float] = {}
    for name in names:
        with waiting_for(f"scoring the baseline {name}"):
            if name == "xz":
                before, text = (np.asarray(x, np.uint8).tobytes() for x in (train, targets))
                losses["xz"] = xz(text) * math.log(2)
                if len(before) <= PRIMED_LIMIT:
                    losses["xz primed"] = xz_primed(before, text) * math.log(2)
            else:
                count = unigram if name == "unigram" else bigram
                losses[name] = cross_entropy(count(train, size), tokens, size, indices)
    return [
        {"name": name, "loss": loss, unit: in_unit(loss, unit), "targets": len(targets)}
        for name, loss in losses.items()
    ]


def check_baselines(names: Sequence[str], vocab: Any) -> None:
    """Raises ConfigError for ``xz`` if tokens are not single bytes."""
    if "xz" in names and (vocab.unit == "ppl" or len(vocab) > 256):
        raise ConfigError(
            "config key evaluate.baselines: 'xz' compresses a byte for each token, so it needs at"
            f" most 256 bytes or characters, not {len(vocab)} symbols; leave 'xz' out"
        )


def unigram(train: np.ndarray, vocab_size: int) -> Model:
    """Counts a unigram model with add-one smoothing, p(w) = (c(w) + 1) / (n + V)."""
    check_ids("train", train, vocab_size)
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(train), CHUNK):
        counts += np.bincount(np.asarray(train[start : start + CHUNK]), minlength=vocab_size)
    p = (counts + 1) / (counts.sum() + vocab_size)
    return lambda previous, target: p[target]


def bigram(train: np.ndarray, vocab_size: int) -> Model:
    """Counts a bigram model, interpolated with the unigram model p1 (Witten-Bell smoothing).

    p(w | h) = (c(h,w) + t(h) p1(w)) / (c(h) + t(h)), where c(h,w) and c(h) are the counts of the
    pair and of the previous token h, and t(h) is the number of different tokens after h. If h is
    new, p1 is used. The memory grows with the number of different pairs.
    Source: Witten and Bell 1991, "The zero-frequency problem", method C, in the interpolated
    form of Chen and Goodman 1998, "An empirical study of smoothing techniques", section 2.5.
    """
    p1 = unigram(train, vocab_size)
    codes, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)  # sorted h V + w, and c(h,w)
    for previous, target in _pairs(train, None):
        code = previous.astype(np.int64) * vocab_size + target
        found, n = np.unique(code, return_counts=True)
        codes, place = np.unique(np.concatenate([codes, found]), return_inverse=True)
        # bincount sums in float64, which is exact below 2**53
        counts = np.bincount(place, np.concatenate([counts, n])).astype(np.int64)
    context = codes // vocab_size
    c = np.bincount(context, counts, vocab_size).astype(np.int64)
    t = np.bincount(context, minlength=vocab_size)

    def probability(previous: np.ndarray, target: np.ndarray) -> np.ndarray:
        code = previous.astype(np.int64) * vocab_size + target
        place = np.minimum(np.searchsorted(codes, code), len(codes) - 1)
        seen = np.where(codes[place] == code, counts[place], 0)
        th, ch, p = t[previous], c[previous], p1(previous, target)
        return np.where(th > 0, (seen + th * p) / np.maximum(ch + th, 1), p)

    return probability


def cross_entropy(
    model: Model, tokens: np.ndarray, vocab_size: int, indices: np.ndarray | None = None
) -> float:
    """Returns the cross entropy of a model in nats per target.

    The targets are the tokens at ``indices``, or all tokens except the first.
    """
    check_ids("tokens", tokens, vocab_size)
    total, count = 0.0, 0
    for previous, target in _pairs(tokens, indices):
        total -= float(np.log(model(previous, target)).sum())
        count += len(target)
    return total / count


def _pairs(
    tokens: np.ndarray, indices: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields chunks of previous tokens, each with the chunk of their targets."""
    targets = range(1, len(tokens)) if indices is None else indices
    for start in range(0, len(targets), CHUNK):
        part = np.asarray(targets[start : start + CHUNK])
        yield np.asarray(tokens[part - 1]), np.asarray(tokens[part])


def xz(text: bytes) -> float:
    """Returns the bits per byte of ``text``, compressed by xz with its strongest setting."""
    return 8 * len(lzma.compress(text, preset=_STRONGEST)) / len(text)


def xz_primed(train: bytes, test: bytes) -> float:
    """Returns the bits per byte that ``test`` adds to the compressed size of ``train``."""
    reach = min(max(len(train) + len(test), 4096), 3 << 29)  # within the limits of xz
    filters = [{"id": lzma.FILTER_LZMA2, "preset": _STRONGEST, "dict_size": reach}]
    size = lambda text: len(lzma.compress(text, filters=filters))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # lzma releases the interpreter lock
        both, first = pool.map(size, (train + test, train))
    return 8 * (both - first) / len(test)
