"""Attention masks, compared with small matrices that are written by hand (1: allowed)."""

import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.model.masks import BothWaysMask, attention_mask, since_reset


def drawn(*rows):
    """A mask [T,K] from rows of text, in which blanks are ignored."""
    return np.array([[mark == "1" for mark in row.replace(" ", "")] for row in rows])


def mask(seg_len, filled, mem_len, window=False, reset=None):
    reset = None if reset is None else jnp.asarray(reset)
    return np.asarray(
        attention_mask(seg_len, jnp.asarray(filled), mem_len, window, reset=reset).allowed()
    )


def test_causal_mask_sees_all_memory_and_no_future():
    want = drawn("111 1..", "111 11.", "111 111")
    np.testing.assert_array_equal(mask(3, [3], 3)[0], want)


def test_without_memory_the_mask_is_a_triangle():
    np.testing.assert_array_equal(mask(3, [0], 0)[0], drawn("1..", "11.", "111"))


def test_unfilled_slots_are_masked_row_by_row():
    got = mask(2, [0, 1, 3], 3)
    np.testing.assert_array_equal(got[0], drawn("... 1.", "... 11"))
    np.testing.assert_array_equal(got[1], drawn("..1 1.", "..1 11"))
    np.testing.assert_array_equal(got[2], drawn("111 1.", "111 11"))


def test_window_pytorch_sees_m_positions_itself_included():
    want = drawn(".11 1..", "..1 11.", "... 111")
    np.testing.assert_array_equal(mask(3, [3], 3, "pytorch")[0], want)


def test_window_tf_sees_m_positions_and_itself():
    want = drawn("111 1..", ".11 11.", "..1 111")
    np.testing.assert_array_equal(mask(3, [3], 3, "tf")[0], want)


def test_windows_hold_while_memory_fills_and_inside_a_long_segment():
    want = drawn(".. 1....", ".. 11...", ".. .11..", ".. ..11.", ".. ...11")
    np.testing.assert_array_equal(mask(5, [0], 2, "pytorch")[0], want)
    want = drawn(".. 1....", ".. 11...", ".. 111..", ".. .111.", ".. ..111")
    np.testing.assert_array_equal(mask(5, [0], 2, "tf")[0], want)


def test_window_tf_without_memory_sees_itself_alone():
    np.testing.assert_array_equal(mask(3, [0], 0, "tf")[0], drawn("1..", ".1.", "..1"))


def test_window_pytorch_without_memory_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"same_length='pytorch'.*mem_len is 0.*'tf' or False"):
        attention_mask(5, jnp.zeros(1, jnp.int32), 0, "pytorch")


def test_nothing_attends_across_a_reset_inside_the_segment():
    got = mask(4, [2, 2, 2], 2, reset=[[0, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]])
    np.testing.assert_array_equal(got[0], drawn("11 1...", "11 11..", ".. ..1.", ".. ..11"))
    np.testing.assert_array_equal(got[1], drawn(".. 1...", ".. 11..", ".. 111.", ".. ...1"))
    np.testing.assert_array_equal(got[2], drawn("11 1...", "11 11..", "11 111.", "11 1111"))


def test_windows_and_resets_and_empty_slots_together():
    got = mask(3, [1], 2, "tf", reset=[[0, 1, 0]])
    np.testing.assert_array_equal(got[0], drawn(".1 1..", ".. .1.", ".. .11"))


@pytest.mark.parametrize("window", [False, "pytorch", "tf"])
def test_every_query_sees_itself_so_no_row_is_empty(window):
    rng = np.random.default_rng(0)
    got = mask(6, [0, 1, 3], 3, window, reset=rng.random((3, 6)) < 0.5)
    assert got[:, np.arange(6), 3 + np.arange(6)].all()


def test_since_reset_counts_real_tokens_from_the_last_reset():
    reset = jnp.array([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]], bool)
    np.testing.assert_array_equal(since_reset(reset), [2, -1, 5, 1])


def test_since_reset_ignores_resets_in_the_padding():
    reset = jnp.array([[0, 1, 0, 1, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(since_reset(reset, jnp.array([3, 4, 0])), [2, -1, -1])


@pytest.mark.parametrize("window", [False, "tf", "pytorch"])
def test_a_query_sees_the_keys_from_the_first_to_the_last_of_its_interval(window):
    rng = np.random.default_rng(0)
    filled = jnp.array([0, 1, 4, 7])
    reset = jnp.asarray(rng.random((4, 9)) < 0.3).at[0].set(False).at[1, 0].set(True)
    for starts in (None, reset):
        mask = attention_mask(9, filled, 7, window, starts)
        oldest, newest = mask.interval()
        key = np.arange(mask.n_keys)
        seen = (key >= oldest[:, :, None]) & (key <= newest[:, :, None])
        np.testing.assert_array_equal(seen, mask.allowed())
        for bound in (oldest, newest):  # sorted: binary searches and bounds of tiles need this
            assert bound.dtype == jnp.int32
            assert (np.diff(bound, axis=1) >= 0).all()


def test_both_directions_see_the_window_around_and_no_padding():
    mask = BothWaysMask(jnp.array([4, 2, 0]), None, 4, 2, 1)
    real = ["011100", "001110", "000111", "000011"]
    padded = ["011100", "001100", "000010", "000001"], ["001000", "000100", "000010", "000001"]
    rows = [[[int(x) for x in row] for row in of_row] for of_row in (real, *padded)]
    np.testing.assert_array_equal(mask.allowed(), np.asarray(rows, bool))
    for bound in mask.interval():
        assert (np.diff(bound, axis=1) >= 0).all()
