"""The training loss equals its formula over the scored targets, also with micro-batches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models

import txl_jax
from txl_jax.config import ExperimentConfig, LossConfig, override
from txl_jax.data.batch import Batch
from txl_jax.training.loss import (
    activation_penalty,
    batch_loss,
    denominators,
    scored_weights,
    symmetric_divergence,
)
from txl_jax.training.state import TrainState
from txl_jax.training.step import train_step

B, T, M = 4, 7, 3
CFG = tiny_models.config()
REAL = np.array([7, 7, 4, 1])  # number of targets in each row; the rest is padding
WEIGHTS = (np.arange(T) < REAL[:, None]).astype(np.float32)
BOTH = {"loss.ar": 2.0, "loss.tar": 3.0}
PLAIN_GRADIENT = optax.sgd(1.0)  # a step subtracts the gradient itself


def batch(weights=WEIGHTS):
    tokens = tiny_models.tokens(CFG, B, T + 1)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, np.zeros(B, bool))


def experiment(cfg=CFG, **changes):
    exp = ExperimentConfig.from_dict(
        {"train": {"batch_size": B, "seg_len": T, "mem_len": M, "steps": 9}}
    )
    model = {f"model.{name}": getattr(cfg, name) for name in cfg.__dataclass_fields__}
    return override(exp, {**model, **changes})


def gradient_and_metrics(exp, some):
    """Returns the gradient for a batch, and the metrics of one training step.

    The gradient is what one step of gradient descent with learning rate 1 subtracts.
    """
    params = jax.tree.map(jnp.asarray, tiny_models.variables(exp.model)["params"])
    mems = tiny_models.memory(exp.model, [3, 2, 0, 1], M)
    state = TrainState(jnp.int32(0), params, PLAIN_GRADIENT.init(params), mems)
    model = txl_jax.TransformerXL(exp.model)
    step = tiny_models.quick(lambda s, b: train_step(s, b, exp, model, PLAIN_GRADIENT))
    after, metrics = step(state, some)
    taken = jax.tree.map(lambda a, b: np.asarray(a - b), params, after.params)
    return taken, {name: float(value) for name, value in metrics.items()}


def assert_same(a, b, **tolerance):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        np.testing.assert_allclose(x, y, err_msg=jax.tree_util.keystr(path), **tolerance)


def test_full_scores_every_real_target():
    np.testing.assert_array_equal(scored_weights(WEIGHTS, LossConfig()), WEIGHTS)


def test_half_scores_the_second_half_of_the_real_targets():
    got = scored_weights(WEIGHTS, LossConfig(positions="half"))
    assert np.asarray(got).astype(int).tolist() == [
        [0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 1, 1],
        [0, 0, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
    ]
    even = scored_weights(np.ones((1, 6), np.float32), LossConfig(positions="half"))
    assert np.asarray(even).astype(int).tolist() == [[0, 0, 0, 1, 1, 1]]


def test_half_counts_targets_where_documents_have_boundaries():
    """A target across a document boundary has weight 0, so real targets can follow zeros."""
    weights = np.array([[0, 0, 0, 1, 1, 1], [1, 0, 1, 0, 1, 0], [1, 1, 0, 1, 1, 0]], np.float32)
    got = scored_weights(weights, LossConfig(positions="half"))
    assert np.asarray(got).astype(int).tolist() == [
        [0, 0, 0, 0, 1, 1],
        [0, 0, 1, 0, 1, 0],
        [0, 0, 0, 1, 1, 0],
    ]


@pytest.mark.parametrize("positions", ["full", "half"])
def test_regularisation_is_the_mean_squares_of_scored_positions(positions):
    weights = np.asarray(scored_weights(WEIGHTS, LossConfig(positions=positions)))
    states = np.random.default_rng(0).standard_normal((B, T, 5)).astype(np.float32)
    sizes, changes = [], []
    for b in range(B):
        for t in range(T):
            if weights[b, t]:
                sizes += [x * x for x in states[b, t].tolist()]
                if t and weights[b, t - 1]:
                    changes += [x * x for x in (states[b, t] - states[b, t - 1]).tolist()]
    value = lambda c: float(activation_penalty(states, weights, c, denominators(weights)))
    assert value(LossConfig(ar=1.0)) == pytest.approx(np.mean(sizes), rel=1e-5)
    assert value(LossConfig(tar=1.0)) == pytest.approx(np.mean(changes), rel=1e-5)
    both = 2 * np.mean(sizes) + 0.5 * np.mean(changes)
    assert value(LossConfig(ar=2.0, tar=0.5)) == pytest.approx(both, rel=1e-5)


def test_nothing_scored_gives_no_loss_and_no_division_by_zero():
    taken, metrics = gradient_and_metrics(experiment(**BOTH), batch(np.zeros_like(WEIGHTS)))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(taken))
    assert (metrics["nll_sum"], metrics["count"]) == (0, 0)


@pytest.mark.integration
def test_regularisation_acts_before_dropout():
    """Dropout of the final states changes the nll but not the penalty on these states."""
    cfg = tiny_models.config(dropout_output=0.5)
    params = tiny_models.variables(cfg)["params"]
    mems = tiny_models.memory(cfg, [3] * B, M)
    model = txl_jax.TransformerXL(cfg)

    def parts(cfg, key, **loss):
        c, whole, model = LossConfig(**loss), denominators(WEIGHTS), txl_jax.TransformerXL(cfg)
        value, (nll_sum, _) = batch_loss(params, model, batch(), mems, key, c, whole)
        return float(value), float(nll_sum)

    key = jax.random.key(0)
    with_drop, nll_with = parts(cfg, key, **{"ar": 2.0, "tar": 3.0})
    without, nll_without = parts(CFG, key, **{"ar": 2.0, "tar": 3.0})
    count = WEIGHTS.sum()
    assert nll_with != pytest.approx(nll_without, rel=1e-3)
    extra = with_drop - nll_with / count
    assert extra == pytest.approx(without - nll_without / count, rel=1e-4)
    hidden = model.apply({"params": params}, _embedded(params, cfg), mems, method="core")[0]
    want: Any = activation_penalty(
        hidden, WEIGHTS, LossConfig(ar=2.0, tar=3.0), denominators(WEIGHTS)
    )
    assert extra == pytest.approx(float(want), rel=1e-4)
    assert extra > 1


def _embedded(params, cfg):
    return params["embedding"][batch().inputs] * np.float32(cfg.d_model**0.5)


def test_half_is_the_gradient_of_the_mean_nll_of_the_second_half():
    """The metrics cover only the scored targets, as the loss does."""
    some = batch(np.ones((B, T), np.float32))
    taken, metrics = gradient_and_metrics(experiment(**{"loss.positions": "half"}), some)
    model, mems = txl_jax.TransformerXL(CFG), tiny_models.memory(CFG, [3, 2, 0, 1], M)

    def second_half(params):
        nll, _ = model.apply({"params": params}, some.inputs, some.targets, mems, method="nll")
        return nll[:, T // 2 :].mean()

    params = jax.tree.map(jnp.asarray, tiny_models.variables(CFG)["params"])
    mean, want = tiny_models.quick(jax.value_and_grad(second_half))(params)
    assert_same(taken, want, rtol=1e-3, atol=1e-5)
    assert metrics["count"] == B * (T - T // 2)
    assert metrics["nll_sum"] / metrics["count"] == pytest.approx(float(mean), rel=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("positions", ["full", "half"])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.few(1)
def test_micro_batches_add_up_to_the_gradient_of_the_whole(positions, parts):
    """Rows have 7, 7, 4 and 1 targets, so averaging the parts' means would be wrong."""
    changes = {**BOTH, "loss.positions": positions}
    whole, metrics = gradient_and_metrics(experiment(**changes), batch())
    cut, metrics_cut = gradient_and_metrics(
        experiment(**changes, **{"train.micro_batches": parts}), batch()
    )
    assert_same(whole, cut, rtol=1e-4, atol=1e-5)
    for name, value in metrics.items():
        assert metrics_cut[name] == pytest.approx(value, rel=1e-5), name
    plain, plain_metrics = gradient_and_metrics(
        experiment(**{"loss.positions": positions}), batch()
    )
    assert plain_metrics["nll_sum"] == pytest.approx(metrics["nll_sum"], rel=1e-6)
    kernel = lambda tree: tree["layer_1"]["feed_forward"]["outer"]["kernel"]
    assert np.abs(kernel(plain) - kernel(whole)).max() > 0.1


