"""Scoring counts every target once and does not depend on devices or segment length."""

import dataclasses

import jax
import pytest
import tiny_models

from txl_jax.config import ProtocolConfig
from txl_jax.evaluation.evaluate import Evaluator, describe
from txl_jax.model.transformer_xl import TransformerXL

CFG = tiny_models.config()
PARAMS = tiny_models.variables(CFG)["params"]
TOKENS = tiny_models.tokens(CFG, 1, 101)[0]


def mesh(devices=1):
    kind = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("data",), kind, devices=jax.devices()[:devices])


def score(devices=1, tokens=TOKENS, **protocol):
    c = ProtocolConfig(**{"batch_size": 3, "seg_len": 8, "mem_len": 12, **protocol})
    return Evaluator(CFG, c, tokens, mesh(devices)).run(PARAMS)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
@pytest.mark.parametrize("seg_len", [1, 8, 200])
def test_every_target_is_scored_once_at_any_batch_and_segment(batch_size, seg_len):
    assert score(batch_size=batch_size, seg_len=seg_len).targets == len(TOKENS) - 1


def test_one_stream_with_covering_memory_is_the_text_scored_whole():
    model = TransformerXL(CFG)
    nll, _ = model.apply(
        {"params": PARAMS}, TOKENS[None, :-1], TOKENS[None, 1:], model.init_mems(1, 0), method="nll"
    )
    for seg_len in (7, 20, 100):
        got = score(batch_size=1, seg_len=seg_len, mem_len=100)
        assert got.loss == pytest.approx(float(nll.mean()), abs=1e-5)


@pytest.mark.parametrize("devices", [2, 8])
def test_devices_do_not_change_the_score_even_if_they_do_not_divide_the_streams(devices):
    assert score(devices).loss == pytest.approx(score(1).loss, abs=1e-6)
    assert score(devices).targets == score(1).targets


def test_memory_changes_the_score_and_the_protocol_says_which():
    assert score(mem_len=0).loss != pytest.approx(score(mem_len=12).loss, abs=1e-4)
    c = ProtocolConfig(batch_size=3, seg_len=8, mem_len=12, same_length="tf", clamp_len=5)
    assert describe(c, CFG) == "test split, 3 streams, segment 8, memory 12, window tf, clamp 5"


def test_the_protocols_clamp_and_window_hold_over_the_models():
    windowed = dataclasses.replace(CFG, same_length="tf", clamp_len=4)
    c = ProtocolConfig(batch_size=3, seg_len=8, mem_len=12, same_length="tf", clamp_len=4)
    own = dataclasses.replace(c, same_length=None, clamp_len=None)
    a = Evaluator(CFG, c, TOKENS, mesh()).run(PARAMS)
    b = Evaluator(windowed, own, TOKENS, mesh()).run(PARAMS)
    plain = Evaluator(CFG, own, TOKENS, mesh()).run(PARAMS)
    assert a is not None
    assert b is not None
    assert plain is not None
    assert a.loss == b.loss != plain.loss


def test_stopping_gives_no_score():
    c = ProtocolConfig(batch_size=3, seg_len=8, mem_len=12)
    assert Evaluator(CFG, c, TOKENS, mesh()).run(PARAMS, stop=lambda: True) is None
