"""Rows of a table have the gradient of plain indexing, by a product of one-hot rows on a GPU."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.model import lookup


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(lookup, "platform_of", lambda mesh: "gpu")


def rows_and_gradients(table, index, dtype, weights):
    """The rows, the gradient and the forward derivative of a weighted sum of them."""
    rows = lambda table: lookup.table_rows(table, index, dtype, None)
    total = lambda table: jnp.sum(rows(table).astype(jnp.float32) * weights)
    change = jax.jvp(total, (table,), (jnp.cos(table),))[1]
    return rows(table), jax.grad(total)(table), change


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 7), (5,), (1, 1)])
def test_values_and_derivatives_are_those_of_indexing(on_gpu, monkeypatch, dtype, shape):
    rng = np.random.default_rng(0)
    table, index = rng.standard_normal((6, 3), np.float32), rng.integers(0, 6, shape, np.int32)
    weights = rng.standard_normal((*shape, 3), np.float32)
    got = rows_and_gradients(table, index, dtype, weights)
    assert "dot_general" in str(
        jax.make_jaxpr(rows_and_gradients, (2,))(table, index, dtype, weights)
    )
    monkeypatch.setattr(lookup, "platform_of", lambda mesh: "cpu")
    want = rows_and_gradients(table, index, dtype, weights)
    np.testing.assert_array_equal(got[0], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):  # sums in another order
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_large_table_is_indexed_as_elsewhere(on_gpu):
    index = jnp.zeros(2**10, jnp.int32)
    for words, product in ((2**15, True), (2**15 + 1, False)):
        shape = jax.ShapeDtypeStruct((words, 1), jnp.float32)
        total = lambda table: lookup.table_rows(table, index, "float32", None).sum()
        assert ("dot_general" in str(jax.make_jaxpr(jax.grad(total))(shape))) == product


def test_any_number_of_rows_is_indexed_as_elsewhere(on_gpu):
    rows = jax.export.symbolic_shape("B")
    index = jax.ShapeDtypeStruct(rows, jnp.int32)
    table = jax.ShapeDtypeStruct((6, 3), jnp.float32)
    run = lambda table, index: lookup.table_rows(table, index, "float32", None)
    found = jax.export.export(jax.jit(run))(table, index)
    assert found.out_avals[0].shape == (*rows, 3)
