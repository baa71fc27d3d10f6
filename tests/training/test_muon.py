"""Muon's updates equal its published formulas, written out here for each matrix."""

import math

import jax
import numpy as np
import optax
import pytest
import tiny_models
from optimizer_cases import FORMS, by_optimizer, edge_cases, flat, spread

from txl_jax.config import OptimizerConfig
from txl_jax.model.layout import stack_layers, unstack_layers

C = OptimizerConfig(
    name="muon",
    learning_rate=0.01,
    schedule="constant",
    clip_norm=0.0,
    b1=0.8,
    b2=0.9,
    momentum=0.7,
)

# Input and output axes of each matrix that Muon updates; Adam updates every other parameter.
PROJECTION, OUTPUT, DENSE = ((0,), (1, 2)), ((0, 1), (2,)), ((0,), (1,))
MATRICES = {
    **dict.fromkeys(("query", "key", "value", "position"), PROJECTION),
    "output": OUTPUT,
    "kernel": DENSE,
    **dict.fromkeys(("from_output", "from_input"), PROJECTION),
}


def newton_schulz(x):
    """Returns x with all singular values brought near 1, by Newton-Schulz iterations.

    These are five iterations with the coefficients of Jordan (2024), in float64.
    """
    x = x / (np.linalg.norm(x) + 1e-8)
    if len(x) > len(x.T):
        return newton_schulz(x.T).T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def by_hand(params, gradients, c):
    """Yields the parameters (a flat dict) after the update by each gradient, by Muon's formulas.

    The computation is in float64. ``c`` is the optimizer's config.
    """
    m = {name: np.zeros_like(w) for name, w in params.items()}
    v = {name: np.zeros_like(w) for name, w in params.items()}
    for t, gradient in enumerate(gradients, 1):
        params = dict(params)
        for name, g in gradient.items():
            *_, last = name.split("/")
            if name.startswith("layer_") and last in MATRICES:
                m[name] = c.momentum * m[name] + g
                inputs, outputs = MATRICES[last]
                sides = [math.prod(g.shape[axis] for axis in axes) for axes in (inputs, outputs)]
                step = newton_schulz((g + c.momentum * m[name]).reshape(sides))
                step = (0.2 * math.sqrt(max(sides)) * step).reshape(g.shape)
            else:
                m[name] = c.b1 * m[name] + (1 - c.b1) * g
                v[name] = c.b2 * v[name] + (1 - c.b2) * g**2
                step = m[name] / (1 - c.b1**t) / (np.sqrt(v[name] / (1 - c.b2**t)) + c.eps)
            params[name] = params[name] - c.learning_rate * step
        yield params


@pytest.mark.parametrize("form", FORMS)
def test_updates_are_those_of_the_written_out_loop(form):
    params, gradients = edge_cases(form)
    wanted = by_hand(flat(params), [flat(g) for g in gradients], C)
    for got, want in zip(by_optimizer(params, gradients, C), wanted, strict=True):
        assert flat(got).keys() == want.keys()
        for key, value in flat(got).items():
            np.testing.assert_allclose(value, want[key], rtol=1e-5, atol=1e-5, err_msg=key)


def test_a_step_is_almost_orthogonal_and_has_adams_size():
    config = tiny_models.config(d_model=32, d_inner=64, n_head=4, d_head=8)
    params = jax.tree.map(np.asarray, tiny_models.variables(config)["params"])
    rng = np.random.default_rng(2)
    gradient = jax.tree.map(lambda w: rng.standard_normal(w.shape).astype(np.float32), params)
    (after,) = by_optimizer(params, [gradient], C)
    moved = jax.tree.map(lambda new, old: np.asarray(old - new) / C.learning_rate, after, params)
    for name, kernel in moved["layer_0"]["feed_forward"].items():
        values = np.linalg.svd(kernel["kernel"], compute_uv=False) / (0.2 * 64**0.5)
        assert 0.6 < values.min() < values.max() < 1.3, name
        # ``values`` are 0.7 to 1.2; the RMS of the entries is 0.2 times the RMS of ``values``
        assert 0.14 < np.sqrt(np.mean(kernel["kernel"] ** 2)) < 0.24
    # Muon treats each projection of a layer as a separate matrix
    for name in ("query", "key", "value", "position"):
        step = moved["layer_0"]["attention"][name].reshape(32, 32)
        values = np.linalg.svd(step, compute_uv=False) / (0.2 * 32**0.5)
        assert 0.6 < np.median(values) < 1.3, name


@pytest.mark.parametrize("form", ["untied u and v", "shaw"])
def test_stacked_layers_are_updated_one_by_one(form):
    params, gradients = edge_cases(form)
    one_by_one = list(by_optimizer(params, gradients, C))[-1]
    stacked = by_optimizer(stack_layers(params), [stack_layers(g) for g in gradients], C)
    got, want = flat(unstack_layers(list(stacked)[-1])), flat(one_by_one)
    for key, value in got.items():
        np.testing.assert_allclose(value, want[key], rtol=1e-5, atol=1e-5, err_msg=key)


def test_the_sharding_of_parameters_does_not_change_a_step():
    params, gradients = edge_cases("relative")
    whole = list(by_optimizer(params, gradients, C))[-1]
    cut = list(by_optimizer(params, gradients, C, spread))[-1]
    shards = cut["layer_0"]["attention"]["query"].addressable_shards
    assert {shard.data.shape for shard in shards} == {(1, 2, 3)}
    for key, value in flat(cut).items():
        np.testing.assert_allclose(value, flat(whole)[key], rtol=1e-5, atol=1e-5, err_msg=key)


def test_one_matrix_moves_as_with_the_muon_of_optax():
    """The last steps agree: after many updates, optax's bias correction of momentum vanishes."""
    rng = np.random.default_rng(3)
    params = {"layer_0": {"dense": {"kernel": np.zeros((4, 6), np.float32)}}}
    draw = lambda: {"layer_0": {"dense": {"kernel": rng.standard_normal((4, 6)).astype("f4")}}}
    gradients = [draw() for _ in range(100)]
    reference = optax.contrib.muon(C.learning_rate, beta=C.momentum, consistent_rms=0.2)
    state = reference.init(params)
    for gradient in gradients:
        want, state = tiny_models.quick(reference.update)(gradient, state, params)
    steps = list(by_optimizer(params, gradients, C))
    got = jax.tree.map(lambda new, old: new - old, steps[-1], steps[-2])
    kernel = lambda tree: tree["layer_0"]["dense"]["kernel"]
    np.testing.assert_allclose(kernel(got), kernel(want), rtol=1e-3, atol=1e-5)
