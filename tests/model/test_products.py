"""Products of a single row, and several products of the same rows, which a GPU computes apart."""

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks import program_kernels
from txl_jax.model import products


@pytest.mark.parametrize(
    ("platform", "rows", "multiplied"), [("cpu", 1, 1), ("gpu", 1, 2), ("gpu", 3, 3)]
)
def test_a_gpu_multiplies_two_rows_or_more(monkeypatch, platform, rows, multiplied):
    monkeypatch.setattr(products, "platform_of", lambda mesh: platform)
    x, matrix = (jax.random.normal(jax.random.key(n), s) for n, s in enumerate([(rows, 5), (5, 7)]))
    seen = []

    def product(x):
        seen.append(len(x))
        return x @ matrix

    result = products.product_of_rows(product, x, None)
    assert seen == [multiplied]
    np.testing.assert_allclose(result, np.asarray(x) @ np.asarray(matrix), rtol=1e-5)  # float32


def test_a_product_apart_has_the_value_and_both_derivatives_of_a_product():
    x, matrix, direction = (
        jax.random.normal(jax.random.key(n), s) for n, s in enumerate([(6, 5), (5, 7), (6, 7)])
    )
    plain = lambda x, matrix: x @ matrix
    for derivative in (
        lambda f: jax.vjp(f, x, matrix)[1](direction),
        lambda f: jax.jvp(f, (x, matrix), (x + 1, matrix - 2)),
    ):
        found, expected = derivative(products.product_apart), derivative(plain)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # float32


@pytest.mark.integration
def test_on_a_gpu_results_of_products_apart_are_not_copied(eight_gpus):
    """Of the same rows, as queries, keys and values are. XLA would merge them, and copy each."""
    x = jax.ShapeDtypeStruct((6144, 1024), "bfloat16", sharding=SingleDeviceSharding(eight_gpus[0]))
    matrix = x.update(shape=(1024, 1024))

    def moved(product):
        run = lambda x, *matrices: [product(x, m) for m in matrices]
        text = jax.jit(run).lower(x, matrix, matrix, matrix).compile().as_text()
        found = program_kernels.kernels(text or "")
        return sum(k.moved for k in found if k.kind == "elementwise")

    assert moved(products.product_apart) == 0
    assert moved(lambda x, m: x @ m) > 0  # otherwise there is no reason for product_apart
