"""Hashes of batches show that every kind of stream gives its tokens in the recorded order.

Published numbers depend on this order.
"""

import hashlib

import numpy as np
import pytest

import txl_jax
from txl_jax.data.batch import warm_up_batches
from txl_jax.data.feed import training_batch
from txl_jax.data.streams import ordered_streams, shuffled_streams

V = 40
LENGTHS = np.random.default_rng(1).integers(2, 30, 200)  # lengths of documents, in tokens


def text():
    return np.random.default_rng(0).integers(1, V, int(LENGTHS.sum())).astype(np.uint16)


def documents(shared):
    starts = np.cumsum([0, *LENGTHS[:-1]])
    return txl_jax.Pieces(text(), starts, shared)


def sentences(times=1):
    """Returns 5,000 sentences with one or two ``<S>`` between them, as ``times`` says.

    5,000 sentences are more than one shard (1,024 sentences) for each row of a batch of 3 rows.
    """
    lengths = np.random.default_rng(2).integers(0, 12, 5000) + times
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.random.default_rng(3).integers(1, V, int(offsets[-1]) + 1).astype(np.uint16)
    tokens[offsets] = 0
    if times == 2:
        tokens[offsets[1:] - 1] = 0
    return txl_jax.Pieces(tokens, offsets[:-1], True, "sentences")


TEXTS = {
    "plain": text,
    "documents": lambda: documents(shared=False),
    "separated documents": lambda: documents(shared=True),
    "sentences": sentences,
    "double sentences": lambda: sentences(2),
}
DRAWN = {"seg_len_std": 2.0, "partial_shuffle": True}


def digest(found):
    sums = hashlib.sha256()
    for array in found:
        if array is not None:
            sums.update(f"{np.asarray(array).dtype} {np.shape(array)}".encode())
            sums.update(np.ascontiguousarray(array).tobytes())
    return sums.hexdigest()[:16]


def fields(value):
    return [getattr(value, name) for name in sorted(vars(value)) if name != "soft"]


def record(streams, steps):
    """Returns one hash of all that the streams give at ``steps``.

    It covers the numbers of targets, segments and rows. For each step, it covers the segment, some
    of its rows, the training batch and the number of epochs that are over.
    """
    found = [np.array([streams.n_targets, streams.n_segments, streams.batch_size])]
    for step in steps:
        found += fields(streams.at_step(step))
        found += fields(streams.at_step(step, slice(1, 3)))
        found += fields(training_batch(streams, step, "reset", 5))
        found.append(np.array(streams.epochs(step)))
    return digest(found)


SHUFFLED = {
    ("plain", "in order"): "1777fa532c23a69c",
    ("plain", "rolled"): "b90c3e415b521745",
    ("plain", "drawn"): "4fc28deecc9a9f6a",
    ("plain", "rolled and drawn, with context"): "91ab2788dce9680c",
    ("documents", "in order"): "a8e8acf6fa0fcce3",
    ("documents", "rolled and drawn, with context"): "18317848ca508afa",
    ("separated documents", "drawn"): "cc5eeeb0d8699fb0",
    ("separated documents", "rolled and drawn, with context"): "cdc8339c990e13cb",
    ("sentences", "in order"): "dd952969ca93e537",
    ("sentences", "with context"): "ff71994f41c3686b",
    ("double sentences", "in order"): "2bcd350ea8ceca3c",
}
OPTIONS: dict = {
    "in order": {},
    "with context": {"context_len": 15},
    "rolled": {"partial_shuffle": True},
    "drawn": {"seg_len_std": 2.0},
    "rolled and drawn, with context": {**DRAWN, "context_len": 15},
}


@pytest.mark.parametrize(("kind", "options"), list(SHUFFLED))
def test_batches_of_training_are_the_recorded_ones(kind, options):
    """The steps cover three epochs, then jump far ahead, then back near the start."""
    streams = shuffled_streams(TEXTS[kind](), 3, 12, seed=4, **OPTIONS[options])
    n = streams.n_segments
    steps = [*range(0, 3 * n, max(1, n // 40)), 1000 * n + 7, 5, n - 1, n]
    assert record(streams, steps) == SHUFFLED[kind, options]


ORDERED = {
    ("plain", False, 0): "0bc719140bb69ea9",
    ("plain", False, 15): "9dd6a299fe4c55d2",
    ("plain", True, 0): "35fe7658634d2751",
    ("documents", False, 0): "96a8346b2bab6aa6",
    ("documents", False, 15): "f6b2245144ad85bc",
    ("documents", True, 0): "9f9749f868fcd9bb",
    ("separated documents", False, 0): "5c8a93e8d5e8e23d",
    ("separated documents", True, 15): "a98106fbe94fa770",
    ("sentences", False, 0): "54c5d119818a351d",
    ("sentences", False, 15): "215d007b919afc9d",
    ("sentences", True, 15): "b0b1205690198ecf",
    ("double sentences", False, 0): "96cd5a761c60dcad",
    ("double sentences", True, 0): "8c75ad6489f0789e",
}


@pytest.mark.parametrize(("kind", "drop", "context_len"), list(ORDERED))
def test_batches_of_scoring_are_the_recorded_ones(kind, drop, context_len):
    """Batches have 1, 7 and 60 rows.

    The hashes also cover warm-up batches: the text before each row, which fills memory unscored.
    """
    found = []
    for b, t in ((1, 30), (7, 12), (60, 5)):
        options = {"drop_remainder": drop, "context_len": context_len}
        streams = ordered_streams(TEXTS[kind](), b, t, **options)
        n = streams.n_segments
        steps = [*range(0, n, max(1, n // 30)), n - 1, 0]
        found.append(np.frombuffer(record(streams, steps).encode(), np.uint8))
        if not (drop and kind.endswith("sentences")):
            for batch in warm_up_batches(streams, 20):
                found += fields(batch)
    assert digest(found) == ORDERED[kind, drop, context_len]


def test_the_same_ids_of_another_type_give_the_recorded_batches():
    plain = shuffled_streams(text().astype(np.int64), 3, 12, seed=4)
    n = plain.n_segments
    steps = [*range(0, 3 * n, max(1, n // 40)), 1000 * n + 7, 5, n - 1, n]
    assert record(plain, steps) == SHUFFLED["plain", "in order"]
