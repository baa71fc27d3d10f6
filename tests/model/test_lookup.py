"""Table lookup has the gradient of indexing; a GPU computes it by a matrix product or by sums."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from txl_jax.config import MeshConfig, TransformerXLConfig
from txl_jax.model import lookup
from txl_jax.parallel.mesh import ROWS, make_mesh
from txl_jax.parallel.shardings import shard_words


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(lookup, "platform_of", lambda mesh: "gpu")


def rows_and_gradients(table, index, dtype, weights):
    """The looked-up rows, and the gradient and forward derivative of their weighted sum."""
    rows = lambda table: lookup.table_rows(table, index, dtype, None)
    total = lambda table: jnp.sum(rows(table).astype(jnp.float32) * weights)
    change = jax.jvp(total, (table,), (jnp.cos(table),))[1]
    return rows(table), jax.grad(total)(table), change


PRODUCT = "dot_general"
"""An operation in the gradient of a small table; the gradient of a large table lacks it."""


@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 7), (5,), (1, 1), (3, 40)])
def test_values_and_derivatives_are_those_of_indexing(on_gpu, monkeypatch, dtype, shape, product):
    rng = np.random.default_rng(0)
    table, index = rng.standard_normal((6, 3), np.float32), rng.integers(0, 6, shape, np.int32)
    weights = rng.standard_normal((*shape, 3), np.float32)
    monkeypatch.setattr(lookup, "_MOST", 2**25 if product else 0)
    got = rows_and_gradients(table, index, dtype, weights)
    run = lambda table: rows_and_gradients(table, index, dtype, weights)
    traced = jax.make_jaxpr(run)(table)
    assert (PRODUCT in str(traced)) == product
    monkeypatch.setattr(lookup, "platform_of", lambda mesh: "cpu")
    want = rows_and_gradients(table, index, dtype, weights)
    np.testing.assert_array_equal(got[0], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):  # sums in another order
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_large_table_is_no_product(on_gpu):
    index = jnp.zeros(2**10, jnp.int32)
    for words, product in ((2**15, True), (2**15 + 1, False)):
        shape = jax.ShapeDtypeStruct((words, 1), jnp.float32)
        total = lambda table: lookup.table_rows(table, index, "float32", None).sum()
        assert (PRODUCT in str(jax.make_jaxpr(jax.grad(total))(shape))) == product


@pytest.mark.parametrize("shape", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 8}])
def test_devices_add_their_own_rows_and_exchange_the_sums_once(on_gpu, monkeypatch, shape):
    monkeypatch.setattr(lookup, "_MOST", 0)
    mesh = make_mesh(MeshConfig(**{"data": 1, **shape}), TransformerXLConfig(vocab_size=12), 8)
    rng = np.random.default_rng(0)
    table, index = rng.standard_normal((12, 3), np.float32), rng.integers(0, 12, (8, 5), np.int32)
    weights = rng.standard_normal((8, 5, 3), np.float32)
    place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def gradient(table, index, weights, mesh):
        shown = lambda table: lookup.table_rows(shard_words(table, mesh), index, "float32", mesh)
        return jax.grad(lambda table: jnp.sum(shown(table) * weights))(table)

    want = gradient(table, index, weights, None)
    run = jax.jit(gradient, static_argnums=3)
    given = place(table), place(index, ROWS), place(weights, ROWS), mesh
    np.testing.assert_allclose(run(*given), want, rtol=1e-5, atol=1e-6)
    text = run.lower(*given).compile().as_text() or ""
    assert len(re.findall(r" all-reduce(-start)?\(", text)) == 1


def test_any_number_of_rows_is_indexed_as_elsewhere(on_gpu):
    rows = jax.export.symbolic_shape("B")
    index = jax.ShapeDtypeStruct(rows, jnp.int32)
    table = jax.ShapeDtypeStruct((6, 3), jnp.float32)
    run = lambda table, index: lookup.table_rows(table, index, "float32", None)
    found = jax.export.export(jax.jit(run))(table, index)
    assert found.out_avals[0].shape == (*rows, 3)
