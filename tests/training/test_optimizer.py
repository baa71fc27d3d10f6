"""Updates with L2, weight decay and the embeddings' own learning rate equal loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from tiny_runs import arrays

from txl_jax.config import AverageConfig, ExperimentConfig, OptimizerConfig, TrainConfig
from txl_jax.training.optimizer import (
    clip_by_norm,
    is_embedding,
    make_optimizer,
    schedule,
)

STEPS = 5
RATE, B1, B2, EPS, CLIP = 0.01, 0.9, 0.99, 1e-8, 0.5
GROUPS = {"d_embed": 6, "div_val": 2, "cutoffs": (4,)}


def params_and_gradients(**model):
    params = tiny_models.variables(tiny_models.config(**model))["params"]
    rng = np.random.default_rng(0)
    draw = lambda w: rng.standard_normal(w.shape).astype(np.float32)
    return params, [jax.tree.map(draw, params) for _ in range(STEPS)]


def by_optimizer(params, gradients, **settings):
    c = OptimizerConfig(
        **{
            "learning_rate": RATE,
            "schedule": "constant",
            "b1": B1,
            "b2": B2,
            "eps": EPS,
            "clip_norm": CLIP,
            **settings,
        }
    )
    optimizer = make_optimizer(ExperimentConfig(optimizer=c, train=TrainConfig(steps=STEPS)))
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return arrays(params)


def by_hand(params, gradients, l2=0.0, decay=0.0, rate=lambda t, name: RATE):
    """Returns the parameters after updates by Adam, written out in PyTorch's order.

    First, all gradients are clipped together. Then, for each tensor, L2 is added to the gradient,
    the moments are updated, and the step and the weight decay are subtracted.
    """
    w = {k: v.astype(np.float64) for k, v in arrays(params).items()}
    m, v = ({k: np.zeros_like(x) for k, x in w.items()} for _ in range(2))
    for t, gradient in enumerate(map(arrays, gradients)):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values()))
        for name in w:
            g = gradient[name] * min(1.0, CLIP / norm) + l2 * w[name]
            m[name] = B1 * m[name] + (1 - B1) * g
            v[name] = B2 * v[name] + (1 - B2) * g**2
            step = (m[name] / (1 - B1 ** (t + 1))) / (np.sqrt(v[name] / (1 - B2 ** (t + 1))) + EPS)
            w[name] = w[name] - rate(t, name) * (step + decay * w[name])
    return w


def assert_close(got, wanted):
    assert got.keys() == wanted.keys()
    for key in got:
        np.testing.assert_allclose(got[key], wanted[key], rtol=2e-4, atol=2e-6, err_msg=key)


@pytest.mark.integration
@pytest.mark.parametrize(("l2", "decay"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.3), (0.2, 0.1)])
def test_l2_goes_through_adam_after_clipping_and_decay_does_not(l2, decay):
    params, gradients = params_and_gradients()
    got = by_optimizer(params, gradients, l2=l2, weight_decay=decay)
    assert_close(got, by_hand(params, gradients, l2, decay))


@pytest.mark.integration
@pytest.mark.parametrize("model", [{}, GROUPS], ids=["one table", "a table for each cluster"])
def test_embedding_tables_have_a_rate_of_their_own(model):
    params, gradients = params_and_gradients(**model)
    tables = [key for key in arrays(params) if "embedding" in key and "projection" not in key]
    assert len(tables) == (2 if model else 1)
    rate = lambda t, name: RATE * (2.5 if name in tables else 1)
    got = by_optimizer(params, gradients, embedding_ratio=2.5)
    assert_close(got, by_hand(params, gradients, rate=rate))


def test_only_tables_of_embeddings_are_embeddings():
    params = tiny_models.variables(tiny_models.config(**GROUPS, tie_weight=False))["params"]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    found = {jax.tree_util.keystr(path, simple=True) for path in paths if is_embedding(path)}
    assert found == {"embedding_0", "embedding_1"}


def test_both_rates_fall_from_their_own_peak_to_the_same_end_and_then_to_half_of_it():
    """The authors' rates for Penn Treebank: from 3e-4 (embeddings 6e-4) to 1e-4, and then 5e-5."""
    c = OptimizerConfig(
        learning_rate=3e-4, warmup_steps=10, min_ratio=1 / 3, embedding_ratio=2.0, schedule="cosine"
    )
    average = AverageConfig(swa_start=110, swa_lr_ratio=0.5)
    rest, tables = schedule(c, 200, average), schedule(c, 200, average, c.embedding_ratio)
    at = lambda rate, *steps: [float(rate(t)) for t in steps]
    np.testing.assert_allclose(at(rest, 9, 10, 60, 110, 199), [3e-4, 3e-4, 2e-4, 5e-5, 5e-5])
    np.testing.assert_allclose(at(tables, 9, 10, 60, 110, 199), [6e-4, 6e-4, 3.5e-4, 5e-5, 5e-5])
    assert at(rest, 109)[0] == pytest.approx(1e-4, rel=1e-2)
    assert at(tables, 109)[0] == pytest.approx(1e-4, rel=1e-2)
    assert at(tables, 0)[0] == pytest.approx(6e-5)


