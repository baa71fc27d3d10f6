"""Streams of whole sentences have a new order every epoch; segments can be read in any order."""

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import shared_files
from places import ROOT

from txl_jax.data import orders
from txl_jax.data.corpus import load_corpus
from txl_jax.data.errors import DataError
from txl_jax.data.pieces import Pieces
from txl_jax.data.prepare import double_boundaries
from txl_jax.data.streams import ordered_streams, shuffled_streams

S = 0


def pieces(tokens, edges) -> Pieces:
    return Pieces(tokens, edges[:-1], True, "sentences")


def streams_of(sentences, b, t, seed=None, **options):
    if seed is None:
        return ordered_streams(sentences, b, t, **options)
    return shuffled_streams(sentences, b, t, seed, **options)


def sentences_of(lengths, first=1) -> Pieces:
    """Returns one sentence of n words for each n in ``lengths``; no word occurs twice."""
    ends = np.cumsum([0, *(n + 1 for n in lengths)])
    tokens = np.arange(first, first + ends[-1] + 1, dtype=np.int32)
    tokens[ends] = S
    return pieces(tokens, ends.astype(np.int64))


def random_sentences(n, seed=0, longest=9) -> Pieces:
    return sentences_of(np.random.default_rng(seed).integers(0, longest + 1, n))


def rows_of(streams, epoch=0):
    """Returns, for each row of the batch, its scored pairs (input, target) in order."""
    segments = [streams.segment(i, epoch=epoch) for i in range(streams.n_segments)]
    rows = []
    for b in range(streams.batch_size):
        pairs: list[tuple[int, int]] = []
        for seg in segments:
            real = seg.weights[b] > 0
            inputs = seg.inputs[b, streams.context_len :]
            pairs += zip(inputs[real].tolist(), seg.targets[b, real].tolist(), strict=True)
        rows.append(pairs)
    return rows


def cut_at_boundaries(pairs) -> list[tuple[int, ...]]:
    """Returns the words of each sentence, given a row's pairs of input and target token.

    Asserts that a sentence of the words a b has the inputs ``<S> a b`` and the targets ``a b <S>``.
    """
    found: list[tuple[int, ...]] = []
    words: list[int] = []
    inside = False
    for given, target in pairs:
        assert (given == S) == (not inside), "a sentence begins with its boundary, alone"
        if inside:
            assert given == words[-1], "the input is the target before"
        if target == S:
            found.append(tuple(words))
        words, inside = ([], False) if target == S else ([*words, target], True)
    assert not inside, "the last sentence is whole"
    return found


def words_of(sentences) -> list[tuple[int, ...]]:
    return [tuple(sentence[1:-1].tolist()) for sentence in sentences]


SHAPES = [(1, 1, 4), (7, 3, 5), (40, 4, 3), (41, 41, 2), (200, 6, 16), (33, 5, 100)]


@pytest.mark.parametrize("seed", [None, 0, 5])
@pytest.mark.parametrize("shard", [1, 3, 1024])
def test_every_sentence_is_read_once_and_whole_in_one_row(seed, shard, monkeypatch):
    monkeypatch.setattr(orders, "SHARD", shard)
    for n, b, t in SHAPES:
        sentences = random_sentences(n)
        streams = streams_of(sentences, b, t, seed=seed)
        assert streams.n_targets == sentences.n_targets
        for epoch in (0, 3):
            rows = [cut_at_boundaries(row) for row in rows_of(streams, epoch)]
            assert all(rows)
            read = [sentence for row in rows for sentence in row]
            assert sorted(read) == sorted(words_of(sentences))
            if seed is None:
                assert read == words_of(sentences)