def test_divergence_is_the_mean_of_both_directions():
    rng = np.random.default_rng(0)
    p, q = (x / x.sum(-1, keepdims=True) for x in rng.random((2, 3, 5)))
    wanted = [
        sum(a * np.log(a / b) + b * np.log(b / a) for a, b in zip(*pair, strict=True)) / 2
        for pair in zip(p, q, strict=True)
    ]
    got = symmetric_divergence(jnp.log(p), jnp.log(q))
    np.testing.assert_allclose(got, wanted, rtol=1e-4)
    np.testing.assert_array_equal(symmetric_divergence(jnp.log(p), jnp.log(p)), 0)


@pytest.mark.integration
@pytest.mark.parametrize("clusters", [{}, {"cutoffs": (4, 7)}], ids=["plain", "clusters"])
def test_r_drop_is_two_losses_and_how_far_they_are_apart(clusters):
    """The loss is the mean of two passes with dropout, plus ``r_drop`` times their divergence.

    The memory that is kept is that of the first pass.
    """
    cfg = tiny_models.config(dropout=0.3, **clusters)
    params, model = tiny_models.variables(cfg)["params"], txl_jax.TransformerXL(cfg)
    mems, key = tiny_models.memory(cfg, [3] * B, M), jax.random.key(5)
    some, c = batch(), LossConfig(ar=2.0, r_drop=0.7)
    loss, (nll_sum, after) = batch_loss(params, model, some, mems, key, c, denominators(WEIGHTS))

    logs, sizes, memories = [], [], []
    for each in (key, jax.random.fold_in(key, 1)):
        read: Any = model.apply(
            {"params": params},
            some.inputs,
            mems,
            method="logits_and_states",
            train=True,
            rngs={"dropout": each},
            **some.model_kwargs(False),
        )
        logits, states, new = read
        logits = np.asarray(logits, np.float64)
        logs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        sizes.append(np.square(states)[WEIGHTS > 0].mean())
        memories.append(np.asarray(new.hidden))
    nll = -sum(np.take_along_axis(x, some.targets[..., None], -1)[..., 0] for x in logs) / 2
    apart = np.sum((np.exp(logs[0]) - np.exp(logs[1])) * (logs[0] - logs[1]), -1) / 2
    count = WEIGHTS.sum()
    assert float(nll_sum) == pytest.approx((nll * WEIGHTS).sum(), rel=1e-5)
    wanted = ((nll + 0.7 * apart) * WEIGHTS).sum() / count + 2.0 * np.mean(sizes)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert (apart * WEIGHTS).sum() / count > 0.01
    np.testing.assert_array_equal(after.hidden, memories[0])
    assert not np.array_equal(memories[0], memories[1])


@pytest.mark.integration
def test_r_drop_without_dropout_is_the_plain_gradient():
    plain, _ = gradient_and_metrics(experiment(), batch())
    twice, _ = gradient_and_metrics(experiment(**{"loss.r_drop": 5.0}), batch())
    assert_same(plain, twice, rtol=1e-3, atol=1e-6)
