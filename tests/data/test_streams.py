"""Segments equal those of a slow loop and the batches recorded from the authors' code."""

import itertools

import numpy as np
import pytest
import shared_files

import txl_jax
from txl_jax.data.errors import DataError
from txl_jax.data.streams import ordered_streams, segments, shuffled_streams

SHAPES = [(n, b, t) for n in (2, 3, 7, 16, 29, 30, 31) for b in (1, 2, 3, 5) for t in (1, 3, 4, 64)]


def slow_streams(tokens, batch_size, drop_remainder):
    """Returns, for each stream, the list of its pairs (input, target)."""
    if drop_remainder:
        n = len(tokens) // batch_size
        rows = [tokens[b * n : (b + 1) * n] for b in range(batch_size)]
        return [list(itertools.pairwise(row)) for row in rows]
    pairs = [(tokens[i], tokens[i + 1]) for i in range(len(tokens) - 1)]
    n = 1
    while n * batch_size < len(pairs):
        n += 1
    return [pairs[b * n : (b + 1) * n] for b in range(batch_size)]


def slow_segments(tokens, batch_size, seg_len, drop_remainder):
    """Returns an array [3, batch, time] per segment: inputs, targets and weights, by slow loops."""
    streams = slow_streams(tokens, batch_size, drop_remainder)
    found: list[np.ndarray] = []
    while any(len(stream) > len(found) * seg_len for stream in streams):
        segment = np.zeros((3, batch_size, seg_len), np.int64)
        for b, stream in enumerate(streams):
            for t in range(seg_len):
                if len(found) * seg_len + t < len(stream):
                    segment[:2, b, t] = stream[len(found) * seg_len + t]
                    segment[2, b, t] = 1
        found.append(segment)
    return found


def slow_context(tokens, batch_size, seg_len, drop_remainder, context_len, index):
    """Returns the inputs of a segment with the context before it, and where streams begin.

    Both arrays are [batch, context_len + seg_len]. The second one is True at the first token of a
    stream.
    """
    segment = slow_segments(tokens, batch_size, seg_len, drop_remainder)[index]
    context = np.zeros((batch_size, context_len), np.int64)
    starts = np.zeros((batch_size, context_len + seg_len), bool)
    for b, stream in enumerate(slow_streams(tokens, batch_size, drop_remainder)):
        for column in range(context_len + seg_len):
            place = index * seg_len + column - context_len
            starts[b, column] = place == 0
            if column < context_len and place >= 0 and segment[2, b].any():
                context[b, column] = stream[place][0]
    return np.concatenate([context, segment[0]], axis=1), starts


def tokens_of(n):
    return np.random.default_rng(n).permutation(n).astype(np.uint16) + 1


