"""Scanned layers and recomputed layers (``remat``) give the results of separate layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models

import txl_jax
from txl_jax.model import block
from txl_jax.model.block import LayerNorm, _layer_norm
from txl_jax.model.dropout import Dropout
from txl_jax.model.layout import stack_layers, unstack_layers

B, T, M = 3, 5, 7
REMAT = ("none", "products", "layer")
FORMS: dict[str, dict[str, Any]] = {
    "relative": {},
    "relative, untied": {"untie_r": True},
    "shaw": {"attention": "shaw", "n_positions": 9},
    "absolute": {"attention": "absolute"},
    "absolute_per_layer": {"attention": "absolute_per_layer", "n_positions": 9, "d_head": 4},
    "shared_projection, pre-LN": {"attention": "shared_projection", "pre_lnorm": True},
    "gtrxl": {**tiny_models.GTRXL, "untie_r": True},
}


def run(cfg, params):
    """Mean nll of a segment with partly filled memory, its gradient by layer, and new memory."""
    model = txl_jax.TransformerXL(cfg)
    mems = model.init_mems(B, 0 if cfg.memory_free else M)
    hidden = 0.5 * jax.random.normal(jax.random.key(5), mems.hidden.shape)
    filled = jnp.minimum(jnp.array([0, 3, M]), mems.mem_len)
    tokens = tiny_models.tokens(cfg, B, T + 1)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        kept = mems.replace(hidden=hidden, filled=filled)
        args = tokens[:, :-1], tokens[:, 1:], kept
        return model.apply({"params": params}, *args, method="nll")[0].mean()

    @jax.jit
    def memory(params):
        kept = mems.replace(hidden=hidden, filled=filled)
        return model.apply({"params": params}, tokens[:, :-1], kept)[1]

    value, gradient = loss(params)
    return value, unstack_layers(gradient), memory(params)


ALL = [(form, scan, r) for form in FORMS for scan in (False, True) for r in REMAT]
DEFAULT = [("relative", False, "layer"), *[(form, True, "products") for form in FORMS]]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("form", "scan", "remat"),
    [*DEFAULT, *[pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in DEFAULT]],
)
@pytest.mark.few(3)
def test_loss_gradient_and_memory_do_not_depend_on_how_layers_are_run(form, scan, remat):
    cfg = tiny_models.config(**FORMS[form])
    other = dataclasses.replace(cfg, scan_layers=scan, remat=remat)
    params = tiny_models.variables(cfg)["params"]
    want = run(cfg, params)
    got = run(other, stack_layers(params) if scan else params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_scanned_model_is_made_with_stacked_parameters(form):
    cfg = tiny_models.config(**FORMS[form])
    params = tiny_models.variables(cfg)["params"]
    model = txl_jax.TransformerXL(dataclasses.replace(cfg, scan_layers=True))
    mems = model.init_mems(1, 0 if cfg.memory_free else 1)
    tokens = jnp.zeros((1, 1), jnp.int32)
    got = jax.eval_shape(model.init, jax.random.key(0), tokens, mems)["params"]
    want = jax.eval_shape(stack_layers, params)
    sizes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert sizes(got) == sizes(want)


def test_layers_of_a_scanned_model_start_from_draws_of_their_own():
    cfg = tiny_models.config(scan_layers=True)
    model = txl_jax.TransformerXL(cfg)
    mems, tokens = model.init_mems(1, 1), jnp.zeros((1, 1), jnp.int32)
    params = model.init(jax.random.key(0), tokens, mems)["params"]["layers"]
    query = params["attention"]["query"]
    assert np.abs(query[0] - query[1]).max() > 0.1 * cfg.init_std
    np.testing.assert_allclose(np.std(query), cfg.init_std, rtol=0.2)


def test_every_layer_of_a_scanned_model_has_dropout_of_its_own():
    cfg = tiny_models.config(dropout=0.5, dropout_input=0.0, dropout_output=0.0, n_layer=2)
    params = tiny_models.variables(cfg)["params"]
    silent = jax.tree.map(jnp.zeros_like, params["layer_0"])
    for norm in ("norm_attention", "norm_feed_forward"):
        silent[norm]["scale"] = jnp.ones(cfg.d_model)
    silent["feed_forward"]["outer"]["bias"] = 10 * jnp.ones(cfg.d_model)  # then dropped or doubled
    stacked = stack_layers({**params, "layer_0": silent, "layer_1": silent})
    model = txl_jax.TransformerXL(dataclasses.replace(cfg, scan_layers=True, pre_lnorm=True))
    nothing = jnp.zeros((B, T, cfg.d_model))
    rngs = {"dropout": jax.random.key(3)}
    arguments: Any = {"method": "core", "train": True, "rngs": rngs}
    after: Any = model.apply({"params": stacked}, nothing, model.init_mems(B, T), **arguments)
    out, mems = after
    of_first = mems.hidden[1]  # 0, or 20 where the first layer's bias was kept
    np.testing.assert_array_equal(np.unique(of_first), [0, 20])
    of_second = np.asarray(out - of_first)
    np.testing.assert_array_equal(np.unique(of_second), [0, 20])
    assert (of_first != of_second).any()


def test_stacking_and_unstacking_are_inverse_on_optimizer_states_too():
    params = tiny_models.variables(tiny_models.config(n_layer=3))["params"]
    state = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params)
    stacked = stack_layers(state)
    assert stacked[1][0].mu["layers"]["attention"]["query"].shape[0] == 3
    again = unstack_layers(stacked)
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_layers_are_stacked_in_their_order():
    tree = {f"layer_{n}": {"w": jnp.full(2, n)} for n in reversed(range(12))}
    np.testing.assert_array_equal(stack_layers(tree)["layers"]["w"][:, 0], np.arange(12))


def test_a_scanned_model_says_that_it_has_no_cache():
    cfg = tiny_models.config(scan_layers=True)
    model = txl_jax.TransformerXL(cfg)
    params = stack_layers(tiny_models.variables(tiny_models.config())["params"])
    with pytest.raises(ValueError, match="unstack_layers"):
        model.apply({"params": params}, model.init_mems(1, 4), seg_len=2, method="init_cache")


# --------------------------------------------------------------------------------------
# Arrays that the forward pass keeps for the gradient. A loop over layers would copy them.


def kept_for_the_gradient(function, *args):
    """Shapes and dtypes of the arrays that reverse mode keeps."""
    kept = jax.tree.leaves(jax.vjp(function, *args)[1])
    return sorted((x.shape, x.dtype.name) for x in kept)


def test_a_norm_keeps_its_input_and_two_numbers_of_each_state():
    norm, h = (
        LayerNorm(tiny_models.config(d_model=8, dtype="bfloat16")),
        jnp.ones((B, T, 8), "bfloat16"),
    )
    params = norm.init(jax.random.key(0), h)
    moments = [((B, T, 1), "float32")] * 2
    kept = kept_for_the_gradient(norm.apply, params, h)
    assert kept == [*moments, ((B, T, 8), "bfloat16"), ((8,), "float32")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_on_a_gpu_has_the_same_value_and_derivatives(dtype):
    draw = lambda n, *sides: jax.random.normal(jax.random.key(n), sides)
    h, moved = draw(0, B, T, 64).astype(dtype), draw(1, B, T, 64).astype(dtype)
    of_parameters = 1 + draw(2, 64), draw(3, 64)
    inputs, tangents = (h, *of_parameters), (moved, draw(4, 64), draw(5, 64))
    run = lambda on_gpu: jax.jit(lambda *x: _layer_norm((1e-5, jnp.dtype(dtype), on_gpu), x, ()))
    for derive in (
        lambda norm: jax.vjp(norm, *inputs)[1](moved),
        lambda norm: jax.jvp(norm, inputs, tangents),
    ):
        for a, b in zip(derive(run(True)), derive(run(False)), strict=True):
            a, b = np.asarray(a, "float32"), np.asarray(b, "float32")
            np.testing.assert_allclose(a, b, atol=1e-5 if dtype == "float32" else 0.02)


def test_on_a_gpu_each_sum_of_a_row_is_stored_for_the_kernels_of_the_gradient(monkeypatch):
    monkeypatch.setattr(block, "platform_of", lambda mesh: "gpu")
    norm, h = LayerNorm(tiny_models.config(d_model=8)), jnp.ones((B, T, 8))
    params = norm.init(jax.random.key(0), h)
    program = lambda f: str(jax.make_jaxpr(f)(params, h))
    gradient = program(lambda *x: jax.vjp(norm.apply, *x)[1](h))
    # one barrier for the moments, and one for the sums of each row in the gradient
    assert gradient.count("optimization_barrier") == 2
    assert "optimization_barrier" not in jax.jit(norm.apply).lower(params, h).as_text()


def test_dropout_keeps_a_seed_and_its_gradient_has_the_same_mask():
    h = jax.random.normal(jax.random.key(0), (B, T, 64))
    drop = lambda h: Dropout(0.4).apply({}, h, True, rngs={"dropout": jax.random.key(1)})
    assert kept_for_the_gradient(drop, h) == [((2,), "uint32")]
    dropped, pull_back = jax.vjp(drop, h)
    (gradient,) = pull_back(jnp.ones_like(h))
    np.testing.assert_allclose(gradient, np.where(dropped == 0, 0, 1 / 0.6), rtol=1e-6)
    assert 0.3 < np.mean(dropped == 0) < 0.5
