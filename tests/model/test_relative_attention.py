"""``relative_attention`` equals the paper's equation, written out per pair of query and key."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import rest_slow

import txl_jax
from txl_jax.messages import UserError

B, T, N, H = 2, 5, 3, 4
NAMES = ("q", "k", "v", "r", "u", "v_bias")
FORMS: dict[str, dict[str, Any]] = {
    "causal with memory": {"m": 3},
    "causal with memory and window": {"m": 3, "window": 2},
    "both directions, window and padded": {"causal": False, "window": 1, "lengths": (1, 4)},
    "causal": {},
    "causal and padded": {"lengths": (5, 2)},
    "itself alone": {"m": 2, "window": 0},
    "both directions": {"causal": False},
    "both directions with memory": {"causal": False, "m": 3},
    "scaled otherwise": {"causal": False, "scale": 0.7},
}


def drawn(m=0, causal=True, **_):
    """Random arrays for the function's arguments, by name."""
    sides = {"q": (B, T), "k": (B, m + T), "v": (B, m + T), "u": (), "v_bias": ()}
    sides["r"] = (m + T if causal else m + T + T - 1,)
    keys = jax.random.split(jax.random.key(0), len(NAMES))
    draw = lambda name, key: jax.random.normal(key, (*sides[name], N, H))
    return {name: draw(name, key) for name, key in zip(NAMES, keys, strict=True)}


def plain(x, m=0, causal=True, window=None, lengths=(T, T), scale=H**-0.5):
    """Computes the equation, one pair of query and key at a time."""
    rows = []
    for b, i, n in itertools.product(range(B), range(T), range(N)):
        if i >= lengths[b]:
            rows.append(jnp.zeros(H))
            continue
        scores, values = [], []
        for j in range(m + T):
            d = m + i - j
            if (
                (causal and d < 0)
                or (window is not None and abs(d) > window)
                or j - m >= lengths[b]
            ):
                continue
            of_distance = x["r"][m + T - 1 - d, n]
            query = x["q"][b, i, n]
            scores.append((query + x["u"][n]) @ x["k"][b, j, n])
            scores[-1] += (query + x["v_bias"][n]) @ of_distance
            values.append(x["v"][b, j, n])
        rows.append(jax.nn.softmax(jnp.stack(scores) * scale) @ jnp.stack(values))
    return jnp.stack(rows).reshape(B, T, N, H)


@pytest.mark.integration
@pytest.mark.parametrize("form", rest_slow(3, FORMS))
@pytest.mark.few(1)
def test_values_and_gradients_are_those_of_the_equation(form):
    form = FORMS[form]
    settings = {key: value for key, value in form.items() if key != "m"}
    x, direction = drawn(**form), jax.random.normal(jax.random.key(1), (B, T, N, H))
    run = lambda x: txl_jax.relative_attention(**x, **settings)
    found, expected = (
        jax.jit(jax.value_and_grad(lambda x, f=f: (jnp.sum(f(x) * direction), f(x)), has_aux=True))(
            x
        )
        for f in (run, lambda x: plain(x, **form))
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_biases_are_0_unless_given():
    x = drawn()
    zero = txl_jax.relative_attention(**{**x, "u": x["u"] * 0, "v_bias": x["v_bias"] * 0})
    none = txl_jax.relative_attention(**{**x, "u": None, "v_bias": None})
    np.testing.assert_allclose(none, zero, rtol=0, atol=1e-6)


def test_the_result_has_the_dtype_of_the_queries():
    x = drawn(causal=False)
    mixed = {**x, "q": x["q"].astype(jnp.bfloat16), "k": x["k"].astype(jnp.float16)}
    out = txl_jax.relative_attention(**mixed, causal=False)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(float), txl_jax.relative_attention(**x, causal=False), rtol=0, atol=0.05
    )


def test_float64_is_as_precise_as_its_type():
    with jax.enable_x64(True):
        x = {name: value.astype("float64") for name, value in drawn(m=3).items()}
        last = x["q"][:, -1]  # the last query attends to all keys
        scores = jnp.einsum("bnh,bknh->bkn", last + x["u"], x["k"])
        scores += jnp.einsum("bnh,knh->bkn", last + x["v_bias"], x["r"])
        weights = jax.nn.softmax(scores * H**-0.5, axis=1)
        expected = jnp.einsum("bkn,bknh->bnh", weights, x["v"])
        out = txl_jax.relative_attention(**x)[:, -1]
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mean_of_many_values_does_not_overflow(dtype):
    keys = jnp.zeros((1, 1024, 1, 4), dtype)
    out = txl_jax.relative_attention(keys[:, :1], keys, keys + 100, keys[0])
    np.testing.assert_allclose(out.astype(float), 100, rtol=0.01)


def test_dropout_changes_with_the_key_and_keeps_the_mean():
    x = drawn(causal=False)
    run = lambda key: txl_jax.relative_attention(
        **x, causal=False, dropout_rate=0.3, dropout_key=key
    )
    drawn_often = jax.vmap(run)(jax.random.split(jax.random.key(0), 4000))
    assert jnp.std(drawn_often, axis=0).max() > 0.1
    expected = txl_jax.relative_attention(**x, causal=False)
    np.testing.assert_allclose(drawn_often.mean(0), expected, rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": jnp.zeros((T + 1, N, H))}, r"r has the shape \(6, 3, 4\).*need \(5, 3, 4\)"),
        ({"causal": False}, r"r has the shape \(5, 3, 4\).*need \(9, 3, 4\)"),
        ({"k": jnp.zeros((B, 4, N, H)), "v": jnp.zeros((B, 4, N, H))}, "need|fewer"),
        ({"u": jnp.zeros(H)}, "u has the shape"),
        ({"window": -1}, "window = -1"),
        ({"dropout_rate": 0.1}, "dropout_key"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(change, said):
    with pytest.raises(UserError, match=said):
        txl_jax.relative_attention(**{**drawn(), **change})