def test_a_tail_without_a_rate_leaves_the_schedule_as_it_was():
    c = OptimizerConfig(learning_rate=1.0, warmup_steps=2, min_ratio=0.1)
    with_tail, without = schedule(c, 20, AverageConfig(swa_start=10)), schedule(c, 20)
    assert [float(with_tail(t)) for t in range(20)] == [float(without(t)) for t in range(20)]


LONG = 20_000
"""So many updates that a cosine schedule to 0 ends with rates of exactly 0 in float32."""


def by_one_update(exp, t):
    """The updates at step ``t`` of an embedding table and another parameter; gradients are 1."""
    params = {"embedding": jnp.ones(2), "other": jnp.ones(2)}
    optimizer = make_optimizer(exp)
    at_t = lambda x: jnp.full_like(x, t) if x.dtype == jnp.int32 else x
    state = jax.tree.map(at_t, optimizer.init(params))
    return arrays(optimizer.update(params, state, params)[0])


def test_embeddings_with_their_own_rate_stay_finite_where_a_cosine_ends_at_0():
    c = OptimizerConfig(learning_rate=0.1, embedding_ratio=2.0, schedule="cosine", min_ratio=0.0)
    exp = ExperimentConfig(optimizer=c, train=TrainConfig(steps=LONG))
    for t in (LONG // 4, LONG - 1):
        updates = by_one_update(exp, t)
        assert all(np.all(np.isfinite(value)) for value in updates.values())
        ended = t == LONG - 1
        assert all(np.all((value == 0) == ended) for value in updates.values())
    at_the_start = by_one_update(exp, 0)
    ratio = at_the_start["['embedding']"] / at_the_start["['other']"]
    np.testing.assert_allclose(ratio, 2.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["inverse_sqrt", "constant"])
def test_other_schedules_keep_the_ratio_throughout(name):
    c = OptimizerConfig(learning_rate=0.1, schedule=name, warmup_steps=3, embedding_ratio=2.0)
    rest, tables = schedule(c, 20), schedule(c, 20, ratio=c.embedding_ratio)
    for t in range(20):
        assert float(tables(t)) == pytest.approx(2 * float(rest(t)))


@pytest.mark.parametrize("size", [0.0, 0.5, 1.0, 30.0, float("inf"), float("nan")])
def test_clipping_scales_to_the_norm_and_leaves_smaller_gradients_as_they_are(size):
    """A gradient of norm ``size`` is clipped to norm 0.7 as by the formula and by optax."""
    direction = {"a": jnp.array([0.6, 0.0]), "b": jnp.array([[-0.8]])}
    gradient = jax.tree.map(lambda x: x * size, direction)
    clipped = {}
    for name, transform in (("ours", clip_by_norm(0.7)), ("optax", optax.clip_by_global_norm(0.7))):
        clipped[name], _ = transform.update(gradient, transform.init(gradient))
    for ours, theirs in zip(*map(jax.tree.leaves, clipped.values()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    if np.isfinite(size):
        expected = jax.tree.map(lambda x: x * min(size, 0.7), direction)
        for ours, by_hand in zip(*map(jax.tree.leaves, (clipped["ours"], expected)), strict=True):
            np.testing.assert_allclose(ours, by_hand, rtol=1e-6)
