"""LAMB updates parameters as NVIDIA's code does; ``by_hand`` writes out that rule in NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from optimizer_cases import FORMS, by_optimizer, edge_cases, flat, spread
from places import RECORDED

from txl_jax.config import OptimizerConfig
from txl_jax.convert.pytorch import config_from_pytorch, params_from_pytorch
from txl_jax.model.layout import stack_layers, unstack_layers
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.training.optimizer import scale_by_lamb

C = OptimizerConfig(
    name="lamb", learning_rate=0.01, schedule="constant", clip_norm=0.0, eps=1e-6, b1=0.8, b2=0.9
)


# NVIDIA's code stores each of these groups as one tensor, and any other array as its own tensor.
PARTS = [
    ["layer_0/attention/query", "layer_0/attention/key", "layer_0/attention/value"],
    ["layer_1/attention/query", "layer_1/attention/key", "layer_1/attention/value"],
    ["layer_0/attention/u", "layer_1/attention/u"],
    ["layer_0/attention/distance", "layer_1/attention/distance"],
    ["layer_0/attention/distance_bias", "layer_1/attention/distance_bias"],
    ["layer_0/positions", "layer_1/positions"],
]


def by_hand(params, gradients, c):
    """Yields the parameters (a flat dict) after the update by each gradient, by LAMB's formulas.

    The computation is in float64. ``c`` is the optimizer's config.
    """
    tensors = [parts for parts in PARTS if parts[0] in params]
    tensors += [[name] for name in params if not any(name in parts for parts in PARTS)]
    m = {name: np.zeros_like(w) for name, w in params.items()}
    v = {name: np.zeros_like(w) for name, w in params.items()}
    for gradient in gradients:
        params = dict(params)
        for names in tensors:
            step = {}
            for name in names:
                m[name] = c.b1 * m[name] + (1 - c.b1) * gradient[name]
                v[name] = c.b2 * v[name] + (1 - c.b2) * gradient[name] ** 2
                step[name] = m[name] / (np.sqrt(v[name]) + c.eps)
            weight_norm = np.linalg.norm(np.concatenate([params[name].ravel() for name in names]))
            step_norm = np.linalg.norm(np.concatenate([step[name].ravel() for name in names]))
            ratio = 1.0
            if weight_norm > 0 and step_norm > 0:
                ratio = min(weight_norm, 10.0) / (step_norm + c.eps)
            for name in names:
                params[name] = params[name] - c.learning_rate * ratio * step[name]
        yield params


@pytest.mark.parametrize("form", FORMS)
def test_updates_are_those_of_the_written_out_loop(form):
    params, gradients = edge_cases(form)
    wanted = by_hand(flat(params), [flat(g) for g in gradients], C)
    for got, want in zip(by_optimizer(params, gradients, C), wanted, strict=True):
        assert flat(got).keys() == want.keys()
        for key, value in flat(got).items():
            np.testing.assert_allclose(value, want[key], rtol=2e-6, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("form", ["untied u and v", "shaw", "gtrxl"])
def test_stacked_layers_are_updated_one_by_one(form):
    params, gradients = edge_cases(form)
    one_by_one = list(by_optimizer(params, gradients, C))[-1]
    stacked = by_optimizer(stack_layers(params), [stack_layers(g) for g in gradients], C)
    got, want = flat(unstack_layers(list(stacked)[-1])), flat(one_by_one)
    for key, value in got.items():
        np.testing.assert_allclose(value, want[key], rtol=2e-6, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_eps_leaves_parameters_without_gradient_unchanged(eps):
    """Only a parameter with a gradient moves: by m / (sqrt(v) + eps) times LAMB's trust ratio.

    m and v are the running means of the gradient and of its square.
    """
    tx = scale_by_lamb(b1=0.5, b2=0.75, eps=eps)
    params = {"moved": jnp.array([3.0]), "left": jnp.array([3.0])}
    gradient = {"moved": jnp.array([0.02]), "left": jnp.array([0.0])}
    updates, _ = tx.update(gradient, tx.init(params), params)
    step = 0.01 / (0.01 + eps)
    assert float(updates["moved"][0]) == pytest.approx(step * 3 / (step + eps), rel=1e-5)
    assert float(updates["left"][0]) == 0


@pytest.mark.integration
def test_the_sharding_of_parameters_does_not_change_a_step():
    params, gradients = edge_cases("relative")
    whole = list(by_optimizer(params, gradients, C))[-1]
    cut = list(by_optimizer(params, gradients, C, spread))[-1]
    shards = cut["layer_0"]["attention"]["query"].addressable_shards
    assert {shard.data.shape for shard in shards} == {(1, 2, 3)}
    for key, value in flat(cut).items():
        np.testing.assert_allclose(value, flat(whole)[key], rtol=1e-6, atol=1e-7, err_msg=key)


def test_twenty_steps_equal_nvidias_code():
    """Losses, gradient norms and final parameters are equal; memory is carried between steps."""
    if not (RECORDED / "lamb.npz").exists():
        pytest.skip(f"no recording {RECORDED / 'lamb.npz'}")
    recorded = np.load(RECORDED / "lamb.npz")
    about = json.loads((RECORDED / "lamb.json").read_text())
    try:
        cfg = config_from_pytorch({**about["constructor"], "impl": about["impl"]})
    except ValueError as error:
        pytest.skip(f"an adaptive softmax cannot be converted yet: {error}")
    state_of = lambda prefix: {
        key.removeprefix(prefix): recorded[key] for key in recorded.files if key.startswith(prefix)
    }
    params = params_from_pytorch(state_of("init/"), cfg)
    model = TransformerXL(cfg)
    rates = jnp.asarray(recorded["lr_used"])
    tx = optax.chain(
        optax.clip_by_global_norm(about["clip"]),
        scale_by_lamb(b1=about["betas"][0], b2=about["betas"][1], eps=about["eps"]),
        optax.scale_by_learning_rate(lambda t: rates[t]),
    )

    @tiny_models.quick
    def step(params, opt_state, mems, inputs, targets):
        def loss(params):
            nll, after = model.apply({"params": params}, inputs, targets, mems, method="nll")
            return nll.mean(), after

        (value, mems), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(gradient, opt_state, params)
        norm = optax.tree.norm(gradient)
        return optax.apply_updates(params, updates), opt_state, mems, value, norm

    opt_state = tx.init(params)
    mems = model.init_mems(about["batch_size"], about["constructor"]["mem_len"])
    seg_len, data = about["constructor"]["tgt_len"], recorded["data"]
    losses, norms = [], []
    for first in range(0, about["steps"] * seg_len, seg_len):
        inputs, targets = (data[first + i : first + i + seg_len].T for i in (0, 1))
        params, opt_state, mems, value, norm = step(params, opt_state, mems, inputs, targets)
        losses.append(float(value))
        norms.append(float(norm))
    np.testing.assert_allclose(losses, recorded["loss"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(norms, recorded["gnorm_before_clip"], rtol=1e-4)
    want = flat(params_from_pytorch(state_of("final/"), cfg))
    for key, value in flat(params).items():
        np.testing.assert_allclose(value, want[key], rtol=0, atol=2e-5, err_msg=key)
