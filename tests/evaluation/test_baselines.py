"""Baselines equal their formulas, and are scored on the same targets as the model."""

import collections
import itertools
import lzma
import math
import tracemalloc
import types

import numpy as np
import pytest

from txl_jax.evaluation import baselines


def loss(count, train, test, vocab_size):
    return baselines.cross_entropy(count(train, vocab_size), test, vocab_size)


class Vocab(list):
    unit = "bpc"


def _tokens(seed: int, length: int, vocab_size: int, dtype=np.int32) -> np.ndarray:
    """Random tokens, some more frequent so that pairs repeat. The last two ids never occur."""
    draws = np.random.default_rng(seed).geometric(0.25, length) - 1
    return np.minimum(draws, vocab_size - 3).astype(dtype)


def _witten_bell(train, vocab_size: int):
    """Returns p(w, h), the probability of word w after word h by the formula of ``bigram``."""
    train = [int(t) for t in train]
    once = collections.Counter(train)
    pair = collections.Counter(itertools.pairwise(train))

    def p(w, h):
        p1 = (once[w] + 1) / (len(train) + vocab_size)
        after = {v: c for (g, v), c in pair.items() if g == h}
        t, c = len(after), sum(after.values())
        return (after.get(w, 0) + t * p1) / (c + t) if t else p1

    return p


@pytest.mark.parametrize("chunk", [7, 1 << 22])
def test_unigram_is_the_cross_entropy_of_held_out_shares_with_add_one_training_shares(
    monkeypatch, chunk
):
    monkeypatch.setattr(baselines, "CHUNK", chunk)
    train, test = _tokens(0, 101, 12), _tokens(1, 57, 12)
    p = (np.bincount(train, minlength=12) + 1) / (101 + 12)
    q = np.bincount(test[1:], minlength=12) / 56
    np.testing.assert_allclose(
        loss(baselines.unigram, train, test, 12), -(q * np.log(p)).sum(), 1e-13
    )


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_bigram_is_the_written_out_loop_over_exactly_the_targets_after_the_first(
    monkeypatch, chunk, dtype
):
    monkeypatch.setattr(baselines, "CHUNK", chunk)
    train, test = _tokens(0, 90, 250, dtype), _tokens(1, 43, 250, dtype)
    test[20] = 249  # token 249 is not in the training text; here it is a target, then a context
    p = _witten_bell(train, 250)
    total = -sum(math.log(p(int(w), int(h))) for h, w in itertools.pairwise(test))
    np.testing.assert_allclose(loss(baselines.bigram, train, test, 250), total / 42, rtol=1e-13)


def test_probabilities_sum_to_one_over_the_vocabulary_after_every_token():
    vocab_size = 40
    train = _tokens(0, 500, vocab_size)
    h, w = np.mgrid[:vocab_size, :vocab_size]
    for count in (baselines.unigram, baselines.bigram):
        p = count(train, vocab_size)(h, w)
        assert (p > 0).all()
        np.testing.assert_allclose(p.sum(1), 1, rtol=1e-13)


def test_a_bigram_of_ten_thousand_words_takes_memory_for_the_pairs_that_occur_only():
    rng = np.random.default_rng(0)
    train, test = rng.integers(0, 10_000, 200_000), rng.integers(0, 10_000, 1000)
    tracemalloc.start()
    loss(baselines.bigram, train, test, 10_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6  # bytes; counts of all V*V pairs would take 800e6


def test_xz_is_the_size_that_lzma_gives_in_bits_per_byte():
    words = [b"%x" % word for word in _tokens(0, 8000, 900) ** 3]
    text = b" ".join(words)
    size = len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    assert size != len(lzma.compress(text))  # another preset gives another size
    assert baselines.xz(text) == 8 * size / len(text)


def test_primed_xz_is_what_the_split_adds_and_sees_all_of_the_training_text():
    rng = np.random.default_rng(0)
    train = rng.bytes(1 << 18)  # the test split repeats its first bytes
    test = train[:5000]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 19}]
    sizes = [len(lzma.compress(text, filters=filters)) for text in (train + test, train)]
    assert baselines.xz_primed(train, test) == 8 * (sizes[0] - sizes[1]) / 5000
    assert baselines.xz_primed(train, test) < 1
    assert baselines.xz(test) > 8


