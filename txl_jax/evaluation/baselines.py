"""Simple models on the same tokens: what a Transformer-XL has to beat.

Each one is counted on the training split and scored on exactly the targets that the model is
scored on, ``tokens[1:]`` or a part of them, so that the two numbers compare.
"""

import concurrent.futures
import dataclasses
import lzma
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from txl_jax.config import ConfigError
from txl_jax.data.sentences import flat_tokens
from txl_jax.units import in_unit

CHUNK = 1 << 22
"""Tokens that are counted or scored at a time; it bounds the memory beside the tokens'."""

PRIMED_LIMIT = 128 << 20
"""Bytes of training text up to which xz is also run after it: the encoder takes some 11 bytes
of memory for each, in two runs side by side. 10 MB take 5 seconds of a CPU core in each of
the two (measured, Python 3.11, 2026); enwik8's 90 MB were not run."""


TOLD = {
    "unigram": "counted on the train split",
    "bigram": "counted on the train split",
    "xz": "compressed alone",
    "xz primed": "compressed after the train split",
}
"""Every name in the results, and what the model has seen before it is scored."""


def baselines(
    names: Sequence[str], corpus: Any, split: str, places: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Scores of the named models on a split, in the order of the names.

    Args:
      names: from ``unigram``, ``bigram`` and ``xz``.
      corpus: has ``vocab`` (``len()`` and ``unit``) and integer arrays or sentences under
        ``train`` and under the split's name.
      split: whose tokens are scored.
      places: int [N], which tokens of the split are targets, rising, from at least 1; ``None``:
        all but the first. ``xz`` compresses the targets, joined.

    Returns:
      One ``{"name", "loss", "bpc" or "ppl", "targets"}`` each: the loss in nats per target, the
      corpus's own unit, and how many targets were scored. ``xz`` gives two, ``xz`` and
      ``xz primed`` (compressed after the training text; left out above :data:`PRIMED_LIMIT`).

    Raises:
      ConfigError: see :func:`check`.
      ValueError: the split has fewer than two tokens.
    """
    check(names, corpus.vocab)
    train, test = flat_tokens(corpus.train), flat_tokens(getattr(corpus, split))
    size = len(corpus.vocab)
    targets = test[1:] if places is None else test[places]
    losses: dict[str, float] = {}
    for name in names:
        if name == "unigram":
            losses[name] = unigram(train, test, size, places)
        elif name == "bigram":
            losses[name] = bigram(train, test, size, places)
        else:
            train_bytes, test_bytes = _as_bytes(train), _as_bytes(targets)
            losses["xz"] = xz(test_bytes) * math.log(2)
            if len(train_bytes) <= PRIMED_LIMIT:
                losses["xz primed"] = xz_primed(train_bytes, test_bytes) * math.log(2)
    unit = corpus.vocab.unit
    return [
        {"name": name, "loss": loss, unit: in_unit(loss, unit), "targets": len(targets)}
        for name, loss in losses.items()
    ]


def check(names: Sequence[str], vocab: Any) -> None:
    """Raises ConfigError unless the named models can be run over this vocabulary.

    ``xz`` needs tokens that are characters, at most 256 of them: one byte each.
    """
    unknown = [name for name in names if name not in ("unigram", "bigram", "xz")]
    if unknown:
        raise ConfigError(f"unknown baseline {unknown[0]!r}: must be 'unigram', 'bigram' or 'xz'")
    if "xz" in names and (vocab.unit != "bpc" or len(vocab) > 256):
        raise ConfigError(
            "the baseline 'xz' compresses bytes: it needs a vocabulary of at most 256 characters,"
            f" this one has {len(vocab)} symbols and is measured in {vocab.unit}"
        )


# --------------------------------------------------------------------------------------
# Counted models.


def unigram(
    train: np.ndarray, test: np.ndarray, vocab_size: int, places: np.ndarray | None = None
) -> float:
    """Nats per target under the frequencies of :func:`unigram_probabilities`.

    Targets are ``test[places]``; all of ``test[1:]`` where ``places`` is ``None``.
    """
    log_p = np.log(unigram_probabilities(train, vocab_size))
    return _mean_loss(test, vocab_size, lambda previous, target: log_p[target], places)


def bigram(
    train: np.ndarray, test: np.ndarray, vocab_size: int, places: np.ndarray | None = None
) -> float:
    """Nats per target, each given the token before it, under :class:`Bigram`.

    Targets are ``test[places]``; all of ``test[1:]`` where ``places`` is ``None``.
    """
    model = Bigram.count(train, vocab_size)
    log_p = lambda previous, target: np.log(model(previous, target))
    return _mean_loss(test, vocab_size, log_p, places)


def unigram_probabilities(train: np.ndarray, vocab_size: int) -> np.ndarray:
    """float64 [V]: share of each token in ``train`` with one added to every count.

    p(w) = (c(w) + 1) / (n + V): above zero for every token, and they sum to one.

    Raises:
      ValueError: a token is not in 0..V-1.
    """
    counts = np.zeros(vocab_size, np.int64)
    for tokens in _chunks(train):
        counts += np.bincount(_checked(tokens, vocab_size), minlength=vocab_size)
    return (counts + 1) / (counts.sum() + vocab_size)


@dataclasses.dataclass(frozen=True)
class Bigram:
    """A bigram model, Witten-Bell interpolated with the add-one unigram p1.

    p(w | h) = (c(h,w) + t(h) p1(w)) / (c(h) + t(h)), where t(h) is how many different tokens
    follow h in training: a token that many others follow trusts its counts less. Nothing to
    tune, and it sums to one over w; after an h that was never seen it is p1.
    Source: Witten and Bell 1991, "The zero-frequency problem", method C, in the interpolated
    form of Chen and Goodman 1998, "An empirical study of smoothing techniques", section 2.5.

    Attributes:
      pairs: int64 [P], sorted codes h*V + w of the P pairs that occur.
      pair_counts: int64 [P], c(h,w).
      context_counts: int64 [V], c(h): how often h is followed by anything.
      followers: int64 [V], t(h).
      unigram: float64 [V], p1.
    """

    pairs: np.ndarray
    pair_counts: np.ndarray
    context_counts: np.ndarray
    followers: np.ndarray
    unigram: np.ndarray

    @classmethod
    def count(cls, train: np.ndarray, vocab_size: int) -> "Bigram":
        """The model of a training split; memory grows with the pairs that occur, not with V*V."""
        p1 = unigram_probabilities(train, vocab_size)
        pairs, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for previous, target in _pairs(train):
            found = np.unique(previous.astype(np.int64) * vocab_size + target, return_counts=True)
            pairs, counts = _merged(pairs, counts, *found)
        context = pairs // vocab_size
        # Sums in float64, exact below 2**53.
        context_counts = np.bincount(context, weights=counts, minlength=vocab_size)
        return cls(
            pairs=pairs,
            pair_counts=counts,
            context_counts=context_counts.astype(np.int64),
            followers=np.bincount(context, minlength=vocab_size),
            unigram=p1,
        )

    def __call__(self, previous: np.ndarray, target: np.ndarray) -> np.ndarray:
        """p(target | previous), float64, for two integer arrays of one shape."""
        p1 = self.unigram[target]
        if not len(self.pairs):
            return p1
        code = previous.astype(np.int64) * len(self.unigram) + target
        place = np.minimum(np.searchsorted(self.pairs, code), len(self.pairs) - 1)
        seen = np.where(self.pairs[place] == code, self.pair_counts[place], 0)
        t, c = self.followers[previous], self.context_counts[previous]
        return np.where(t > 0, (seen + t * p1) / np.maximum(c + t, 1), p1)


# --------------------------------------------------------------------------------------
# A compressor.


def xz(text: bytes) -> float:
    """Bits per byte of ``text`` compressed on its own by xz at its strongest (9, extreme)."""
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def xz_primed(train: bytes, test: bytes) -> float:
    """Bits per byte that xz needs for ``test`` once it has seen ``train``.

    That is what ``test`` adds to the compressed size when it follows ``train``, with a window
    that reaches back over both. Memory: some 11 times the two together, twice.
    """
    reach = min(max(len(train) + len(test), 4096), 3 << 29)  # the least and most xz allows
    preset = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": reach}]

    def size(text: bytes) -> int:
        return len(lzma.compress(text, filters=filters))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # lzma lets go of the interpreter
        both, first = pool.map(size, (train + test, train))
    return 8 * (both - first) / len(test)


# --------------------------------------------------------------------------------------


def _mean_loss(
    test: np.ndarray, vocab_size: int, log_p: Any, places: np.ndarray | None = None
) -> float:
    if len(test) < 2:
        raise ValueError(f"a split of {len(test)} tokens has no target; it needs two or more")
    total, count = 0.0, 0
    for previous, target in _pairs(test) if places is None else _pairs_at(test, places):
        total -= float(log_p(_checked(previous, vocab_size), _checked(target, vocab_size)).sum())
        count += len(target)
    return total / count


def _chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(tokens), CHUNK):
        yield np.asarray(tokens[start : start + CHUNK])


def _pairs(tokens: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every token but the last with the one after it, a chunk at a time."""
    for start in range(0, len(tokens) - 1, CHUNK):
        part = np.asarray(tokens[start : start + CHUNK + 1])
        yield part[:-1], part[1:]


def _pairs_at(tokens: np.ndarray, places: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens at some places, each with the one before it, a chunk at a time."""
    for part in _chunks(places):
        yield np.asarray(tokens[part - 1]), np.asarray(tokens[part])


def _merged(
    pairs_a: np.ndarray, counts_a: np.ndarray, pairs_b: np.ndarray, counts_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    pairs, place = np.unique(np.concatenate([pairs_a, pairs_b]), return_inverse=True)
    counts = np.bincount(place, weights=np.concatenate([counts_a, counts_b]))
    return pairs, counts.astype(np.int64)


def _checked(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(
            f"token ids from {tokens.min()} to {tokens.max()}: must be in 0..{vocab_size - 1}"
        )
    return tokens


def _as_bytes(tokens: np.ndarray) -> bytes:
    return np.asarray(tokens, np.uint8).tobytes()
