"""On a CPU, bfloat16 matrix products equal float32 products that are rounded once, and are fast."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from txl_jax.model import scores, wide_products
from txl_jax.parallel import platforms
from txl_jax.parallel.platforms import cpu_has_bfloat16

STEP = 2.0**-8  # the largest relative error of rounding to bfloat16

units = pytest.mark.skipif(not cpu_has_bfloat16(), reason="this processor has no bfloat16 units")


def low(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def full(x):
    return np.asarray(x, np.float32)


@pytest.fixture
def with_units(monkeypatch):
    monkeypatch.setattr(wide_products, "cpu_has_bfloat16", lambda: True)


@units
@pytest.mark.parametrize("sizes", [(6, 8, 10), (7, 5, 3), (1, 4, 6), (2, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (4, 1)])
@pytest.mark.parametrize("rows", [False, True])
def test_values_and_both_derivatives_are_those_of_float32_products(sizes, lead, rows):
    s, d, e = sizes
    x, y = low(0, *lead, s, d), low(1, *lead, *((e, d) if rows else (d, e)))
    if rows:
        of = wide_products.products_of_rows
        plain = lambda x, y: full(x) @ full(y).swapaxes(-1, -2)
    else:
        of = lambda x, y: wide_products.matmul(x, y, "cpu")
        plain = lambda x, y: full(x) @ full(y)
    gradient, moved = low(2, *lead, s, e), low(3, *y.shape)

    @jax.jit
    def derived(x, y):
        found, derivatives = jax.vjp(of, x, y)
        tangent = jax.jvp(of, (x, y), (x, moved))[1]
        return found, tangent, *derivatives(gradient.astype(found.dtype))

    found, forward, dx, dy = derived(x, y)
    assert found.dtype == (jnp.float32 if rows else jnp.bfloat16)
    g = full(gradient)
    wide_y = full(y) if rows else full(y).swapaxes(-1, -2)
    first, second = (g, full(x)) if rows else (full(x), g)
    expected = g @ wide_y, first.swapaxes(-1, -2) @ second
    near = functools.partial(np.testing.assert_allclose, rtol=STEP, atol=STEP)
    near(full(found), plain(x, y))
    near(full(dx), expected[0])
    near(full(dy), expected[1])
    want = plain(x, y) + plain(x, moved)
    np.testing.assert_allclose(full(forward), want, rtol=2 * STEP, atol=4 * STEP)


@pytest.mark.parametrize("d", [1, 8, 41, 64])
@pytest.mark.parametrize("lead", [(), (2, 3)])
@pytest.mark.parametrize("rows", [False, True])
def test_a_row_that_reads_the_other_factor_gives_the_same_product(monkeypatch, d, lead, rows):
    monkeypatch.setattr(wide_products, "_LEAST", 0)
    x, y = low(0, *lead, 1, d), low(1, *lead, *((5, d) if rows else (d, 5)))
    columns = lambda x, y: wide_products.matmul(x, y, "cpu")
    of = wide_products.products_of_rows if rows else columns

    @jax.jit
    def derived(x, y):
        found, derivatives = jax.vjp(of, x, y)
        return found, *derivatives(jnp.ones_like(found))

    with wide_products.reading_rows():
        assert wide_products.apply_to("cpu", x, y)
        found, dx, dy = derived(x, y)
    wide_y = full(y).swapaxes(-1, -2) if rows else full(y)
    near = functools.partial(np.testing.assert_allclose, rtol=STEP, atol=STEP)
    near(full(found), full(x) @ wide_y)
    near(full(dx)[..., 0, :], wide_y.sum(-1), atol=4 * STEP)
    repeated = np.broadcast_to(full(x).swapaxes(-1, -2), (*lead, d, 5))
    near(full(dy), repeated.swapaxes(-1, -2) if rows else repeated)


@pytest.mark.parametrize("rows", [False, True])
def test_a_loop_over_rows_keeps_no_float32_copy_of_the_other_factor(rows):
    x, y = low(0, 1, 512), low(1, 512, 512)

    def product(x, y):
        if rows:
            return wide_products.products_of_rows(x, y).astype(x.dtype)
        return wide_products.matmul(x, y, "cpu")

    @jax.jit
    def loop(x, bits):
        with wide_products.reading_rows():
            step = lambda _, x: product(x, wide_products.from_bits(bits))
            return jax.lax.fori_loop(0, 5, step, x)

    as_users_compile: Any = {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }
    lowered = loop.lower(x, wide_products.to_bits(y))
    held = lowered.compile(as_users_compile).memory_analysis()
    assert held is not None
    assert held.temp_size_in_bytes < y.size


@units
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("rows", [1, 7, 512])
def test_a_bias_gets_the_sum_of_its_gradients_rounded_once(lead, rows):
    x, gradient, bias = low(0, *lead, rows, 5), low(1, *lead, rows, 5), low(2, *lead, 5)
    inputs, add = (x, full(bias)), functools.partial(wide_products.add_bias, platform="cpu")
    found, transposed = jax.vjp(add, *inputs)
    np.testing.assert_array_equal(full(found), full(x + bias[..., None, :]))
    to_x, to_bias = transposed(gradient)
    np.testing.assert_array_equal(to_x, gradient)
    np.testing.assert_allclose(to_bias, full(gradient).sum(-2), rtol=1e-5, atol=1e-5)
    moved = jax.jvp(add, inputs, inputs)[1]
    np.testing.assert_array_equal(full(moved), full(found))


def test_products_of_many_matrices_by_vmap_are_those_of_each():
    x, y = low(0, 3, 6, 8), low(1, 3, 8, 4)
    of = lambda x, y: wide_products.matmul(x, y, "cpu")
    grad = jax.grad(lambda x, y: (of(x, y).astype(jnp.float32) ** 2).sum(), (0, 1))
    for found, each in zip(
        jax.vmap(grad)(x, y), map(jnp.stack, zip(*map(grad, x, y), strict=True)), strict=True
    ):
        np.testing.assert_array_equal(full(found), full(each))


@units
@pytest.mark.integration
def test_every_order_that_a_program_may_ask_for_runs_and_a_gradient_uses_the_fast_kernel(
    as_users_compile,
):
    """XLA chooses a kernel for a matrix product before it merges transposes into the product."""
    x, y = low(0, 64, 48), low(1, 48, 32)
    turned = lambda z, turn: z.T if turn else z
    for turns in itertools.product((False, True), repeat=3):

        def loss(x, y, turns=turns):
            product = wide_products.matmul(turned(x, turns[0]), turned(y, turns[1]), "cpu")
            rows = wide_products.products_of_rows(turned(x, turns[0]), turned(y, turns[1]).T)
            return turned(product, turns[2]), turned(rows, turns[2])

        given = turned(x, turns[0]), turned(y, turns[1])
        found = jax.jit(loss)(*given)
        np.testing.assert_allclose(full(found[0]).sum(), full(x @ y).sum(), rtol=1e-2)
        total = lambda *xy, loss=loss: sum(jnp.sum(z.astype(jnp.float32) ** 2) for z in loss(*xy))
        of_matrix = jax.jit(jax.grad(total, 1))
        jax.block_until_ready(of_matrix(*given))
    program = jax.jit(wide_products._of_columns).lower(x, low(2, 64, 32)).compile().as_text() or ""
    product = re.search(r" dot\((%\S+), (%\S+)\)", program)
    assert product is not None
    around = program[: product.start()].rpartition("{\n")[2]
    kinds = [re.findall(rf"{re.escape(name)} = (\w+)\[", around) for name in product.groups()]
    assert kinds == [["bf16"], ["bf16"]]
    assert "ynn" in program


@units
@pytest.mark.integration
@pytest.mark.parametrize(
    "form",
    [
        *({"attention": name, **settings} for name, settings in tiny.ATTENTION.items()),
        {"pre_lnorm": True, "same_length": "pytorch", "cutoffs": (4, 9), "div_val": 2},
        {"cutoffs": (4,), "d_embed": 5, "untie_r": True},
        {"mixtures": 2, "d_embed": 6},
        tiny.GTRXL,
    ],
    ids=lambda form: "-".join(map(str, form.values()))[:40],
)
def test_a_model_trains_as_users_compile_it_close_to_float32(as_users_compile, form):
    def gradient(dtype):
        cfg = tiny.config(dtype=dtype, **form)
        tokens, targets = tiny.tokens(cfg, 6, 4).reshape(2, 3, 4)
        mems = tiny.memory(cfg, (0, 0, 0), 0) if cfg.memory_free else tiny.memory(cfg, (0, 2, 5), 5)
        mems = mems.replace(hidden=mems.hidden.astype(dtype))
        loss = lambda v: tiny.apply(cfg, "nll")(v, tokens, targets, mems)[0].mean()
        value, found = jax.jit(jax.value_and_grad(loss))(tiny.variables(cfg))
        return float(value), np.concatenate([np.ravel(x) for x in jax.tree.leaves(found)])

    (loss, found), (full_loss, expected) = gradient("bfloat16"), gradient("float32")
    assert abs(loss - full_loss) < 0.1  # the same bound as in test_low_precision.py
    cosine = found @ expected / np.linalg.norm(found) / np.linalg.norm(expected)
    assert cosine > 0.98


def test_only_bfloat16_on_a_cpu_with_units_takes_this_way(with_units, monkeypatch):
    x = low(0, 2, 3, 4, 8)
    takes = lambda x, platform="cpu": wide_products.apply_to(platform, x, x)
    assert takes(x)
    assert not takes(x, "tpu")
    assert not takes(x, "")
    assert not takes(x.astype(jnp.float32))
    program = lambda platform: str(
        jax.make_jaxpr(lambda x: scores.content_scores(x, None, x, platform))(x)
    )
    assert program("cpu") != program("gpu")
    assert program("gpu") == program("")
    monkeypatch.setattr(wide_products, "cpu_has_bfloat16", lambda: False)
    assert not takes(x)


@pytest.mark.parametrize(
    ("flags", "has"), [("fma avx512_bf16 vnni", True), ("amx_bf16", True), ("avx512f", False)]
)
def test_units_are_read_from_what_the_system_says(monkeypatch, flags, has):
    monkeypatch.setattr(platforms.pathlib.Path, "read_text", lambda *_, **__: f"flags\t: {flags}\n")
    assert platforms.cpu_has_bfloat16.__wrapped__() == has
