"""On a GPU, matrix products get two rows or more and padded sides, and XLA does not merge them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from jax.sharding import SingleDeviceSharding
from tiers import rest_integration

from benchmarks import program_kernels
from txl_jax.model import products
from txl_jax.model.block import FeedForward
from txl_jax.parallel.mesh import AXES


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(products, "platform_of", lambda mesh: "gpu")


def factors(rows, d, e):
    return (jax.random.normal(jax.random.key(n), s) for n, s in enumerate([(rows, d), (d, e)]))


@pytest.mark.parametrize(("rows", "multiplied"), [(1, 2), (3, 3)])
def test_a_gpu_multiplies_two_rows_or_more(on_gpu, rows, multiplied):
    x, matrix = factors(rows, 8, 4)
    text = str(jax.make_jaxpr(lambda x: products.product(x, matrix, None))(x))
    assert re.findall(r"f32\[(\d+),4\] = dot_general", text) == [str(multiplied)]
    result = products.product(x, matrix, None)
    np.testing.assert_allclose(result, np.asarray(x) @ np.asarray(matrix), rtol=1e-5)  # float32


@pytest.mark.parametrize("of", [products.product, products.product_apart])
def test_sides_are_padded_to_16_bytes_on_a_gpu_and_nothing_else_changes(on_gpu, of):
    x, matrix = factors(3, 5, 7)
    text = str(jax.make_jaxpr(lambda x, matrix: of(x, matrix, None))(x, matrix))
    assert "pad" in text
    assert not re.search(r"f32\[3,7\] = dot_general", text)
    run = lambda of: jax.value_and_grad(lambda x, m: (of(x, m) ** 2).sum(), (0, 1))(x, matrix)
    found, expected = run(lambda x, m: of(x, m, None)), run(lambda x, m: x @ m)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # float32


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("mask", rest_integration(1, ["locked", "independent"]))
@pytest.mark.few(1)
def test_the_inner_states_of_a_feed_forward_layer_stay_padded(monkeypatch, activation, mask):
    """Dropout and gradients equal those of states that are not padded."""
    sizes = {"d_model": 10, "n_head": 2, "d_head": 5, "d_inner": 13}
    cfg = tiny.config(**sizes, dropout=0.3, activation=activation, dropout_mask=mask)
    layer, h = FeedForward(cfg), jax.random.normal(jax.random.key(0), (2, 3, 10))
    variables = layer.init(jax.random.key(1), h)
    rngs = {"dropout": jax.random.key(2)}

    def run():
        out = lambda *given: jnp.asarray(layer.apply(*given, True, rngs=rngs))
        loss = lambda variables, h: (out(variables, h) ** 2).sum()
        of = lambda *given: jax.value_and_grad(loss, (0, 1))(*given)
        return str(jax.make_jaxpr(of)(variables, h)), of(variables, h)

    plain, expected = run()
    monkeypatch.setattr(products, "platform_of", lambda mesh: "gpu")
    text, found = run()
    assert "f32[6,16]" in text
    assert "f32[6,13]" not in text
    assert "f32[6,13]" in plain
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # float32


@pytest.mark.parametrize(("sizes", "padded"), [((2, 1, 1), 1), ((1, 2, 1), 0), ((1, 1, 2), 0)])
def test_a_matrix_that_devices_share_is_not_padded(on_gpu, sizes, padded):
    mesh = jax.make_mesh(sizes, AXES)
    run = lambda x, matrix: products.product(x, matrix, mesh)
    text = str(jax.make_jaxpr(run)(*factors(3, 5, 7)))
    assert ("pad" in text) == padded


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_product_apart_has_the_value_and_both_derivatives_of_a_product(scale):
    x, matrix, direction = (
        jax.random.normal(jax.random.key(n), s) for n, s in enumerate([(6, 5), (5, 7), (6, 7)])
    )
    apart = lambda x, matrix: products.product_apart(x, matrix, None, scale)
    plain = lambda x, matrix: x @ matrix * scale
    for derivative in (
        lambda f: jax.vjp(f, x, matrix)[1](direction),
        lambda f: jax.jvp(f, (x, matrix), (x + 1, matrix - 2)),
    ):
        found, expected = derivative(apart), derivative(plain)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # float32


@pytest.mark.integration
def test_on_a_gpu_results_of_products_apart_are_not_copied(eight_gpus):
    """XLA would merge products of the same rows, then copy each result (queries, keys, values)."""
    x = jax.ShapeDtypeStruct((6144, 1024), "bfloat16", sharding=SingleDeviceSharding(eight_gpus[0]))
    matrix = x.update(shape=(1024, 1024))

    def moved(product):
        run = lambda x, *matrices: [product(x, m) for m in matrices]
        text = jax.jit(run).lower(x, matrix, matrix, matrix).compile().as_text()
        found = program_kernels.kernels(text or "")
        return sum(k.moved for k in found if k.kind == "elementwise")

    assert moved(lambda x, m: products.product_apart(x, m, None)) == 0
    assert moved(lambda x, m: x @ m) > 0  # otherwise there is no reason for product_apart


def test_the_scale_of_a_product_apart_multiplies_the_matrix_in_the_gradient():
    x, matrix = factors(6, 5, 7)
    apart = lambda x, matrix: products.product_apart(x, matrix, None, 0.25)
    text = str(jax.make_jaxpr(jax.vjp(apart, x, matrix)[1])(x @ matrix))
    assert "f32[5,7] = mul" in text
    assert "f32[6,7] = mul" not in text
