"""Past-decode regularisation equals its formula; switched off, it adds nothing to the loss.

The regularisation term is the loss of predicting each input token back from the model's prediction
of the next token.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny_models as tiny

import txl_jax
from txl_jax.config import ConfigError, ExperimentConfig, LossConfig, override
from txl_jax.data.batch import Batch
from txl_jax.model import cross_entropy
from txl_jax.training.loss import batch_loss, denominators
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import TrainState
from txl_jax.training.step import train_step

B, T, M = 4, 6, 3
REAL = np.array([6, 5, 3, 1])  # number of targets in each row; the rest is padding
WEIGHTS = (np.arange(T) < REAL[:, None]).astype(np.float32)
FORMS = {
    "tied": tiny.config(past_decode=True),
    "untied, narrow": tiny.config(past_decode=True, tie_weight=False, d_embed=5),
    "mixture": tiny.config(past_decode=True, mixtures=2),
}
CFG = FORMS["tied"]
PAST = {"past_weight", "past_weight_bias", "past_bias"}


def batch(context_len=0):
    tokens = tiny.tokens(CFG, B, context_len + T + 1)
    return Batch(tokens[:, :-1], tokens[:, context_len + 1 :], WEIGHTS, np.zeros(B, bool))


def loss(cfg, params, some, key=None, mems=None, **terms) -> Any:
    """Returns the training loss of a batch, and the summed nll of its targets."""
    model = txl_jax.TransformerXL(cfg)
    mems = tiny.memory(cfg, [3, 2, 0, 1], M) if mems is None else mems
    key = jax.random.key(0) if key is None else key
    found = batch_loss(params, model, some, mems, key, LossConfig(**terms), denominators(WEIGHTS))
    return found[0], found[1][0]


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def by_hand(cfg, params, scores, inputs):
    """Returns the regularisation term: the mean nll of inputs that are predicted from ``scores``.

    ``scores`` [rows, time, vocabulary] are those of the next word. Only positions with a scored
    target count.
    """
    p = reference.float64({k: v for k, v in params.items() if not isinstance(v, dict)})
    words = p["embedding"] if cfg.tie_weight else p["softmax_weight"]
    found = []
    for b, t in np.argwhere(WEIGHTS):
        expected = np.exp(log_softmax(np.float64(scores[b, t]))) @ words
        f = np.tanh(expected @ p["past_weight"] + p["past_weight_bias"])
        found.append(-log_softmax(words @ f + p["past_bias"])[inputs[b, t]])
    return np.mean(found)


def scores(cfg, params, some, key=None, mems=None, **about) -> Any:
    """Returns the next word's scores [rows, time, vocabulary], with dropout drawn from ``key``."""
    mems = tiny.memory(cfg, [3, 2, 0, 1], M) if mems is None else mems
    train: Any = {"train": True, "rngs": {"dropout": jax.random.key(0) if key is None else key}}
    about = {**train, **some.model_kwargs(False), **about}
    model = txl_jax.TransformerXL(cfg)
    return np.asarray(model.apply({"params": params}, some.inputs, mems, **about)[0])


@pytest.mark.integration
@pytest.mark.parametrize("rows", [4, 128], ids="blocks_of_{}".format)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.few(2)
def test_what_is_added_is_the_formula_over_what_is_scored(name, rows, monkeypatch):
    """The sum of nll, which metrics use, does not include the added term."""
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", rows)
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", 1)
    cfg, some = FORMS[name], batch()
    params = tiny.variables(cfg)["params"]
    value, nll_sum = loss(cfg, params, some, past_decode=0.7)
    plain, plain_sum = loss(cfg, params, some)
    added = 0.7 * by_hand(cfg, params, scores(cfg, params, some), some.inputs)
    assert float(value - plain) == pytest.approx(added, abs=1e-5)
    assert float(nll_sum) == pytest.approx(float(plain_sum), rel=1e-5)
    assert added > 1


