"""The model gives what the formulas give (tests/reference.py), in every form it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny_models as tiny

MEM_LEN, SEG_LEN = 5, 4
FILLED = (0, 2, 5)

CHANGES: dict[str, dict] = {
    "post_norm": {},
    "pre_norm": {"pre_lnorm": True},
    "window_pytorch": {"same_length": "pytorch"},
    "window_tf": {"same_length": "tf"},
    "clamp": {"clamp_len": 2},
    "untied_u_v": {"untie_r": True},
    "untied_softmax": {"tie_weight": False},
    "all_at_once": {
        "pre_lnorm": True,
        "same_length": "pytorch",
        "clamp_len": 3,
        "untie_r": True,
        "tie_weight": False,
    },
}
CHANGES["all_at_once_tf"] = {**CHANGES["all_at_once"], "same_length": "tf"}
FORMS = {name: tiny.config(**changes) for name, changes in CHANGES.items()}


def expected(cfg, params, tokens, targets, memory, mem_len, resets=None, lengths=None):
    """Losses of the real positions and new memory, row by row, from the formulas."""
    losses, states = [], []
    for b in range(len(tokens)):
        real = slice(0, None if lengths is None else lengths[b])
        past, starts = memory[b], np.array([], int)
        if resets is not None and resets.ndim == 1 and resets[b]:
            past = [[] for _ in past]
        if resets is not None and resets.ndim == 2:
            starts = np.flatnonzero(resets[b, real])
        row = reference.nll(
            params, cfg, tokens[b, real], targets[b, real], past, mem_len, list(starts)
        )
        losses.append(row[0])
        states.append(row[1])
    return losses, states


def run_segments(cfg, mem_len, filled, segments, seg_len=SEG_LEN, seed=0):
    """Runs model and reference side by side; ``segments`` are keywords for each segment."""
    usual = (mem_len, seg_len, len(filled)) == (MEM_LEN, SEG_LEN, len(FILLED))
    nll = (tiny.apply if usual else tiny.compiled)(cfg, "nll")
    params = reference.float64(jax.tree.map(np.asarray, tiny.variables(cfg)["params"]))
    mems = tiny.memory(cfg, filled, mem_len)
    past = [[list(layer) for layer in tiny.real_states(mems, b)] for b in range(len(filled))]
    for i, extra in enumerate(segments):
        tokens, targets = tiny.tokens(cfg, 2 * len(filled), seg_len, seed + i).reshape(
            2, -1, seg_len
        )
        losses, mems = nll(tiny.variables(cfg), tokens, targets, mems, **extra)
        want, past = expected(
            cfg, params, tokens, targets, past, mem_len, extra.get("reset"), extra.get("lengths")
        )
        for b, row in enumerate(want):
            where = f"segment {i}, row {b}"
            np.testing.assert_allclose(losses[b, : len(row)], row, atol=2e-5, err_msg=where)
            assert int(mems.filled[b]) == len(past[b][0]), where
            states = np.array(past[b]).reshape(cfg.n_layer, len(past[b][0]), cfg.d_model)
            np.testing.assert_allclose(
                tiny.real_states(mems, b), states, atol=2e-5, err_msg=f"memory, {where}"
            )


@pytest.mark.parametrize("name", FORMS)
def test_three_segments_with_unequal_memories_equal_the_formulas(name):
    run_segments(FORMS[name], MEM_LEN, FILLED, [{}, {}, {}])


@pytest.mark.parametrize("name", ["post_norm", "all_at_once_tf"])
def test_without_memory_equals_the_formulas(name):
    run_segments(FORMS[name], 0, (0, 0), [{}, {}])


@pytest.mark.parametrize("name", ["post_norm", "window_pytorch"])
def test_segment_longer_than_memory_equals_the_formulas(name):
    run_segments(FORMS[name], 2, (1, 2), [{}, {}], seg_len=7)


@pytest.mark.parametrize("name", ["post_norm", "all_at_once"])
def test_reset_of_streams_equals_the_formulas(name):
    run_segments(FORMS[name], MEM_LEN, FILLED, [{"reset": np.array([True, False, True])}] * 2)


@pytest.mark.parametrize("name", ["post_norm", "all_at_once"])
def test_reset_inside_the_segment_equals_the_formulas(name):
    rng = np.random.default_rng(0)
    resets = [{"reset": rng.random((3, SEG_LEN)) < 0.3} for _ in range(4)]
    run_segments(FORMS[name], MEM_LEN, FILLED, resets)


@pytest.mark.parametrize("name", ["post_norm", "all_at_once"])
def test_lengths_equal_the_formulas_on_the_real_tokens(name):
    lengths = ([4, 1, 3], [0, 4, 2], [2, 2, 4])
    segments = [{"lengths": np.array(n, np.int32)} for n in lengths]
    run_segments(FORMS[name], MEM_LEN, FILLED, segments)


@pytest.mark.parametrize("name", ["post_norm", "all_at_once"])
def test_lengths_with_resets_in_the_segment_and_its_padding_equal_the_formulas(name):
    rng = np.random.default_rng(1)
    segments = [
        {
            "lengths": rng.integers(0, SEG_LEN + 1, 3).astype(np.int32),
            "reset": rng.random((3, SEG_LEN)) < 0.4,
        }
        for _ in range(5)
    ]
    run_segments(FORMS[name], MEM_LEN, FILLED, segments)


def test_gradient_is_the_slope_of_the_formulas_with_memory_held_constant():
    """Along random directions, by central differences in float64."""
    cfg = FORMS["all_at_once"]
    params = tiny.variables(cfg)["params"]
    mems = tiny.memory(cfg, FILLED, MEM_LEN)
    tokens, targets = tiny.tokens(cfg, 6, SEG_LEN).reshape(2, 3, SEG_LEN)
    loss = lambda p: jnp.sum(tiny.apply(cfg, "nll")({"params": p}, tokens, targets, mems)[0])
    gradient = reference.float64(jax.tree.map(np.asarray, tiny.quick(jax.grad(loss))(params)))

    past = [[list(layer) for layer in tiny.real_states(mems, b)] for b in range(3)]
    rng = np.random.default_rng(0)
    for _ in range(2):
        direction = jax.tree.map(lambda g: rng.standard_normal(g.shape), gradient)
        ends = []
        for step in (1e-5, -1e-5):
            moved = jax.tree.map(
                lambda p, d, s=step: p + s * d, reference.float64(params), direction
            )
            losses, _ = expected(cfg, moved, tokens, targets, past, MEM_LEN)
            ends.append(sum(sum(row) for row in losses))
        slope = (ends[0] - ends[1]) / 2e-5
        inner = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradient, direction)))
        np.testing.assert_allclose(inner, slope, rtol=2e-5, atol=2e-4)