def test_every_named_baseline_is_reported_in_nats_and_in_the_unit_of_the_corpus(monkeypatch):
    train, test = _tokens(0, 2000, 30, np.uint8), _tokens(1, 300, 30, np.uint8)
    corpus = types.SimpleNamespace(vocab=Vocab(range(30)), train=train, valid=test, test=train[:9])
    got = baselines.score_baselines(("bigram", "unigram", "xz"), corpus, "valid")
    assert [entry["name"] for entry in got] == ["bigram", "unigram", "xz", "xz primed"]
    assert got[0]["loss"] == loss(baselines.bigram, train, test, 30)
    assert got[1]["loss"] == loss(baselines.unigram, train, test, 30)
    for entry in got:
        assert set(entry) == {"name", "loss", "bpc", "targets"}
        assert entry["targets"] == 299
        assert entry["loss"] == pytest.approx(entry["bpc"] * math.log(2), rel=1e-14)
    targets = bytes(test[1:])
    assert got[2]["bpc"] == pytest.approx(baselines.xz(targets), rel=1e-14)
    assert got[3]["bpc"] == pytest.approx(baselines.xz_primed(bytes(train), targets), rel=1e-14)

    corpus.vocab.unit = "ppl"
    (entry,) = baselines.score_baselines(("unigram",), corpus, "valid")
    assert entry["ppl"] == pytest.approx(math.exp(entry["loss"]), rel=1e-14)

    corpus.vocab.unit = "bpc"
    monkeypatch.setattr(baselines, "PRIMED_LIMIT", len(train) - 1)
    assert [entry["name"] for entry in baselines.score_baselines(("xz",), corpus, "valid")] == [
        "xz"
    ]


@pytest.mark.parametrize("chunk", [3, 1 << 22])
def test_a_part_of_a_split_is_scored_at_its_targets_alone(monkeypatch, chunk):
    monkeypatch.setattr(baselines, "CHUNK", chunk)
    train, test = _tokens(0, 2000, 30, np.uint8), _tokens(1, 300, 30, np.uint8)
    corpus = types.SimpleNamespace(vocab=Vocab(range(30)), train=train, test=test)
    places = np.array([1, 2, 3, 4, 151, 152, 153, 299])
    got = baselines.score_baselines(("unigram", "bigram", "xz"), corpus, "test", places)
    p1, p2 = baselines.unigram(train, 30)(test[:30], np.arange(30)), _witten_bell(train, 30)
    expected = {
        "unigram": -np.mean([math.log(p1[test[n]]) for n in places]),
        "bigram": -np.mean([math.log(p2(int(test[n]), int(test[n - 1]))) for n in places]),
        "xz": baselines.xz(bytes(test[places])) * math.log(2),
        "xz primed": baselines.xz_primed(bytes(train), bytes(test[places])) * math.log(2),
    }
    assert {row["name"]: row["loss"] for row in got} == pytest.approx(expected, rel=1e-12)
    assert {row["targets"] for row in got} == {8}


def test_what_cannot_be_counted_is_refused_with_its_reason():
    words = Vocab(range(10_000))
    words.unit = "ppl"
    with pytest.raises(ValueError, match="at most 256 bytes or characters, not 10000 symbols"):
        baselines.check_baselines(("unigram", "xz"), words)
    letters = Vocab(range(257))
    with pytest.raises(ValueError, match="not 257 symbols"):
        baselines.check_baselines(("xz",), letters)
    words = Vocab(range(200))
    words.unit = "ppl"
    with pytest.raises(ValueError, match="not 200 symbols"):
        baselines.check_baselines(("xz",), words)
    baselines.check_baselines(("unigram", "bigram"), words)
    with pytest.raises(ValueError, match=r"train\[5\] = 5: a token id must be from 0 to 4"):
        loss(baselines.bigram, np.arange(6), np.arange(3), 5)
    with pytest.raises(ValueError, match=r"tokens\[5\] = 5: a token id must be from 0 to 4"):
        loss(baselines.unigram, np.arange(5), np.arange(6), 5)