@pytest.mark.integration
def test_the_prediction_is_that_of_the_pass_under_dropout():
    cfg = tiny.config(past_decode=True, mixtures=2, dropout=0.3, dropout_latent=0.3)
    params, some, key = tiny.variables(cfg)["params"], batch(), jax.random.key(4)
    value, nll_sum = loss(cfg, params, some, key, past_decode=1.0)
    added = by_hand(cfg, params, scores(cfg, params, some, key), some.inputs)
    assert float(value - nll_sum / WEIGHTS.sum()) == pytest.approx(added, abs=1e-5)
    other = by_hand(cfg, params, scores(cfg, params, some, jax.random.key(5)), some.inputs)
    assert abs(added - other) > 1e-3


@pytest.mark.integration
def test_under_r_drop_it_is_the_mean_of_both_readings():
    cfg = tiny.config(past_decode=True, dropout=0.3)
    params, some, key = tiny.variables(cfg)["params"], batch(), jax.random.key(4)
    value, _ = loss(cfg, params, some, key, r_drop=0.5, past_decode=0.7)
    without, _ = loss(cfg, params, some, key, r_drop=0.5)
    keys = key, jax.random.fold_in(key, 1)
    both = [by_hand(cfg, params, scores(cfg, params, some, k), some.inputs) for k in keys]
    assert float(value - without) == pytest.approx(0.7 * np.mean(both), abs=1e-5)
    assert abs(both[0] - both[1]) > 1e-3


@pytest.mark.integration
def test_tokens_of_the_context_are_not_decoded():
    params, some = tiny.variables(CFG)["params"], batch(context_len=2)
    mems = tiny.memory(CFG, [0] * B, 0)
    value, nll_sum = loss(CFG, params, some, mems=mems, past_decode=1.0)
    read = scores(CFG, params, some, mems=mems)
    assert read.shape[:2] == (B, T)
    added = by_hand(CFG, params, read, some.inputs[:, 2:])
    assert float(value - nll_sum / WEIGHTS.sum()) == pytest.approx(added, abs=1e-5)


def test_padding_is_not_decoded():
    """The loss does not depend on the ids of padding."""
    params, some = tiny.variables(CFG)["params"], batch()
    other = np.where(WEIGHTS > 0, some.inputs, (some.inputs + 1) % 13).astype(np.int32)
    assert (other != some.inputs).any()
    a = loss(CFG, params, some, past_decode=1.0)
    b = loss(CFG, params, dataclasses.replace(some, inputs=other), past_decode=1.0)
    np.testing.assert_array_equal(a, b)


def test_gradient_reaches_its_parameters_the_words_and_the_layers():
    """The gradient also equals finite differences of the loss along a random direction."""
    params = jax.tree.map(jnp.asarray, tiny.variables(CFG)["params"])
    only = lambda p: loss(CFG, p, batch(), past_decode=1.0)[0] - loss(CFG, p, batch())[0]
    gradient = tiny.quick(jax.grad(only))(params)
    for name in (*PAST, "embedding", "softmax_bias", "u"):
        assert np.abs(gradient[name]).max() > 1e-4, name
    assert np.abs(gradient["layer_0"]["attention"]["query"]).max() > 1e-5
    rng = np.random.default_rng(0)
    way = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), params)
    at = tiny.quick(lambda s: only(jax.tree.map(lambda x, w: x + s * w, params, way)))
    slope = float(at(3e-3) - at(-3e-3)) / 6e-3
    along = jax.tree.map(lambda g, w: float((g * w).sum()), gradient, way)
    assert slope == pytest.approx(sum(jax.tree.leaves(along)), rel=0.02)


@pytest.mark.parametrize("has_parameters", [False, True])
def test_off_the_loss_is_the_mean_nll_bit_by_bit(has_parameters):
    """The loss is exactly the model's mean nll, whether or not past-decode parameters exist."""
    cfg = tiny.config(past_decode=has_parameters, dropout=0.3)
    params, some, key = tiny.variables(CFG)["params"], batch(), jax.random.key(4)
    params = {k: v for k, v in params.items() if has_parameters or k not in PAST}
    model, mems = txl_jax.TransformerXL(cfg), tiny.memory(cfg, [3, 2, 0, 1], M)
    about: Any = {"train": True, "rngs": {"dropout": key}, **some.model_kwargs(False)}
    inputs = (some.inputs, some.targets, mems)
    nll: Any = model.apply({"params": params}, *inputs, method="nll", **about)[0]
    value, nll_sum = loss(cfg, params, some, key)
    assert float(value) == float((nll * WEIGHTS).sum() / WEIGHTS.sum())
    assert float(nll_sum) == float((nll * WEIGHTS).sum())


