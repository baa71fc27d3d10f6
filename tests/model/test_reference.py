"""The model equals the formulas of helpers/reference.py, in every configuration."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import model_settings
import numpy as np
import pytest
import reference
import tiny_models as tiny
from tiers import rest_integration, rest_slow

import txl_jax
from txl_jax.config import ConfigError
from txl_jax.model.layout import stack_layers

MEM_LEN, SEG_LEN = 5, 4
FILLED = (0, 2, 5)

ALL_AT_ONCE: dict[str, Any] = {
    "pre_lnorm": True,
    "same_length": "pytorch",
    "clamp_len": 3,
    "tie_weight": False,
}

CHANGES: dict[str, dict] = {
    "post_norm": {},
    "pre_norm": {"pre_lnorm": True},
    "window_pytorch": {"same_length": "pytorch"},
    "window_tf": {"same_length": "tf"},
    "clamp": {"clamp_len": 2},
    "untied_u_v": {"untie_r": True},
    "untied_softmax": {"tie_weight": False},
    "epsilon": {"norm_epsilon": 0.3},
    "gelu": {"activation": "gelu"},
    "attention_bias": {"attention_bias": True},
    "final_norm": {"pre_lnorm": True, "final_norm": True},
    "gates": {"gate": "gru"},
    "gtrxl": {**ALL_AT_ONCE, **tiny.GTRXL},
    "all_at_once": {**ALL_AT_ONCE, "untie_r": True},
    "all_at_once_tf": {**ALL_AT_ONCE, "untie_r": True, "same_length": "tf"},
}
for name in [form for form in tiny.ATTENTION if form != "relative"]:
    without_memory = {"same_length": False, "clamp_len": 2}  # a segment reaches distance 3
    changes = ALL_AT_ONCE | (without_memory if name.startswith("absolute") else {})
    CHANGES[name] = tiny.attention(name)
    CHANGES[f"{name}_all_at_once"] = tiny.attention(name, **changes)

SOFTMAX: dict[str, dict] = {
    "narrow": {"d_embed": 5},
    "wide_tied_projection": {"d_embed": 9, "tie_projs": (True,)},
    "clusters": {"cutoffs": (4, 9)},
    "clusters_untied": {"cutoffs": (4, 9), "tie_weight": False},
    "clusters_narrow": {"cutoffs": (4, 9), "d_embed": 5, "tie_projs": (False, True)},
    "div2": {"cutoffs": (4, 9), "div_val": 2},
    "div2_projections_tied": {"cutoffs": (4, 9), "div_val": 2, "tie_projs": (False, True, True)},
    "div2_untied_wide": {"cutoffs": (4, 9), "div_val": 2, "tie_weight": False, "d_embed": 11},
    "div2_without_same_size": {
        "cutoffs": (4, 9), "div_val": 2, "proj_same_dim": False, "tie_projs": (True, False, True),
    },
    "div2_without_clusters": {"div_val": 2},
    "one_word_clusters": {"cutoffs": (1, 2, 12), "div_val": 2},
}  # fmt: skip
FORMS = {name: tiny.config(**changes) for name, changes in (CHANGES | SOFTMAX).items()}
FIELDS = {field.name: field for field in dataclasses.fields(txl_jax.TransformerXLConfig)}
VARIED = {
    key for key in FIELDS for cfg in FORMS.values() if getattr(cfg, key) != FIELDS[key].default
}
NEW: list[str] = []
"""Names of further models. Each has a setting's value that no model above has."""
for name, cfg in model_settings.models().items():
    key = name.partition("=")[0]
    known = reference.KNOWN.get(key, ()) if key != "dtype" else (cfg.dtype,)
    if known is reference.ANY:
        new = key not in VARIED | reference.UNUSED
    else:
        new = getattr(cfg, key) in known and cfg not in FORMS.values() and key != "dtype"
    if new:
        FORMS[name] = cfg
        NEW.append(name)
        with contextlib.suppress(ConfigError):  # the setting can exclude ALL_AT_ONCE
            FORMS[f"{name}_all_at_once"] = dataclasses.replace(cfg, **ALL_AT_ONCE)
            NEW.append(f"{name}_all_at_once")
LAYERS = [name for name in FORMS if name not in SOFTMAX]