def possible(n, b, drop_remainder):
    return b <= (n - 1 if not drop_remainder else n // 2)


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_segments_are_those_of_the_slow_loop(drop_remainder):
    tried = 0
    for n, b, t in SHAPES:
        if possible(n, b, drop_remainder):
            expected = slow_segments(tokens_of(n).tolist(), b, t, drop_remainder)
            streams = ordered_streams(tokens_of(n), b, t, drop_remainder)
            assert streams.n_segments == len(expected)
            assert streams.n_targets == sum(int(seg[2].sum()) for seg in expected)
            for i, (got, want) in enumerate(zip(streams, expected, strict=True)):
                for array, wanted in zip((got.inputs, got.targets, got.weights), want, strict=True):
                    np.testing.assert_array_equal(array, wanted, f"N={n} B={b} T={t} segment {i}")
                assert got.inputs.dtype == got.targets.dtype == np.int32
                assert got.weights.dtype == np.float32
                assert got.first == (i == 0)
            tried += 1
    assert tried > 60


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("context_len", [0, 1, 2, 3, 7, 40])
def test_context_is_the_streams_own_text_before_the_segment(drop_remainder, context_len):
    for n, b, t in [(2, 1, 3), (16, 3, 4), (29, 2, 3), (30, 5, 1), (31, 3, 64)]:
        if not possible(n, b, drop_remainder):
            continue
        plain = list(segments(tokens_of(n), b, t, drop_remainder))
        got = list(segments(tokens_of(n), b, t, drop_remainder, context_len=context_len))
        assert len(got) == len(plain)
        for i, (seg, bare) in enumerate(zip(got, plain, strict=True)):
            about = f"N={n} B={b} T={t} segment {i}"
            about_i = drop_remainder, context_len, i
            inputs, starts = slow_context(tokens_of(n).tolist(), b, t, *about_i)
            np.testing.assert_array_equal(seg.inputs, inputs, about)
            np.testing.assert_array_equal(seg.starts, starts, about)
            np.testing.assert_array_equal(seg.targets, bare.targets, about)
            np.testing.assert_array_equal(seg.weights, bare.weights, about)
            assert (seg.inputs.dtype, seg.starts.dtype) == (np.int32, bool)
            assert seg.first == bare.first


def test_every_target_is_scored_once_after_its_own_input():
    for n, b, t in SHAPES:
        if possible(n, b, False):
            tokens = np.arange(1, n + 1)
            scored = []
            for seg in segments(tokens, b, t):
                real = seg.weights > 0
                scored += seg.targets[real].tolist()
                np.testing.assert_array_equal(seg.inputs[real] + 1, seg.targets[real])
                assert not seg.inputs[~real].any()
                assert not seg.targets[~real].any()
            assert sorted(scored) == list(range(2, n + 1)), (n, b, t)


@pytest.mark.parametrize("name", ["wt103", "enwik8"])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_authors_cut_gives_the_authors_batches(name, split):
    recorded = shared_files.json_of(f"fixtures/data/{name}.json")
    batches = recorded[f"{split}_batches_bsz3_bptt5"]
    got = list(ordered_streams(np.array(recorded[split]), 3, 5, drop_remainder=True))
    assert len(got) == len(batches)
    for seg, batch in zip(got, batches, strict=True):
        length = batch["seq_len"]
        np.testing.assert_array_equal(seg.inputs[:, :length].T, batch["data"])
        np.testing.assert_array_equal(seg.targets[:, :length].T, batch["target"])
        assert seg.weights[:, :length].all()
        assert not seg.weights[:, length:].any()


@pytest.mark.parametrize("name", ["wt103", "enwik8"])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_authors_cut_gives_the_authors_batches_with_context(name, split):
    """Before a stream's first token, the authors give no context; this project gives padding."""
    recorded = shared_files.json_of(f"fixtures/data/{name}.json")
    batches = recorded[f"{split}_batches_bsz3_bptt5_ext2"]
    got = list(segments(np.array(recorded[split]), 3, 5, True, context_len=2))
    assert len(got) == len(batches)
    for seg, batch in zip(got, batches, strict=True):
        length, tokens = batch["seq_len"], np.array(batch["data"]).T
        first = 2 + length - tokens.shape[1]
        np.testing.assert_array_equal(seg.inputs[:, first : 2 + length], tokens)
        np.testing.assert_array_equal(seg.targets[:, :length].T, batch["target"])
        np.testing.assert_array_equal(np.argwhere(seg.starts)[:, 1], [first] * 3 * seg.first)
        assert first == (2 if seg.first else 0)


def test_a_segment_depends_on_its_index_alone():
    streams = ordered_streams(tokens_of(101), 3, 4, context_len=6)
    in_order = list(streams)
    for i in np.random.default_rng(0).permutation(streams.n_segments).tolist() * 2:
        again = streams.segment(i)
        np.testing.assert_array_equal(again.inputs, in_order[i].inputs)
        np.testing.assert_array_equal(again.targets, in_order[i].targets)
        np.testing.assert_array_equal(again.weights, in_order[i].weights)
        np.testing.assert_array_equal(again.starts, in_order[i].starts)
        assert again.first == in_order[i].first


class Watched(np.ndarray):
    """An array that records which tokens are read.

    In the test, the token at index n is n, so that tokens show which indices were read.
    """

    read: set

    def take(self, indices, mode):  # type: ignore[override]
        found = np.asarray(self).take(indices, mode=mode)
        self.read.update(found.ravel().tolist())
        return found


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("context_len", [0, 2, 20])
def test_only_the_rows_that_are_asked_for_are_read(drop_remainder, context_len):
    tokens = np.arange(100).view(Watched)
    tokens.read = set()
    streams = ordered_streams(tokens, 4, 6, drop_remainder, context_len=context_len)
    whole = streams.segment(2)
    tokens.read.clear()
    part = streams.segment(2, rows=slice(1, 3))
    np.testing.assert_array_equal(part.inputs, whole.inputs[1:3])
    np.testing.assert_array_equal(part.targets, whole.targets[1:3])
    np.testing.assert_array_equal(part.weights, whole.weights[1:3])
    assert tokens.read == {*range(37 - context_len, 44), *range(62 - context_len, 69)}


def test_tokens_may_be_memory_mapped(tmp_path):
    np.save(tmp_path / "a.npy", tokens_of(40))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    for got, want in zip(segments(mapped, 2, 5), segments(tokens_of(40), 2, 5), strict=True):
        np.testing.assert_array_equal(got.targets, want.targets)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"batch_size": 10},
            "batch_size = 10: the text has 10 tokens, too few for a target in each stream; use a"
            " batch of at most 9, or a longer text",
        ),
        (
            {"batch_size": 6, "drop_remainder": True},
            "batch_size = 6: the text has 10 tokens, too few for a target in each stream; use a"
            " batch of at most 5, or a longer text",
        ),
        ({"batch_size": 0}, "batch_size = 0: must be at least 1"),
        ({"seg_len": 0}, "seg_len = 0: must be at least 1"),
        ({"context_len": -1}, "context_len = -1: must be at least 0"),
        (
            {"split": np.zeros((2, 5), int)},
            "the text has shape (2, 5) and type int64: must be 1-D integers",
        ),
        (
            {"split": np.zeros(5)},
            "the text has shape (5,) and type float64: must be 1-D integers",
        ),
        (
            {"split": np.zeros(0, int)},
            "batch_size = 1: the text has 0 tokens, too few for a target in each stream; use a"
            " longer text",
        ),
        (
            {"vocab_size": 9},
            "the text[9] = 9: a token id must be from 0 to 8, because the vocabulary has 9 symbols",
        ),
        (
            {"split": np.array([0, 1, -1]), "vocab_size": 9},
            "the text[2] = -1: a token id must be from 0 to 8, because the vocabulary has 9"
            " symbols",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_segment(arguments, message):
    good = {"split": np.arange(10), "batch_size": 1, "seg_len": 3, "name": "the text"}
    with pytest.raises(DataError) as error:
        ordered_streams(**good | arguments)
    assert str(error.value) == message


def test_segments_refuses_at_the_call_and_not_at_the_first_step():
    with pytest.raises(DataError, match="batch_size = 3"):
        segments(np.arange(3), 3, 1)


@pytest.mark.parametrize("index", [-1, 4])
def test_there_is_no_segment_outside_of_the_pass(index):
    with pytest.raises(IndexError, match=f"segment {index}: there are 4 segments, counted from 0"):
        ordered_streams(np.arange(21), 2, 3).segment(index)


# --------------------------------------------------------------------------------------
# Rolled streams.


def rolled(tokens, b, t, seed, context_len=0):
    return shuffled_streams(tokens, b, t, seed, partial_shuffle=True, context_len=context_len)


def shuffled_rows(n, batch_size, streams, epoch):
    """Returns tokens 0 .. n-1 as rows, each rotated by the shift that ``streams`` drew for it.

    NVIDIA's code shuffles rows in this way.
    """
    size = n // batch_size
    rows = [list(range(b * size, (b + 1) * size)) for b in range(batch_size)]
    shifts = [streams.order.shift(epoch, b) for b in range(batch_size)]
    return [row[shift:] + row[:shift] for row, shift in zip(rows, shifts, strict=True)]


@pytest.mark.parametrize("context_len", [0, 5])
def test_partially_shuffled_streams_are_nvidias_rows_cut_as_any_text(context_len):
    for n, b, t in [(29, 3, 4), (30, 5, 1), (101, 4, 64), (40, 2, 20), (16, 8, 3)]:
        streams = rolled(np.arange(n), b, t, 7, context_len)
        for epoch in range(5):
            text = np.concatenate(shuffled_rows(n, b, streams, epoch))
            plain = ordered_streams(text, b, t, True, context_len=context_len)
            for i, want in enumerate(plain):
                got = streams.at_step(epoch * plain.n_segments + i)
                for name in ("inputs", "targets", "weights", "starts", "first"):
                    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_every_shift_is_as_likely_and_streams_are_shifted_apart():
    streams = rolled(np.arange(60), 3, 5, 0)
    shifts = np.array([[streams.order.shift(e, b) for b in range(3)] for e in range(2000)])
    for b in range(3):
        counts = np.bincount(shifts[:, b], minlength=20)
        assert len(counts) == 20
        assert np.min(counts) > 60  # expected: 100 for each shift (standard deviation 10)
        assert np.max(counts) < 140
        assert np.mean(shifts[1:, b] == shifts[:-1, b]) < 0.1
        assert np.mean(shifts[:, b] == shifts[:, b - 1]) < 0.1
    other = rolled(np.arange(60), 3, 5, 1)
    assert np.mean([other.order.shift(e, 0) == shifts[e, 0] for e in range(500)]) < 0.1


def test_shuffled_segments_depend_on_the_step_alone():
    make = lambda: rolled(np.arange(101), 3, 4, 2, 6)
    streams = make()
    steps = 3 * streams.n_segments
    in_order = [streams.at_step(step) for step in range(steps)]
    for step in np.random.default_rng(0).permutation(steps).tolist():
        np.testing.assert_array_equal(streams.at_step(step).inputs, in_order[step].inputs)
        part = make().at_step(step, rows=slice(1, 3))
        np.testing.assert_array_equal(part.inputs, in_order[step].inputs[1:3])
        np.testing.assert_array_equal(part.targets, in_order[step].targets[1:3])


def test_epochs_are_counted_in_segments():
    streams = ordered_streams(np.arange(100), 3, 4, True)
    assert [streams.epochs(step) for step in (0, 4, 8, 18)] == [0, 0.5, 1, 2.25]


def test_ids_that_fit_are_accepted():
    assert ordered_streams(np.arange(10), 2, 3, vocab_size=10).n_targets == 9


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "int64", "uint64"])
def test_tokens_and_sizes_of_any_integer_type_give_the_segments_of_int32(dtype):
    """The input is a text, documents or sentences, with more tokens than int8 can count."""
    tokens = np.arange(1000, dtype=np.int32) % 100
    edges = np.array([0, 40, 90, 127])
    size = np.dtype(dtype).type(3)
    kinds = [
        lambda cast: cast(tokens),
        lambda cast: txl_jax.Pieces(cast(tokens), cast(edges)),
        lambda cast: txl_jax.Pieces(cast(tokens[:128]), cast(edges[:3]), True, "sentences"),
    ]
    for kind in kinds:
        got = list(txl_jax.segments(kind(lambda x: x.astype(dtype)), size, np.int8(4)))
        want = list(txl_jax.segments(kind(lambda x: x.astype(np.int32)), 3, 4))
        assert len(got) == len(want)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.inputs.dtype == ours.targets.dtype == np.int32
            np.testing.assert_array_equal(ours.inputs, theirs.inputs)
            np.testing.assert_array_equal(ours.targets, theirs.targets)
            np.testing.assert_array_equal(ours.weights, theirs.weights)


def test_ids_beyond_int32_and_sizes_that_are_no_integers_are_refused():
    ids = np.array([1, 2**32 + 3, 5])
    for split in (
        ids,
        txl_jax.Pieces(ids, np.array([0])),
        txl_jax.Pieces(ids, np.array([0]), True, "sentences"),
    ):
        with pytest.raises(DataError, match=r"\[1\] = 4294967299: a token id must be from 0 to"):
            txl_jax.segments(split, 1, 2)
    with pytest.raises(DataError, match=r"batch_size = 2\.0: must be an integer"):
        txl_jax.segments(np.arange(9), 2.0, 2)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"starts has shape .* float64: must be 1-D integers"):
        txl_jax.Pieces(np.arange(9), np.array([0.0, 4.5]))