def test_scores_of_all_words_are_held_only_where_it_is_on():
    params, some = tiny.variables(CFG)["params"], batch()
    program = lambda **c: str(jax.make_jaxpr(lambda p: loss(CFG, p, some, **c)[0])(params))
    every_word = f"f32[{B},{T},{CFG.vocab_size}]"
    assert every_word in program(past_decode=0.1)
    assert every_word not in program()


def test_parameters_are_there_when_asked_for_and_change_no_others():
    drawn = {}
    for past_decode in (False, True):
        model = txl_jax.TransformerXL(tiny.config(n_layer=1, d_embed=5, past_decode=past_decode))
        about = np.zeros((1, 1), np.int32), model.init_mems(1, 1)
        drawn[past_decode] = tiny.quick(model.init)(jax.random.key(0), *about)["params"]
    assert drawn[True].keys() - drawn[False].keys() == PAST
    shapes = {name: drawn[True][name].shape for name in PAST}
    assert shapes == {"past_weight": (5, 5), "past_weight_bias": (5,), "past_bias": (13,)}
    same = {name: leaf for name, leaf in drawn[True].items() if name not in PAST}
    jax.tree.map(np.testing.assert_array_equal, same, drawn[False])


def test_scoring_does_not_look_at_its_parameters():
    params = tiny.variables(CFG)["params"]
    bare = {name: leaf for name, leaf in params.items() if name not in PAST}
    some, mems = batch(), tiny.memory(CFG, [3] * B, M)
    found = []
    for cfg, p in ((CFG, params), (tiny.config(), bare)):
        model = txl_jax.TransformerXL(cfg)
        inputs = (some.inputs, some.targets, mems)
        found.append(model.apply({"params": p}, *inputs, method="nll")[0])
    np.testing.assert_array_equal(*found)


@pytest.mark.integration
def test_micro_batches_add_up_and_an_update_moves_all_of_it():
    exp = ExperimentConfig.from_dict({"train": {"batch_size": B, "seg_len": T, "mem_len": M}})
    model = {f"model.{name}": getattr(CFG, name) for name in CFG.__dataclass_fields__}
    exp = override(exp, {**model, "loss.past_decode": 0.5, "optimizer.clip_norm": 0.0})
    moved = []
    for parts in (1, 2):
        exp = override(exp, {"train.micro_batches": parts})
        params = jax.tree.map(jnp.asarray, tiny.variables(CFG)["params"])
        optimizer, mems = make_optimizer(exp), tiny.memory(CFG, [3, 2, 0, 1], M)
        state = TrainState(jnp.int32(0), params, optimizer.init(params), mems)
        net = txl_jax.TransformerXL(CFG)
        step = tiny.quick(lambda s, b: train_step(s, b, exp, net, optimizer))  # noqa: B023
        after, metrics = step(state, batch())
        moved.append(float(metrics["grad_norm"]))
        for name in PAST:
            assert (np.asarray(after.params[name]) != np.asarray(params[name])).all(), name
    assert moved[1] == pytest.approx(moved[0], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss.past_decode": 0.1}, r"loss\.past_decode = 0\.1: .* model\.past_decode=True too$"),
        (
            {"loss.past_decode": 0.1, "model.past_decode": True, "model.sample_softmax": 9},
            r"loss\.past_decode = 0\.1: .* 9 computes only some; set model\.sample_softmax to 0$",
        ),
        (
            {"model.past_decode": True, "model.cutoffs": (5,)},
            r"model\.past_decode = True: needs one embedding",
        ),
        (
            {"model.past_decode": True, "model.div_val": 2},
            r"model\.past_decode = True: needs one embedding",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(settings, message):
    with pytest.raises(ConfigError, match=f"^config key {message}"):
        override(ExperimentConfig(), settings)