def with_rows(n):
    """Yields arguments of n segments: random ``reset``, ``lengths``, both or none. Rows differ."""
    rng = np.random.default_rng(n)
    for i in range(n):
        lengths = {"lengths": rng.integers(0, SEG_LEN + 1, 3).astype(np.int32)}
        streams = {"reset": rng.random(3) < 0.5}
        positions = {"reset": rng.random((3, SEG_LEN)) < 0.4}
        yield ({}, streams, lengths, positions, lengths | positions, lengths | streams)[i % 6]


def expected(
    cfg, params, tokens, targets, memory, mem_len, reset=None, lengths=None, context_len=0
):
    """Losses of the real positions and new memory, row by row, from the formulas."""
    losses, states = [], []
    for b in range(len(tokens)):
        n_real = tokens.shape[1] if lengths is None else lengths[b]
        past, starts = memory[b], np.array([], int)
        if reset is not None and reset.ndim == 1 and reset[b]:
            past = [[] for _ in past]
        if reset is not None and reset.ndim == 2:
            starts = np.flatnonzero(reset[b, :n_real])
        inputs, scored = tokens[b, :n_real], targets[b, : max(0, n_real - context_len)]
        row = reference.nll(params, cfg, inputs, scored, past, mem_len, list(starts), context_len)
        losses.append(row[0])
        states.append(row[1])
    return losses, states


def run_segments(cfg, mem_len, filled, segments, seg_len=SEG_LEN, seed=0):
    """Compares model and reference; ``segments`` has the keyword arguments of each segment."""
    usual = seg_len == SEG_LEN and len(filled) == len(FILLED) and mem_len in (0, MEM_LEN)
    nll = (tiny.apply if usual else tiny.compiled)(cfg, "nll")
    params = reference.float64(jax.tree.map(np.asarray, tiny.variables(cfg)["params"]))
    mems = tiny.memory(cfg, filled, mem_len)
    past = [[list(layer) for layer in tiny.real_states(mems, b)] for b in range(len(filled))]
    for i, extra in enumerate(segments):
        text = tiny.tokens(cfg, 2 * len(filled), seg_len, seed + i)
        tokens, targets = text.reshape(2, -1, seg_len)
        targets = targets[:, extra.get("context_len", 0) :]
        losses, mems = nll(tiny.variables(cfg), tokens, targets, mems, **extra)
        want, past = expected(cfg, params, tokens, targets, past, mems.mem_len, **extra)
        for b, row in enumerate(want):
            where = f"segment {i}, row {b}"
            np.testing.assert_allclose(losses[b, : len(row)], row, atol=2e-5, err_msg=where)
            assert int(mems.filled[b]) == len(past[b][0]), where
            states = np.array(past[b]).reshape(cfg.n_layer, len(past[b][0]), cfg.d_model)
            np.testing.assert_allclose(
                tiny.real_states(mems, b), states, atol=2e-5, err_msg=f"memory, {where}"
            )


@pytest.mark.integration
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.few(7)
def test_three_segments_with_unequal_memories_equal_the_formulas(name):
    run_segments(FORMS[name], MEM_LEN, FILLED, [{}, {}, {}])


@pytest.mark.integration
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.few(7)
def test_resets_and_lengths_equal_the_formulas_on_the_real_tokens(name):
    run_segments(FORMS[name], MEM_LEN, FILLED, with_rows(6), seed=5)


@pytest.mark.integration
@pytest.mark.parametrize("name", rest_slow(1, [n for n in LAYERS if not FORMS[n].memory_free]))
def test_steps_from_memory_and_from_a_cache_equal_the_formulas(name):
    """A step of one token leaves memory unprojected if heads are 8 wide (model/unprojected.py)."""
    cfg = dataclasses.replace(FORMS[name], d_head=8)
    run_segments(cfg, MEM_LEN, FILLED, [{}, {}], seg_len=1)
    variables, mems = tiny.variables(cfg), tiny.memory(cfg, FILLED, MEM_LEN)
    cache = tiny.apply(cfg, "init_cache")(variables, mems, seg_len=1)
    step = tiny.compiled(cfg, "__call__")
    for i in range(3):
        token = tiny.tokens(cfg, len(FILLED), 1, seed=i)
        want, mems = step(variables, token, mems)
        got, cache = step(variables, token, cache)
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("name", rest_integration(6, SOFTMAX))
@pytest.mark.few(2)
def test_every_form_of_softmax_equals_the_formulas(name):
    run_segments(FORMS[name], MEM_LEN, FILLED, [{}, {"lengths": np.array([4, 0, 2], np.int32)}])


