"""Dynamic evaluation scores a segment before it learns from this segment, by the rule's formula."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

import txl_jax
from txl_jax.config import DynamicConfig, MeshConfig, ProtocolConfig
from txl_jax.data.batch import Batch
from txl_jax.evaluation.dynamic import Learner, score_and_learn, update
from txl_jax.evaluation.evaluator import Evaluator, split_evaluator
from txl_jax.evaluation.protocols import compared_protocols, describe
from txl_jax.parallel.mesh import make_mesh

CFG = tiny_models.config()
ADAPTIVE = tiny_models.config(cutoffs=(4, 9), div_val=2, d_embed=8, tie_projs=(False, True, True))
TOKENS = tiny_models.tokens(CFG, 1, 61)[0]
TRAINING = tiny_models.tokens(CFG, 1, 150, seed=1)[0]
SGD = DynamicConfig(rule="sgd", learning_rate=0.1)
RMS = DynamicConfig(rule="rms", learning_rate=0.02, decay=0.3, epsilon=1e-2, statistics=4)


def mesh(devices=1):
    return make_mesh(MeshConfig(data=devices), CFG, batch_size=devices)


def evaluator(dynamic, devices=1, cfg=CFG, tokens=TOKENS, training=TRAINING, **protocol):
    told = {"batch_size": 1, "seg_len": 8, "mem_len": 12, **protocol}
    c = ProtocolConfig(dynamic=dynamic, **told)
    return Evaluator(cfg, c, tokens, mesh(devices), training=training)


def params_of(cfg=CFG):
    return tiny_models.variables(cfg)["params"]


@functools.cache
def score(dynamic, devices=1, cfg=CFG, **protocol):
    got = evaluator(dynamic, devices, cfg, **protocol).run(params_of(cfg))
    assert got is not None
    return got


def by_hand(cfg, dynamic, tokens, training, batch_size, mem_len, seg_len=8):
    """The loss of dynamic evaluation, by plain loops, in float64 except for the model itself.

    Each stream has its own memory and its own unpadded call of the model. Only the gradient is a
    mean over all streams.
    """
    model = txl_jax.TransformerXL(cfg)

    def cuts(text):
        each = -(-(len(text) - 1) // batch_size)
        for start in range(0, each, seg_len):
            rows = []
            for b in range(batch_size):
                first, end = b * each + start, min((b + 1) * each, len(text) - 1)
                stop = min(first + seg_len, end)
                rows.append(text[first : stop + 1] if stop > first else None)
            yield rows

    def one(p, row, mems):
        nll, after = model.apply({"params": p}, row[None, :-1], row[None, 1:], mems, method="nll")
        return nll.sum(), after

    gradient_of = tiny_models.quick(jax.value_and_grad(one, has_aux=True))

    def segment(p, rows, mems):
        """Sum of nll, number of targets, gradient of the mean nll, and the new memories."""
        total, n, gradient, after = 0.0, 0, None, list(mems)
        for b, row in enumerate(rows):
            if row is None:
                continue
            (nll, after[b]), g = gradient_of(p, row, mems[b])
            total, n = total + float(nll), n + len(row) - 1
            g = [np.asarray(x, np.float64) for x in jax.tree.leaves(g)]
            gradient = g if gradient is None else [a + b for a, b in zip(gradient, g, strict=True)]
        return total, n, [g / n for g in gradient or []], after

    leaves, tree = jax.tree.flatten(params_of(cfg))
    first = [np.asarray(x, np.float64) for x in leaves]
    as_params = lambda arrays: jax.tree.unflatten(tree, [x.astype(np.float32) for x in arrays])
    empty = lambda: [model.init_mems(1, mem_len) for _ in range(batch_size)]

    squares = [np.zeros_like(x) for x in first]
    if dynamic.rule == "rms":
        segments, mems = list(cuts(training)), empty()
        for i in range(dynamic.statistics):
            mems = empty() if i % len(segments) == 0 else mems
            _, _, g, mems = segment(as_params(first), segments[i % len(segments)], mems)
            squares = [s + x * x for s, x in zip(squares, g, strict=True)]

    now, mems, total, count = first, empty(), 0.0, 0
    for rows in cuts(tokens):
        nll, n, gradient, mems = segment(as_params(now), rows, mems)
        total, count = total + nll, count + n
        after = []
        for p, p0, g, s in zip(now, first, gradient, squares, strict=True):
            if dynamic.rule == "sgd":
                after.append(p - dynamic.learning_rate * g)
            else:
                towards = np.minimum(dynamic.decay * np.sqrt(s), 1)
                moved = dynamic.learning_rate * g / (np.sqrt(s) + dynamic.epsilon)
                after.append(p - moved - towards * (p - p0))
        now = after
    return total / count


@pytest.mark.integration
@pytest.mark.parametrize(
    ("cfg", "dynamic", "batch_size"),
    [
        (CFG, SGD, 3),
        (CFG, RMS, 1),
        (CFG, RMS, 3),
        pytest.param(ADAPTIVE, RMS, 1, marks=pytest.mark.slow),
    ],
    ids=["sgd-3", "rms-1", "rms-3", "adaptive-rms-1"],
)
@pytest.mark.few(1)
def test_the_score_is_that_of_the_rule_written_out(cfg, dynamic, batch_size):
    """60 targets, in 1 or 3 streams and segments of 8: the last segments are short."""
    want = by_hand(cfg, dynamic, TOKENS, TRAINING, batch_size, 12)
    got = score(dynamic, cfg=cfg, batch_size=batch_size)
    static = score(DynamicConfig(), cfg=cfg, batch_size=batch_size)
    assert got.targets == 60
    assert got.loss == pytest.approx(want, abs=2e-5)
    assert abs(got.loss - static.loss) > 1e-3


@pytest.mark.integration
def test_statistics_go_through_the_training_split_again_where_it_is_short():
    dynamic = dataclasses.replace(RMS, statistics=7)
    want = by_hand(CFG, dynamic, TOKENS, TRAINING[:30], 1, 12)
    got = evaluator(dynamic, training=TRAINING[:30]).run(params_of())
    assert got is not None
    assert got.loss == pytest.approx(want, abs=2e-5)
    assert abs(score(dynamic).loss - want) > 1e-3


@pytest.mark.integration
@pytest.mark.parametrize("dynamic", [SGD, RMS], ids=lambda c: c.rule)
def test_a_segment_is_scored_before_it_is_learnt_from(dynamic):
    """Learning does not change the score of the first segment, but that of the second one."""
    of = lambda c, n: score(c, max_segments=n, batch_size=3).loss
    assert of(dynamic, 1) == pytest.approx(of(DynamicConfig(), 1), abs=1e-6)
    assert abs(of(dynamic, 2) - of(DynamicConfig(), 2)) > 1e-3


@pytest.mark.parametrize("rule", ["sgd", "rms"])
def test_a_rate_too_small_to_move_anything_scores_as_none(rule):
    nothing = DynamicConfig(rule=rule, learning_rate=1e-30, decay=0.5, statistics=2)
    assert score(nothing).loss == pytest.approx(score(DynamicConfig()).loss, abs=1e-6)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("dynamic", "past"),
    [
        pytest.param(SGD, {"mem_len": 0, "context_len": 6}, marks=pytest.mark.slow),
        (RMS, {}),
    ],
    ids=["sgd-context", "rms-memory"],
)
def test_devices_do_not_change_the_score(dynamic, past):
    one, eight = (score(dynamic, n, batch_size=3, **past) for n in (1, 8))
    assert eight.loss == pytest.approx(one.loss, abs=1e-5)
    assert abs(one.loss - score(DynamicConfig(), batch_size=3, **past).loss) > 1e-3


@pytest.mark.parametrize("dynamic", [SGD, RMS], ids=lambda c: c.rule)
def test_the_parameters_that_were_given_are_as_before(dynamic):
    given = jax.tree.map(jnp.asarray, params_of())
    before = jax.tree.map(np.array, given)
    scorer = evaluator(dynamic)
    first, second = scorer.run(given), scorer.run(given)
    assert first is not None
    assert second is not None
    assert first.loss == second.loss
    jax.tree.map(np.testing.assert_array_equal, before, given)


def batch(weight):
    tokens = tiny_models.tokens(CFG, 2, 9)
    weights = np.full((2, 8), weight, np.float32)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, np.zeros(2, bool))


@pytest.mark.integration
@pytest.mark.parametrize(
    "dynamic", [pytest.param(SGD, marks=pytest.mark.slow), RMS], ids=lambda c: c.rule
)
def test_a_segment_without_targets_moves_memory_and_no_parameter(dynamic):
    """The parameters differ from the trained ones, so the rule's decay would move them."""
    model, mems = txl_jax.TransformerXL(CFG), tiny_models.memory(CFG, [0, 0], 12)
    ones = jax.tree.map(np.ones_like, params_of())
    trained = jax.tree.map(lambda x: x + 1, params_of())
    state = Learner(params_of(), trained, ones)
    step = lambda weight: score_and_learn(state, batch(weight), mems, model, dynamic)
    nll, count, after, same = step(0.0)
    assert (float(nll), float(count)) == (0, 0)
    assert after.filled.tolist() == [8, 8]
    jax.tree.map(np.testing.assert_array_equal, state.params, same.params)
    moved = step(1.0)[3].params
    assert all(
        np.any(a != b)
        for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(state.params), strict=True)
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    "dynamic", [SGD, pytest.param(RMS, marks=pytest.mark.slow)], ids=lambda c: c.rule
)
def test_a_warm_start_fills_memory_and_teaches_nothing(dynamic):
    """Each stream scores a single segment, with the trained parameters."""
    protocol = {"batch_size": 4, "seg_len": 8, "warm_start": 20, "max_segments": 1}
    static = score(DynamicConfig(), **protocol)
    assert score(dynamic, **protocol).loss == pytest.approx(static.loss, abs=1e-6)


