"""Random segment lengths have the published distribution; an epoch contains each target once."""

import threading

import numpy as np
import pytest
from scipy import stats

from txl_jax.data.streams import DrawnLengths, drawn_lengths, shuffled_streams

N, B, T, STD = 1003, 3, 12, 2.0
FIELDS = ("inputs", "targets", "weights", "starts")


def drawn(context_len=0, seed=0, partial_shuffle=False):
    tokens, options = np.arange(1, N + 1), {"context_len": context_len, "vocab_size": N + 1}
    return shuffled_streams(tokens, B, T, seed, STD, partial_shuffle, **options)


def epochs_of(streams, n):
    """Returns one list of segments for each of the first n epochs, in the order of training."""
    found: list[list] = [[]]
    step = 0
    while True:
        seg = streams.at_step(step)
        if seg.first and step:
            if len(found) == n:
                return found
            found.append([])
        found[-1].append(seg)
        step += 1


@pytest.mark.parametrize("context_len", [0, 7, 40])
def test_every_target_of_an_epoch_comes_once_and_in_order(context_len):
    numbers = set()
    for segments in epochs_of(drawn(context_len), 8):
        numbers.add(len(segments))
        for b in range(B):
            row = range(1 + b * (N // B), 1 + (b + 1) * (N // B))
            given, scored = [], []
            for seg in segments:
                real = seg.weights[b] > 0
                given += seg.inputs[b, context_len:][real].tolist()
                scored += seg.targets[b, real].tolist()
            assert given == list(row)[:-1]
            assert scored == list(row)[1:]
        assert [seg.first for seg in segments] == [True] + [False] * (len(segments) - 1)
    assert len(numbers) > 1, "epochs differ in their number of segments"


@pytest.mark.parametrize("context_len", [0, 7, 40])
def test_context_is_the_streams_own_text_before_the_segment(context_len):
    for segments in epochs_of(drawn(context_len), 2):
        text = np.zeros((B, 0), np.int32)
        for seg in segments:
            n = int(seg.weights[0].sum())
            known = text[:, max(text.shape[1] - context_len, 0) :]
            pad = context_len - known.shape[1]
            assert not seg.inputs[:, :pad].any()
            np.testing.assert_array_equal(seg.inputs[:, pad:context_len], known)
            begins = text.shape[1] <= context_len
            assert np.argwhere(seg.starts).tolist() == [[b, pad] for b in range(B)] * begins
            text = np.concatenate([text, seg.inputs[:, context_len : context_len + n]], axis=1)


def test_arrays_have_one_shape_and_padding_is_on_the_right():
    streams = drawn(context_len=4)
    assert streams.width == T + 6
    lengths = set()
    for seg in epochs_of(streams, 3)[0]:
        assert seg.inputs.shape == seg.starts.shape == (B, 4 + T + 6)
        assert seg.targets.shape == seg.weights.shape == (B, T + 6)
        n = int(seg.weights[0].sum())
        lengths.add(n)
        np.testing.assert_array_equal(seg.weights, np.tile(np.arange(T + 6) < n, (B, 1)))
        assert not seg.inputs[:, 4 + n :].any()
        assert not seg.targets[:, n:].any()
    assert len(lengths) > 5


def test_lengths_are_normal_with_one_in_twenty_around_the_half():
    found = drawn_lengths(seed=3, epoch=0, n=100_000, seg_len=70, std=5.0)
    assert found.max() == 85
    short = found < 52.5
    assert short.mean() == pytest.approx(0.05, abs=0.003)
    for lengths, mean in ((found[~short], 70), (found[short], 35)):
        assert lengths.mean() == pytest.approx(mean - 0.5, abs=0.3)  # rounded down, so 0.5 lower
        assert lengths.std() == pytest.approx(5, abs=0.3)  # a few were drawn around the other mean
    counts = [np.sum(found[~short] == n) for n in range(60, 81)]
    expected = np.diff(stats.norm.cdf(np.arange(60, 82), 70, 5)) * 95_000
    np.testing.assert_allclose(counts, expected, rtol=0.1)


def test_lengths_stay_within_their_limits():
    found = drawn_lengths(seed=0, epoch=0, n=20_000, seg_len=12, std=4.5)
    assert (found.min(), found.max()) == (5, 12 + 13)
    assert np.issubdtype(found.dtype, np.integer)


def test_every_epoch_and_seed_has_lengths_of_its_own():
    draws = [drawn_lengths(s, e, 200, 70, 5.0) for s, e in ((0, 0), (0, 1), (1, 0))]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.mean(draws[one] == draws[other]) < 0.2
    again = drawn_lengths(0, 0, 200, 70, 5.0)
    np.testing.assert_array_equal(again, draws[0])


@pytest.mark.parametrize("partial_shuffle", [False, True])
def test_segments_can_be_read_in_any_order(partial_shuffle):
    streams = drawn(3, partial_shuffle=partial_shuffle)
    steps = sum(len(segments) for segments in epochs_of(streams, 4))
    in_order = [streams.at_step(step) for step in range(steps)]
    asked = drawn(3, partial_shuffle=partial_shuffle)
    for step in np.random.default_rng(0).permutation(steps).tolist():
        fresh = drawn(3, partial_shuffle=partial_shuffle).at_step(step, rows=slice(1, 3))
        for name in FIELDS:
            want = getattr(in_order[step], name)
            np.testing.assert_array_equal(getattr(asked.at_step(step), name), want)
            np.testing.assert_array_equal(getattr(fresh, name), want[1:3])


def test_two_threads_may_ask_for_different_epochs():
    streams, expected = drawn(), [drawn().at_step(step).inputs for step in range(200)]
    wrong = []

    def ask(steps):
        for step in steps:
            if not np.array_equal(streams.at_step(step).inputs, expected[step]):
                wrong.append(step)

    orders = [np.random.default_rng(i).permutation(200).tolist() * 3 for i in range(4)]
    threads = [threading.Thread(target=ask, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_epochs_tell_the_share_of_the_text_that_was_read():
    streams, read = drawn(), 0
    for epoch, segments in enumerate(epochs_of(streams, 3)):
        for seg in segments:
            step = read
            assert streams.epochs(step) == pytest.approx(epoch + done(segments, seg))
            read += 1
    assert streams.epochs(read) == 3.0


def done(segments, seg):
    """Returns the fraction of an epoch's targets that come before ``seg``.

    ``segments`` are all segments of the epoch.
    """
    before = 0.0
    for other in segments:
        if other is seg:
            break
        before += other.weights[0].sum()
    return before / sum(other.weights[0].sum() for other in segments)


def test_partially_shuffled_streams_are_cut_by_the_same_lengths():
    plain, shuffled = drawn(), drawn(partial_shuffle=True)
    for step in range(3 * plain.n_segments):
        one, other = plain.at_step(step), shuffled.at_step(step)
        np.testing.assert_array_equal(one.weights, other.weights)
        assert one.first == other.first
    assert not np.array_equal(plain.at_step(0).inputs, shuffled.at_step(0).inputs)


def test_a_seek_far_ahead_is_fast():
    streams = shuffled_streams(np.zeros(929_589, np.int32), 10, 70, seed=0, seg_len_std=5.0)
    assert streams.at_step(166_250).inputs.shape == (10, 85)
    assert 120 < streams.epochs(166_250) < 123


def test_training_streams_have_lengths_drawn_only_if_asked():
    make = lambda std: shuffled_streams(np.arange(200), 2, 10, seed=1, seg_len_std=std)
    assert isinstance(make(1.0), DrawnLengths)
    assert not isinstance(make(0.0), DrawnLengths)
