"""Rows of a batch are independent of each other, also with resets and unequal lengths."""

import jax
import numpy as np
import pytest
import tiny_models as tiny

CFG = tiny.config()
WITH_MEMORY = {
    "post_norm": CFG,
    "pre_norm_window": tiny.config(pre_lnorm=True, same_length="tf", untie_r=True, clamp_len=3),
    "shaw": tiny.config(**tiny.attention("shaw")),
    "shared_projection": tiny.config(**tiny.attention("shared_projection", pre_lnorm=True)),
}
FORMS = {
    **WITH_MEMORY,
    "absolute": tiny.config(**tiny.attention("absolute", pre_lnorm=True)),
    "absolute_per_layer": tiny.config(**tiny.attention("absolute_per_layer")),
}
FILLED, MEM_LEN, SEG_LEN = (0, 2, 5), 5, 4


def segment(cfg, seed=0):
    """Tokens, targets, and a memory whose rows are filled unequally."""
    tokens, targets = tiny.tokens(cfg, 6, SEG_LEN, seed).reshape(2, 3, SEG_LEN)
    return tokens, targets, tiny.memory(cfg, FILLED, MEM_LEN, seed)


def run(cfg, tokens, targets, mems, **extra):
    return tiny.apply(cfg, "nll")(tiny.variables(cfg), tokens, targets, mems, **extra)


def row_of(mems, b):
    return jax.tree.map(
        np.asarray, mems.replace(hidden=mems.hidden[:, [b]], filled=mems.filled[[b]])
    )


def fresh(cfg):
    return tiny.memory(cfg, (0, 0, 0), MEM_LEN, seed=5)  # no slot is filled: contents are ignored


def alone(cfg, tokens, targets, mems, b, **extra):
    """Runs row b in a batch of its own."""
    return run(cfg, tokens[[b]], targets[[b]], row_of(mems, b), **extra)


def assert_same_memory(got, row, want, want_row, atol=1e-5):
    assert int(got.filled[row]) == int(want.filled[want_row])
    np.testing.assert_allclose(
        tiny.real_states(got, row), tiny.real_states(want, want_row), atol=atol
    )


@pytest.mark.parametrize("name", FORMS)
def test_a_row_is_the_same_alone_and_in_a_batch(name):
    cfg = FORMS[name]
    tokens, targets, mems = segment(cfg)
    nll, new = run(cfg, tokens, targets, mems)
    for b in range(3):
        nll_alone, new_alone = alone(cfg, tokens, targets, mems, b)
        np.testing.assert_allclose(nll[b], nll_alone[0], atol=1e-5)
        assert_same_memory(new, b, new_alone, 0)


@pytest.mark.parametrize("name", FORMS)
def test_batch_mates_change_no_bit_of_a_row(name):
    cfg = FORMS[name]
    tokens, targets, mems = segment(cfg)
    others, other_targets, other_mems = segment(cfg, seed=1)
    others[1], other_targets[1] = tokens[1], targets[1]
    other_mems.hidden[:, 1] = mems.hidden[:, 1]
    other_mems.filled[:] = mems.filled[::-1]
    nll, new = run(cfg, tokens, targets, mems)
    nll_others, new_others = run(cfg, others, other_targets, other_mems)
    np.testing.assert_array_equal(nll[1], nll_others[1])
    assert_same_memory(new, 1, new_others, 1, atol=0)
    assert np.abs(nll[0] - nll_others[0]).max() > 1e-3


def test_permuted_rows_give_permuted_results():
    tokens, targets, mems = segment(CFG)
    order = np.array([2, 0, 1])
    nll, new = run(CFG, tokens, targets, mems)
    moved = mems.replace(hidden=mems.hidden[:, order], filled=mems.filled[order])
    nll_moved, new_moved = run(CFG, tokens[order], targets[order], moved)
    np.testing.assert_allclose(nll_moved, nll[order], atol=1e-6)
    for position, b in enumerate(order):
        assert_same_memory(new_moved, position, new, b, atol=1e-6)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_reset_of_a_stream_equals_a_fresh_start_and_leaves_the_other_rows(name):
    cfg = FORMS[name]
    tokens, targets, mems = segment(cfg)
    nll, new = run(cfg, tokens, targets, mems, reset=np.array([False, False, True]))
    kept, new_kept = run(cfg, tokens, targets, mems)
    started, new_started = run(cfg, tokens, targets, fresh(cfg))
    np.testing.assert_array_equal(nll[2], started[2])
    assert_same_memory(new, 2, new_started, 2, atol=0)
    for b in (0, 1):
        np.testing.assert_array_equal(nll[b], kept[b])
        assert_same_memory(new, b, new_kept, b, atol=0)
    assert np.abs(nll[2] - kept[2]).max() > 1e-3