def test_rows_have_nearly_as_many_tokens_and_padding_is_only_at_their_end():
    sentences = random_sentences(4000, longest=40)
    streams = streams_of(sentences, 7, 32, seed=1)
    sizes = [len(row) for row in rows_of(streams)]
    assert max(sizes) - min(sizes) <= 41
    assert streams.n_segments == -(-max(sizes) // 32)
    for i in range(streams.n_segments):
        seg = streams.segment(i)
        assert (np.diff(seg.weights, axis=1) <= 0).all()
        assert seg.weights.any()
        assert not seg.inputs[seg.weights == 0].any()
        assert not seg.targets[seg.weights == 0].any()
        assert seg.first == (i == 0)
        assert (seg.inputs.dtype, seg.targets.dtype) == (np.int32, np.int32)
        assert (seg.weights.dtype, seg.starts.dtype) == (np.float32, bool)


def test_every_epoch_has_an_order_of_its_own(monkeypatch):
    monkeypatch.setattr(orders, "SHARD", 16)
    sentences = random_sentences(600)
    streams = streams_of(sentences, 3, 8, seed=0)
    found = [
        [s for row in rows_of(streams, epoch) for s in cut_at_boundaries(row)] for epoch in range(3)
    ]
    other = streams_of(sentences, 3, 8, seed=1)
    found.append([s for row in rows_of(other) for s in cut_at_boundaries(row)])
    found.append(words_of(sentences))
    place = {sentence: i for i, sentence in enumerate(found[0]) if sentence}
    for order in found[1:]:
        same = sum(place[s] == i for i, s in enumerate(order) if s)
        assert same < 0.05 * len(order)
        # Shards (groups of 16 sentences) are shuffled too, not only the sentences within a shard.
        moved = [abs(place[s] - i) for i, s in enumerate(order) if s]
        assert np.mean(moved) > 2 * 16


def test_rows_are_shuffled_apart_from_each_other():
    streams = streams_of(sentences_of([1] * 2000), 2, 10, seed=0)
    first, second = ([s[0] for s in cut_at_boundaries(row)] for row in rows_of(streams))
    assert (np.argsort(first) != np.argsort(second)).mean() > 0.9


def same_segment(one, two):
    for name in ("inputs", "targets", "weights", "starts"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert one.first == two.first


@pytest.mark.parametrize("context_len", [0, 9])
@pytest.mark.parametrize("seed", [None, 4])
def test_a_segment_is_the_same_whatever_was_asked_before(seed, context_len, monkeypatch):
    monkeypatch.setattr(orders, "SHARD", 5)
    sentences = random_sentences(150)
    made = lambda: streams_of(sentences, 4, 6, seed=seed, context_len=context_len)
    streams = made()
    n = streams.n_segments
    in_order = [streams.at_step(step) for step in range(3 * n)]
    for step in np.random.default_rng(0).permutation(3 * n).tolist():
        same_segment(streams.at_step(step), in_order[step])
        same_segment(made().segment(step % n, epoch=step // n), in_order[step])
        part = made().at_step(step, rows=slice(1, 3))
        np.testing.assert_array_equal(part.inputs, in_order[step].inputs[1:3])
        np.testing.assert_array_equal(part.targets, in_order[step].targets[1:3])
        np.testing.assert_array_equal(part.weights, in_order[step].weights[1:3])


@pytest.mark.parametrize("context_len", [1, 4, 30])
def test_context_is_the_rows_own_text_before_the_segment(context_len, monkeypatch):
    monkeypatch.setattr(orders, "SHARD", 3)
    sentences = random_sentences(60)
    plain = streams_of(sentences, 3, 4, seed=2)
    streams = streams_of(sentences, 3, 4, seed=2, context_len=context_len)
    texts = [[given for given, _ in row] for row in rows_of(plain)]
    for i in range(streams.n_segments):
        seg, bare = streams.segment(i), plain.segment(i)
        np.testing.assert_array_equal(seg.inputs[:, context_len:], bare.inputs)
        np.testing.assert_array_equal(seg.targets, bare.targets)
        for b, text in enumerate(texts):
            known = text[max(4 * i - context_len, 0) : 4 * i] if bare.weights[b].any() else []
            padded = [0] * (context_len - len(known)) + known
            assert seg.inputs[b, :context_len].tolist() == padded
        begins = [context_len - 4 * i] * 3 if 4 * i <= context_len else []
        assert np.argwhere(seg.starts)[:, 1].tolist() == begins


def test_without_a_seed_one_row_is_the_token_array():
    sentences = random_sentences(50)
    streams = streams_of(sentences, 1, 7)
    for got, want in zip(streams, ordered_streams(sentences.ids, 1, 7), strict=True):
        same_segment(got, want)


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("context_len", [0, 2])
def test_the_authors_cut_gives_the_authors_batches(split, context_len, tmp_path):
    recorded = shared_files.json_of("fixtures/data/lm1b.json")
    corpus = load_corpus("lm1b", shared_files.path("fixtures/data/lm1b"), cache_dir=tmp_path)
    key = f"{split}_batches_bsz3_bptt5" + (f"_ext{context_len}" if context_len else "")
    streams = ordered_streams(
        getattr(corpus, split), 3, 5, drop_remainder=True, context_len=context_len
    )
    assert streams.n_segments == len(recorded[key])
    assert streams.n_targets == 15 * len(recorded[key])
    for seg, batch in zip(streams, recorded[key], strict=True):
        tokens = np.array(batch["data"]).T
        np.testing.assert_array_equal(seg.inputs[:, context_len + 5 - tokens.shape[1] :], tokens)
        np.testing.assert_array_equal(seg.targets.T, batch["target"])
        assert seg.weights.all()
        assert np.argwhere(seg.starts)[:, 1].tolist() == [context_len] * 3 * seg.first


def test_a_slice_of_sentences_is_read_as_these_sentences():
    sentences = random_sentences(30)
    assert sentences[25:].kind == "sentences"
    part = sentences[10:20]
    assert isinstance(part, Pieces)
    rows = [s for row in rows_of(ordered_streams(part, 2, 3)) for s in cut_at_boundaries(row)]
    assert rows == words_of(sentences)[10:20]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"batch_size": 5},
            "batch_size = 5: lm1b has 4 sentences, too few for a target in each stream; use a batch"
            " of at most 4, or a longer text",
        ),
        ({"batch_size": 0}, "batch_size = 0: must be at least 1"),
        ({"seg_len": 0}, "seg_len = 0: must be at least 1"),
        ({"context_len": -1}, "context_len = -1: must be at least 0"),
        (
            {"drop_remainder": True, "seg_len": 50},
            "batch_size = 2: lm1b does not fill one segment of 50 tokens in every stream; use a"
            " smaller batch or shorter segments",
        ),
        (
            {"vocab_size": 9},
            "lm1b[8] = 9: a token id must be from 0 to 8, because the vocabulary has 9 symbols",
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments, message):
    good = {"split": sentences_of([3, 2, 4, 1]), "batch_size": 2, "seg_len": 3, "name": "lm1b"}
    with pytest.raises(DataError) as error:
        ordered_streams(**good | arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("index", [-1, 5])
def test_there_is_no_segment_outside_of_the_pass(index):
    with pytest.raises(IndexError, match=f"segment {index}: there are 5 segments, counted from 0"):
        streams_of(sentences_of([4] * 4), 2, 2).segment(index)


# --------------------------------------------------------------------------------------
# The stream of the authors' TensorFlow code: two ``<S>`` between sentences.


def double_sentences(n, seed=0) -> tuple[Pieces, list[list[int]]]:
    """Returns n sentences as a prepared corpus of TF's stream has them, and each sentence's words.

    Each of these sentences begins with one ``<S>`` and ends with two.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 10, n)
    words = np.split(np.arange(1, 1 + lengths.sum()), np.cumsum(lengths)[:-1])
    single = [S] + [token for part in words for token in (*part.tolist(), S)]
    ends = np.concatenate([[0], np.cumsum(lengths + 1)])
    [(ids, begins)] = double_boundaries([(np.array(single, np.int32), ends)])
    return pieces(ids, begins), [part.tolist() for part in words]


def test_tfs_stream_in_any_order_is_whole_sentences_after_another(monkeypatch):
    monkeypatch.setattr(orders, "SHARD", 4)
    sentences, words = double_sentences(60)
    assert [s.tolist() for s in sentences] == [[S, *part, S, S] for part in words]
    for seed in (None, 0, 1):
        streams = streams_of(sentences, 3, 7, seed=seed)
        assert streams.n_targets == sum(len(part) + 2 for part in words)
        for epoch in (0, 2):
            read = []
            for row in rows_of(streams, epoch):
                given, targets = ([pair[i] for pair in row] for i in (0, 1))
                assert given[1:] == targets[:-1]
                text = [*given, targets[-1]]
                while len(text) > 1:  # by TF's rule, a sentence is <S> words <S>
                    assert text[0] == S
                    end = text.index(S, 1)
                    read.append(text[1:end])
                    text = text[end + 1 :]
                assert text == [S], "the next sentence would begin here"
            assert sorted(read) == sorted(words)
            assert (read == words) == (seed is None)


PROGRAM = """
import json, sys
import numpy as np
from txl_jax.data.pieces import Pieces
from txl_jax.data.streams import shuffled_streams
n = 40_000
lengths = np.random.default_rng(0).integers(1, 50, n)
offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
tokens = np.arange(offsets[-1] + 1, dtype=np.int32)
tokens[offsets] = 0
sentences = Pieces(tokens, offsets[:-1], True, "sentences")
segment = shuffled_streams(sentences, 8, 32, seed=3).at_step(int(sys.argv[1]))
print(json.dumps(segment.inputs.tolist()))
"""


@pytest.mark.integration
def test_another_process_makes_the_same_segment():
    run = lambda: (
        subprocess.run(
            [sys.executable, "-c", PROGRAM, "10000"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        ).stdout
    )
    one, two = run(), run()
    assert one == two
    assert np.array(json.loads(one)).shape == (8, 32)


def test_seeking_in_a_corpus_of_the_published_size_is_fast_and_small():
    n = 30_000_000
    offsets = np.arange(0, 25 * (n + 1), 25, dtype=np.int64)
    tokens = np.zeros(25 * n + 1, np.int8)  # memory pages that are never written take no RAM
    began = time.perf_counter()
    streams = streams_of(pieces(tokens, offsets), 224, 32, seed=0)
    for step in (0, 1, 70_000, 400_000):
        streams.at_step(step)
    assert time.perf_counter() - began < 10
    text: Any = streams.order
    kept = text._shard.cache_info().currsize * orders.SHARD * 25 * np.dtype(np.int32).itemsize
    kept += text._order.cache_info().currsize * 3 * max(edges.nbytes for edges in text._edges)
    kept += sum(edges.nbytes for edges in text._edges)
    assert kept < 64 << 20
