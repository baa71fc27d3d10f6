"""Recomputed context together with a memory: no token is in both, and the context gets gradients.

Assume that the memory holds all tokens before the context, and that there is no dropout. Then each
token's loss equals its loss in a single segment with the whole text, for any length of the context.
"""

from typing import Any

import jax
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax
from txl_jax.config import MeshConfig, ProtocolConfig
from txl_jax.data.feed import training_batch
from txl_jax.data.streams import shuffled_streams
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.evaluation.protocols import keeps_cache
from txl_jax.parallel.mesh import make_mesh

CFG = tiny.config()
TOKENS = tiny.tokens(CFG, 1, 121)[0]
MODEL: Any = txl_jax.TransformerXL(CFG)


def nll_at_once(tokens):
    """Losses in nats of all tokens except the first, [N-1], with the text in one segment."""
    row, mems = tokens[None], MODEL.init_mems(1, 0)
    return np.asarray(
        tiny.apply(CFG, "nll")(tiny.variables(CFG), row[:, :-1], row[:, 1:], mems)[0][0]
    )


@pytest.mark.integration
@pytest.mark.parametrize("context_len", [3, 8, 20], ids=lambda c: f"context {c}")
@pytest.mark.parametrize("std", [0.0, 2.0], ids=["equal lengths", "drawn lengths"])
@pytest.mark.parametrize("roll", [False, True], ids=["", "partial shuffle"])
@pytest.mark.few(3)
def test_training_segments_are_read_as_the_whole_text(context_len, std, roll):
    """Segments have about 10 tokens, so a context of 20 tokens spans several segments.

    Memory ends where the context begins.
    """
    streams: Any = shuffled_streams(
        TOKENS, 3, 10, seed=5, context_len=context_len, seg_len_std=std, partial_shuffle=roll
    )
    stride = len(TOKENS) // 3
    mems = MODEL.init_mems(3, stride)
    got: list[list[float]] = [[], [], []]
    apply = jax.jit(
        lambda mems, batch: MODEL.apply(
            tiny.variables(CFG),
            batch.inputs,
            batch.targets,
            mems,
            method="nll",
            **batch.model_kwargs(True),
        )
    )
    step = 0
    while streams.epochs(step) < 2:
        if streams.epochs(step) == int(streams.epochs(step)):
            assert all(len(row) in (0, stride - 1) for row in got)
            got, epoch = [[], [], []], int(streams.epochs(step))
        batch = training_batch(streams, step, "reset")
        nll, mems = apply(mems, batch)
        for row in range(3):
            got[row] += np.asarray(nll)[row][batch.weights[row] > 0].tolist()
        step += 1
    for row in range(3):
        text = TOKENS[row * stride : (row + 1) * stride]
        text = np.roll(text, -streams.order.shift(epoch, row))
        np.testing.assert_allclose(got[row], nll_at_once(text), atol=2e-5)


@pytest.mark.integration
def test_memory_is_of_the_tokens_before_the_context_and_no_others():
    """The call reads tokens 0 to 7, and the next context is 6 and 7: memory keeps tokens 2 to 5."""
    apply = tiny.apply(CFG, "nll")
    variables = tiny.variables(CFG)
    row = TOKENS[None]
    mems = MODEL.init_mems(1, 4)
    _, mems = apply(variables, row[:, :8], row[:, 3:9], mems, context_len=2)
    assert mems.filled.tolist() == [4]
    _, plain = apply(variables, row[:, :6], row[:, 1:7], MODEL.init_mems(1, 4))
    np.testing.assert_allclose(mems.hidden, plain.hidden, atol=1e-6)  # of tokens 2 .. 5


@pytest.mark.parametrize(("at", "left"), [(3, 3), (5, 1), (6, 0), (7, 0)])
def test_of_an_episode_that_began_in_the_segment_memory_has_what_is_not_run_again(at, left):
    reset = np.arange(8)[None] == at
    _, mems = tiny.apply(CFG, "nll")(
        tiny.variables(CFG),
        TOKENS[None, :8],
        TOKENS[None, 3:9],
        tiny.memory(CFG, (4,), 4),
        reset=reset,
        context_len=2,
    )
    assert mems.filled.tolist() == [left]


def test_a_row_that_ends_within_the_context_leaves_memory_as_it_was():
    mems = tiny.memory(CFG, (3,), 4)
    _, after = tiny.apply(CFG, "nll")(
        tiny.variables(CFG),
        TOKENS[None, :8],
        TOKENS[None, 3:9],
        mems,
        lengths=np.array([1], np.int32),
        context_len=2,
    )
    assert after.filled.tolist() == [3]
    np.testing.assert_array_equal(after.hidden, mems.hidden)


@pytest.mark.integration
def test_gradients_are_those_of_a_longer_segment_whose_first_tokens_are_not_scored():
    variables, row = tiny.variables(CFG), TOKENS[None]
    _, mems = MODEL.apply(variables, row[:, :6], MODEL.init_mems(1, 4))
    read = lambda v, targets, **about: MODEL.apply(
        v, row[:, 6:13], targets, mems, method="nll", **about
    )[0]
    context = jax.grad(lambda v: read(v, row[:, 10:14], context_len=3).sum())(variables)
    longer = jax.grad(lambda v: read(v, row[:, 7:14])[:, 3:].sum())(variables)
    for want, got in zip(jax.tree.leaves(longer), jax.tree.leaves(context), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.integration
def test_memory_may_be_emptied_and_the_context_kept():
    streams = shuffled_streams(TOKENS, 2, 10, seed=5, context_len=4)
    kept, emptied = (training_batch(streams, 2, "carry", every) for every in (0, 2))
    assert not kept.reset.any()
    assert emptied.reset.tolist() == [[True] + [False] * 13] * 2
    model = MODEL.apply
    _, full = model(tiny.variables(CFG), TOKENS[None, :9].repeat(2, 0), MODEL.init_mems(2, 8))
    read = lambda batch, mems: model(
        tiny.variables(CFG),
        batch.inputs,
        batch.targets,
        mems,
        method="nll",
        **batch.model_kwargs(True),
    )
    got, after = read(emptied, full)
    want, _ = read(kept, MODEL.init_mems(2, 8))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert after.filled.tolist() == [8, 8]
    assert not np.allclose(read(kept, full)[0], want, atol=1e-3)


@pytest.mark.integration
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.few(1)
def test_scoring_with_both_is_scoring_the_text_whole(streams):
    protocol = ProtocolConfig(batch_size=streams, seg_len=8, mem_len=128, context_len=5)
    mesh = make_mesh(MeshConfig(data=1), CFG, batch_size=streams)
    params = tiny.variables(CFG)["params"]
    evaluator = Evaluator(CFG, protocol, TOKENS, mesh)
    assert not keeps_cache(evaluator.model.cfg, protocol)
    want = np.concatenate(
        [nll_at_once(TOKENS[i : i + 120 // streams + 1]) for i in range(0, 120, 120 // streams)]
    )
    score = evaluator.run(params)
    assert score is not None
    assert score.loss == pytest.approx(want.mean(), abs=1e-5)
