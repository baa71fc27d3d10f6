"""Dropout: off without ``train``, and at the authors' seven sites, each shown by itself.

To see a site alone, the other parts of a pre-norm model are silenced by their parameters: a
layer whose output weights are 0 adds nothing, so ``core`` is then the identity but for dropout.
What a layer adds is the difference of the inputs of two layers, which new memory holds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax

RATE = 0.25
DRAWS = 2048
CFG = tiny.config(pre_lnorm=True, dropout=RATE)
ONLY_ATTENTION = tiny.config(pre_lnorm=True, dropatt=RATE)
MEMS = tiny.memory(CFG, (5,), 5)


def parameters(**changes):
    """Parameters of CFG with arrays of layer 0 replaced by a constant: {"output": 0.0, …}."""
    params = jax.tree.map(np.array, tiny.variables(CFG)["params"])
    layer = params["layer_0"]
    places = {
        "query": (layer["attention"], "query"),
        "key": (layer["attention"], "key"),
        "output": (layer["attention"], "output"),
        "inner": (layer["feed_forward"]["inner"], "kernel"),
        "inner_bias": (layer["feed_forward"]["inner"], "bias"),
        "outer": (layer["feed_forward"]["outer"], "kernel"),
        "outer_bias": (layer["feed_forward"]["outer"], "bias"),
        "norm_bias": (layer["norm_attention"], "bias"),
        "u": (params, "u"),
    }
    for name, value in changes.items():
        where, key = places[name]
        where[key] = np.full_like(where[key], value)
    return params


@functools.cache
def sampler(cfg):
    """Inputs of layer 0 and layer 1, and the output, [DRAWS,T,D] each, for many dropout keys."""

    def one(key, params, x):
        variables = {"params": params}
        h, mems = tiny.apply(cfg, "core")(variables, x, MEMS, train=True, rngs={"dropout": key})
        return mems.hidden[0, 0, -2:], mems.hidden[1, 0, -2:], h[0]

    return tiny.quick(jax.vmap(one, in_axes=(0, None, None)))


def draws(x, cfg=CFG, **changes):
    keys = jax.random.split(jax.random.key(0), DRAWS)
    return [np.asarray(a) for a in sampler(cfg)(keys, parameters(**changes), x)]


def assert_dropped(values, undropped, rate):
    """Every value is 0 or undropped/(1-rate), 0 in a share ``rate`` of cases at every entry."""
    zero = values == 0
    kept = np.broadcast_to(undropped / (1 - rate), values.shape)
    np.testing.assert_allclose(values[~zero], kept[~zero], rtol=2e-5)
    share = zero.mean(axis=0)  # over DRAWS draws, at each entry
    assert np.abs(share - rate).max() < 4.5 * np.sqrt(rate * (1 - rate) / DRAWS), share


X = tiny.embeddings(CFG, 1, 2)


def test_site_embedding_output():
    first, _, _ = draws(X)
    assert_dropped(first, X[0], RATE)


def test_site_final_hidden():
    silent = {"output": 0.0, "outer": 0.0, "outer_bias": 0.0}
    two_layers = parameters(**silent)
    two_layers["layer_1"] = two_layers["layer_0"]
    keys = jax.random.split(jax.random.key(0), DRAWS)
    first, second, last = (np.asarray(a) for a in sampler(CFG)(keys, two_layers, X))
    np.testing.assert_array_equal(first, second)
    assert_dropped(last, X[0], 1 - (1 - RATE) ** 2)  # embedding, then final


def test_site_attention_output():
    """Zero inputs: nothing else moves what a query gathers enough to make it 0."""
    first, second, _ = draws(
        np.zeros_like(X), outer=0.0, outer_bias=0.0, query=0.0, key=0.0, u=0.0, norm_bias=0.5
    )
    added = second - first
    assert abs((added == 0).mean() - RATE) < 0.02


def test_site_feed_forward_output():
    first, second, _ = draws(X, output=0.0, outer=0.0, outer_bias=1.0)
    assert_dropped(np.where(np.abs(second - first) < 1e-5, 0, second - first), 1.0, RATE)


def test_site_feed_forward_hidden():
    """relu gives 1 everywhere; its F=10 masked entries are summed, so the sum is binomial."""
    first, second, _ = draws(
        np.zeros_like(X), output=0.0, inner=0.0, inner_bias=1.0, outer=1.0, outer_bias=0.0
    )
    added = (second - first)[(second - first) != 0]  # where the output's own mask kept it
    counts = added * (1 - RATE) ** 2
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-4)
    variance = 10 * RATE * (1 - RATE)
    assert abs(counts.mean() - 10 * (1 - RATE)) < 0.1
    assert abs(counts.var() - variance) < 0.15


def test_site_position_embedding():
    """Zero inputs and no content terms: only the dropped encodings can move the weights."""
    quiet = {"outer": 0.0, "outer_bias": 0.0, "query": 0.0, "key": 0.0, "u": 0.0}
    first, second, _ = draws(np.zeros_like(X), **quiet)
    added = (second - first)[:, 0, 0]
    kept = added[added != 0]
    assert len(np.unique(np.round(kept, 4))) > 10  # the output's mask alone would leave one value


def test_site_attention_probabilities_keeps_the_mean_and_uses_its_own_rate():
    """What a layer adds is linear in the masked probabilities, so its mean is the undropped one."""
    changes = {"outer": 0.0, "outer_bias": 0.0}
    first, second, _ = draws(X, ONLY_ATTENTION, **changes)
    np.testing.assert_array_equal(first, np.broadcast_to(X[0], first.shape))
    added = second - first
    _, mems = tiny.compiled(ONLY_ATTENTION, "core")({"params": parameters(**changes)}, X, MEMS)
    undropped = np.asarray(mems.hidden[1, 0, -2:] - mems.hidden[0, 0, -2:])
    deviation = added.std(axis=0)
    assert (deviation > 1e-3).all()
    assert (np.abs(added.mean(axis=0) - undropped) < 4.5 * deviation / np.sqrt(DRAWS)).all()


def test_no_dropout_without_train_and_none_at_rate_0():
    """Same bits as a model without rates, evaluated or trained; no rng is asked for."""
    tokens, mems = tiny.tokens(CFG, 3, 4), tiny.memory(CFG, (0, 2, 5), 5)
    plain, rates = tiny.config(), tiny.config(dropout=0.5, dropatt=0.5)
    want, _ = tiny.apply(plain, "nll")(tiny.variables(plain), tokens, tokens, mems)
    evaluated, _ = tiny.apply(rates, "nll")(tiny.variables(plain), tokens, tokens, mems)
    trained, _ = tiny.apply(plain, "nll")(tiny.variables(plain), tokens, tokens, mems, train=True)
    np.testing.assert_array_equal(evaluated, want)
    np.testing.assert_array_equal(trained, want)


@pytest.mark.parametrize("rates", [{"dropout": 0.2}, {"dropatt": 0.2}], ids=str)
def test_training_varies_with_rng_and_row_and_repeats_with_the_same_rng(rates):
    cfg = tiny.config(**rates)
    tokens = np.tile(tiny.tokens(cfg, 1, 4), (3, 1))  # three rows alike
    mems = txl_jax.TransformerXL(cfg).init_mems(3, 5)
    nll = tiny.quick(
        lambda key: tiny.apply(cfg, "nll")(
            tiny.variables(cfg), tokens, tokens, mems, train=True, rngs={"dropout": key}
        )[0]
    )
    one, again, other = (nll(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (jnp.abs(one - other).max(axis=1) > 1e-4).all()  # in every row
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert jnp.abs(one[a] - one[b]).max() > 1e-4
