"""Results do not depend on how a text is cut into segments.

With a ``same_length`` window this holds for any memory length M. Without a window it holds if the
memory is large enough for the text.
"""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax

TOTAL = 10
SEG_LEN = 4
FEW = hypothesis.settings(
    max_examples=6, deadline=None, derandomize=True, database=None, print_blob=False
)

# name: settings, and a memory length at which cuts do not matter
PROMISED = {
    "window_pytorch": (tiny.config(same_length="pytorch"), 3),
    "window_tf": (tiny.config(same_length="tf", clamp_len=2), 3),
    "no_window_everything_fits": (tiny.config(pre_lnorm=True), TOTAL),
    "shaw_window": (tiny.config(**tiny.attention("shaw", same_length="tf")), 3),
    "shared_projection_everything_fits": (
        tiny.config(**tiny.attention("shared_projection", clamp_len=4)),
        TOTAL,
    ),
}


def whole(cfg, mem_len):
    """A text, and its losses and new memory when run as one segment with an empty memory."""
    mems = txl_jax.TransformerXL(cfg).init_mems(2, mem_len)
    text = tiny.tokens(cfg, 2, TOTAL + 1)
    nll, mems = tiny.compiled(cfg, "nll")(tiny.variables(cfg), text[:, :-1], text[:, 1:], mems)
    return text, np.asarray(nll), mems


def assert_memories_equal(a, b):
    np.testing.assert_array_equal(a.filled, b.filled)
    for row in range(2):
        np.testing.assert_allclose(tiny.real_states(a, row), tiny.real_states(b, row), atol=1e-5)


KEPT = [(name, "memory") for name in PROMISED]
KEPT += [(name, "cache") for name in ("window_tf", "no_window_everything_fits", "shaw_window")]


@pytest.mark.parametrize(("name", "kept_as"), KEPT)
@pytest.mark.parametrize(
    "parts", [(5, 1, 1, 1, 1, 1), pytest.param((5, 5), marks=pytest.mark.integration)], ids=str
)
@pytest.mark.few(5)
def test_short_segments_with_memory_equal_one_long_segment(name, kept_as, parts):
    cfg, mem_len = PROMISED[name]
    text, want, final = whole(cfg, mem_len)
    model = txl_jax.TransformerXL(cfg)
    mems: Any = model.init_mems(2, mem_len)
    if kept_as == "cache":
        mems = model.apply(tiny.variables(cfg), mems, seg_len=5, method="init_cache")
    got, start = [], 0
    for part in parts:
        cut = slice(start, start + part)
        inputs, targets = text[:, :-1][:, cut], text[:, 1:][:, cut]
        nll, mems = tiny.compiled(cfg, "nll")(tiny.variables(cfg), inputs, targets, mems)
        got.append(nll)
        start += part
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, atol=1e-5)
    if kept_as == "memory":
        assert_memories_equal(mems, final)
    np.testing.assert_array_equal(mems.filled, final.filled)


@pytest.mark.integration
@pytest.mark.parametrize("name", PROMISED)
@FEW
@hypothesis.given(st.lists(st.tuples(*[st.integers(0, SEG_LEN)] * 2), max_size=4))
@pytest.mark.few(2)
def test_rows_cut_at_different_places_by_lengths_equal_one_long_segment(name, cuts):
    """``cuts`` lists the two rows' lengths in each of the first segments, padded to 4 tokens."""
    cfg, mem_len = PROMISED[name]
    text, want, final = whole(cfg, mem_len)
    mems = txl_jax.TransformerXL(cfg).init_mems(2, mem_len)
    cuts = [*cuts, *[(SEG_LEN, SEG_LEN)] * 3]  # then full segments, to the end of the text
    done = np.zeros(2, int)
    got = np.full((2, TOTAL), np.nan)
    for cut in cuts:
        lengths = np.minimum(cut, TOTAL - done).astype(np.int32)
        inputs = np.full((2, SEG_LEN), 12, np.int32)
        targets = np.full((2, SEG_LEN), 12, np.int32)
        for b, (start, n) in enumerate(zip(done, lengths, strict=True)):
            inputs[b, :n] = text[b, start : start + n]
            targets[b, :n] = text[b, start + 1 : start + n + 1]
        nll, mems = tiny.compiled(cfg, "nll")(
            tiny.variables(cfg), inputs, targets, mems, lengths=lengths
        )
        for b, (start, n) in enumerate(zip(done, lengths, strict=True)):
            got[b, start : start + n] = nll[b, :n]
        done += lengths
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert_memories_equal(mems, final)


def test_without_a_window_a_short_memory_does_change_the_result():
    """Here results depend on the cuts, which shows that the tests above can fail."""
    cfg = tiny.config(pre_lnorm=True)
    text, want, _ = whole(cfg, TOTAL)
    mems = txl_jax.TransformerXL(cfg).init_mems(2, 3)
    halves = []
    for cut in (slice(0, 5), slice(5, 10)):
        inputs, targets = text[:, :-1][:, cut], text[:, 1:][:, cut]
        nll, mems = tiny.compiled(cfg, "nll")(tiny.variables(cfg), inputs, targets, mems)
        halves.append(nll)
    np.testing.assert_allclose(halves[0], want[:, :5], atol=1e-5)
    assert np.abs(halves[1] - want[:, 5:]).max() > 1e-3