def test_the_pull_leads_back_to_the_trained_values_and_never_past_them():
    """With gradient 0, a value moves by the part min(decay * root, 1) of the way back."""
    trained, root = {"w": np.zeros(4, np.float32)}, {"w": np.array([0, 1, 3, 30], np.float32)}
    state = Learner({"w": np.full(4, 6, np.float32)}, trained, root)
    after = update(state, trained, DynamicConfig(rule="rms", decay=1 / 3))
    np.testing.assert_allclose(after["w"], [6, 4, 0, 0], atol=1e-6)


@pytest.mark.integration
def test_more_decay_keeps_the_score_nearer_to_the_trained_models():
    static = score(DynamicConfig()).loss
    free, held = (score(dataclasses.replace(RMS, decay=d)).loss for d in (0.0, 1e6))
    assert abs(held - static) < abs(free - static)


def test_the_protocol_names_the_rule():
    c = ProtocolConfig(batch_size=1, seg_len=8, mem_len=12)
    lead = "test split, 1 stream, segment 8, memory 12"
    of = lambda dynamic: describe(dataclasses.replace(c, dynamic=dynamic), CFG)
    assert of(DynamicConfig()) == lead
    assert of(SGD) == f"{lead}, dynamic evaluation sgd, rate 0.1"
    assert of(RMS) == (
        f"{lead}, dynamic evaluation rms, rate 0.02, decay 0.3, epsilon 0.01,"
        " statistics of 4 segments"
    )