@pytest.mark.integration
@pytest.mark.parametrize("name", FORMS)
def test_reset_inside_a_segment_equals_cutting_the_row_there(name):
    cfg = FORMS[name]
    tokens, targets, mems = segment(cfg)
    reset = np.array([[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    nll, new = run(cfg, tokens, targets, mems, reset=reset)
    kept, new_kept = run(cfg, tokens, targets, mems)
    np.testing.assert_allclose(nll[1, :2], kept[1, :2], atol=1e-6)
    started, new_started = alone(cfg, tokens[:, 2:], targets[:, 2:], fresh(cfg), 1)
    np.testing.assert_allclose(nll[1, 2:], started[0], atol=1e-5)
    assert int(new.filled[1]) == min(2, mems.mem_len)
    assert_same_memory(new, 1, new_started, 0)
    for b in (0, 2):
        np.testing.assert_allclose(nll[b], kept[b], atol=1e-6)
        assert_same_memory(new, b, new_kept, b, atol=1e-6)


def test_reset_at_the_first_position_equals_reset_of_the_stream():
    tokens, targets, mems = segment(CFG)
    streams = np.array([True, False, True])
    positions = np.zeros((3, SEG_LEN), bool)
    positions[:, 0] = streams
    nll, new = run(CFG, tokens, targets, mems, reset=streams)
    nll_positions, new_positions = run(CFG, tokens, targets, mems, reset=positions)
    np.testing.assert_allclose(nll_positions, nll, atol=1e-6)
    for b in range(3):
        assert_same_memory(new_positions, b, new, b, atol=1e-6)


def test_several_resets_in_a_row_leave_only_the_last_episode_in_memory():
    tokens, targets, mems = segment(CFG)
    reset = np.ones((3, SEG_LEN), bool)
    _, new = run(CFG, tokens, targets, mems, reset=reset)
    np.testing.assert_array_equal(new.filled, [1, 1, 1])


@pytest.mark.parametrize("name", FORMS)
def test_a_right_padded_row_equals_the_unpadded_row_alone(name):
    cfg = FORMS[name]
    tokens, targets, mems = segment(cfg)
    lengths = np.array([2, 4, 2], np.int32)
    nll, new = run(cfg, tokens, targets, mems, lengths=lengths)
    for b in (0, 2):
        want, new_alone = alone(cfg, tokens[:, :2], targets[:, :2], mems, b)
        np.testing.assert_allclose(nll[b, :2], want[0], atol=1e-5)
        assert_same_memory(new, b, new_alone, 0)
    np.testing.assert_array_equal(new.filled, np.minimum(mems.filled + lengths, mems.mem_len))


def test_padding_tokens_change_no_bit_of_the_real_positions_or_of_memory():
    tokens, targets, mems = segment(CFG)
    lengths = np.array([1, 3, 0], np.int32)
    padding = np.arange(SEG_LEN) >= lengths[:, None]
    nll, new = run(CFG, tokens, targets, mems, lengths=lengths)
    other, new_other = run(
        CFG, np.where(padding, 12 - tokens, tokens), targets, mems, lengths=lengths
    )
    np.testing.assert_array_equal(np.where(padding, 0, nll), np.where(padding, 0, other))
    for b in range(3):
        assert_same_memory(new, b, new_other, b, atol=0)


def test_a_row_without_real_tokens_keeps_its_memory():
    tokens, targets, mems = segment(CFG)
    nll, new = run(CFG, tokens, targets, mems, lengths=np.zeros(3, np.int32))
    np.testing.assert_array_equal(new.hidden, mems.hidden)
    np.testing.assert_array_equal(new.filled, FILLED)
    assert np.isfinite(nll).all()


def test_full_lengths_and_no_reset_equal_leaving_both_out():
    tokens, targets, mems = segment(CFG)
    nll, new = run(CFG, tokens, targets, mems)
    for reset in (np.zeros(3, bool), np.zeros((3, SEG_LEN), bool)):
        lengths = np.full(3, SEG_LEN, np.int32)
        got, new_got = run(CFG, tokens, targets, mems, reset=reset, lengths=lengths)
        np.testing.assert_allclose(got, nll, atol=1e-6)
        for b in range(3):
            assert_same_memory(new_got, b, new, b, atol=1e-6)