@pytest.mark.parametrize("name", ["untied_softmax", "absolute", *SOFTMAX])
def test_scores_of_all_words_equal_the_formulas(name):
    """Scores are logits, or with clusters log-probabilities, whose exponentials sum to one."""
    cfg, tokens = FORMS[name], tiny.tokens(FORMS[name], 3, SEG_LEN)
    mems = tiny.memory(cfg, FILLED, MEM_LEN)
    got, _ = tiny.apply(cfg, "__call__")(tiny.variables(cfg), tokens, mems)
    assert got.shape == (3, SEG_LEN, 13)
    params = reference.float64(jax.tree.map(np.asarray, tiny.variables(cfg)["params"]))
    for b in range(3):
        past = [list(layer) for layer in tiny.real_states(mems, b)]
        want, _ = reference.logits(params, cfg, tokens[b], past, MEM_LEN)
        np.testing.assert_allclose(got[b], want, atol=2e-5)
    if cfg.cutoffs:
        np.testing.assert_allclose(np.exp(got).sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize("name", ["post_norm", "all_at_once_tf"])
def test_without_memory_equals_the_formulas(name):
    run_segments(FORMS[name], 0, (0, 0), [{}, {}])


@pytest.mark.parametrize("name", ["post_norm", "window_pytorch", "shaw_all_at_once"])
def test_segment_longer_than_memory_equals_the_formulas(name):
    run_segments(FORMS[name], 2, (1, 2), [{}, {}], seg_len=7)


@pytest.mark.parametrize("name", ["post_norm", "all_at_once"])
def test_memory_longer_than_several_segments_equals_the_formulas(name):
    run_segments(FORMS[name], 11, (0, 8), [{}, {}, {}])


@pytest.mark.parametrize(
    "name", ["all_at_once_tf", "shaw", *[name for name in CHANGES if "absolute" in name]]
)
def test_context_is_read_and_not_scored(name):
    """The absolute forms of attention count positions over context and segment together."""
    resets = np.zeros((3, SEG_LEN), bool)
    resets[1, 2] = True
    segments = [
        {"context_len": 2},
        {"context_len": 2, "lengths": np.array([4, 1, 3], np.int32), "reset": resets},
    ]
    cfg = FORMS[name]
    run_segments(cfg, 0, (0, 0, 0), segments)


@pytest.mark.parametrize("name", NEW)
def test_scanned_layers_give_what_unrolled_layers_give_with_a_new_setting(name):
    cfg = FORMS[name]
    try:
        scanned = dataclasses.replace(cfg, scan_layers=True)
    except ConfigError:
        pytest.skip("refuses scan_layers")
    params, mems = tiny.variables(cfg)["params"], tiny.memory(cfg, FILLED, MEM_LEN)
    tokens, targets = tiny.tokens(cfg, 6, SEG_LEN).reshape(2, 3, SEG_LEN)
    want = tiny.apply(cfg, "nll")({"params": params}, tokens, targets, mems)[0]
    stacked = {"params": stack_layers(params)}
    got = tiny.apply(scanned, "nll")(stacked, tokens, targets, mems)[0]
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize(
    "name", ["all_at_once", "shared_projection", "div2_projections_tied", "gtrxl", *NEW]
)
def test_gradient_is_the_slope_of_the_formulas_with_memory_held_constant(name):
    """Slopes are central differences in float64; steps are short, since relu has kinks."""
    cfg = FORMS[name]
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
        for step in (1e-6, -1e-6):
            moved = jax.tree.map(
                lambda p, d, s=step: p + s * d, reference.float64(params), direction
            )
            losses, _ = expected(cfg, moved, tokens, targets, past, MEM_LEN)
            ends.append(sum(sum(row) for row in losses))
        slope = (ends[0] - ends[1]) / 2e-6
        inner = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradient, direction)))
        np.testing.assert_allclose(inner, slope, rtol=2e-5, atol=2e-4)