def test_the_report_sets_dynamic_evaluation_beside_the_same_protocol_without_it():
    c = ProtocolConfig(mem_len=12, dynamic=RMS)
    static = ProtocolConfig(mem_len=12)
    nothing = ProtocolConfig(mem_len=0, same_length=False)
    assert compared_protocols(c) == [
        ("memory 12, dynamic rms", c),
        ("memory 12", static),
        ("no memory", nothing),
    ]
    no_memory = ProtocolConfig(mem_len=0, dynamic=SGD)
    assert compared_protocols(no_memory) == [
        ("memory 0, dynamic sgd", no_memory),
        ("memory 0", ProtocolConfig(mem_len=0)),
    ]


@pytest.mark.integration
def test_statistics_are_of_the_corpuss_training_split():
    c = ProtocolConfig(batch_size=1, seg_len=8, mem_len=12, dynamic=RMS)
    corpus: Any = types.SimpleNamespace(train=TRAINING, test=TOKENS)
    got = split_evaluator(CFG, c, corpus, mesh()).run(params_of())
    assert got is not None
    assert got.loss == score(RMS).loss
    other = evaluator(RMS, training=TOKENS).run(params_of())
    assert other is not None
    assert got.loss != other.loss
    with pytest.raises(ValueError, match="needs the training split"):
        Evaluator(CFG, c, TOKENS, mesh())


def test_progress_counts_statistics_and_scored_segments_and_both_can_be_stopped():
    told: list[tuple[int, int]] = []
    scorer = evaluator(RMS)  # scores 8 segments, after 4 for statistics
    scorer.run(params_of(), progress=lambda *numbers: told.append(numbers))
    assert told == [(n, 12) for n in range(1, 13)]
    for limit in (2, 6):
        told.clear()
        stopped = scorer.run(
            params_of(),
            stop=lambda limit=limit: len(told) == limit,
            progress=lambda *numbers: told.append(numbers),
        )
        assert stopped is None
        assert len(told) == limit
