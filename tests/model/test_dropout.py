"""Dropout is off without ``train``, and each dropout site (place in the model) is tested alone.

The seven sites of the original code come first. Then come the sites with a rate of their own, and
masks that are the same at all positions.

To test one site, the parameters of a pre-norm model are set so that the other parts add nothing.
For example, a layer whose output weights are 0 adds nothing, and ``core`` then changes its input
only by dropout. New memory holds each layer's input. The difference between the inputs of layers 1
and 0 is what layer 0 added.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax
from txl_jax.model.dropout import Dropout

RATE = 0.25
DRAWS = 2048
CFG = tiny.config(pre_lnorm=True, dropout=RATE)
ONLY_ATTENTION = tiny.config(pre_lnorm=True, dropatt=RATE)
MEMS = tiny.memory(CFG, (5,), 5)
SILENT = {"output": 0.0, "outer": 0.0, "outer_bias": 0.0}
"""Arguments of ``parameters`` with which layer 0 adds nothing to its input."""


def parameters(**changes):
    """Parameters of CFG. Each change fills one array of layer 0 (or u or v) with a value."""
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
        "v": (params, "v"),
        "value": (layer["attention"], "value"),
        "position": (layer["attention"], "position"),
    }
    for name, value in changes.items():
        where, key = places[name]
        where[key] = np.full_like(where[key], value)
    return params


@functools.cache
def sampler(cfg):
    """A function that returns the inputs of layers 0 and 1, and the output, [DRAWS,T,D] each.

    It takes DRAWS dropout keys, the parameters and the input.
    """

    def one(key, params, x):
        variables = {"params": params}
        h, mems = tiny.apply(cfg, "core")(variables, x, MEMS, train=True, rngs={"dropout": key})
        return mems.hidden[0, 0, -2:], mems.hidden[1, 0, -2:], h[0]

    return tiny.quick(jax.vmap(one, in_axes=(0, None, None)))


def sampled(cfg, params, x):
    keys = jax.random.split(jax.random.key(0), DRAWS)
    return [np.asarray(a) for a in sampler(cfg)(keys, params, x)]


def draws(x, cfg=CFG, **changes):
    return sampled(cfg, parameters(**changes), x)


def assert_dropped(values, undropped, rate):
    """Checks that an entry is 0 in a share ``rate`` of the draws, and else undropped/(1-rate)."""
    zero = values == 0
    kept = np.broadcast_to(undropped / (1 - rate), values.shape)
    np.testing.assert_allclose(values[~zero], kept[~zero], rtol=2e-5)
    share = zero.mean(axis=0)  # over DRAWS draws, at each entry
    assert np.abs(share - rate).max() <= 4.5 * np.sqrt(rate * (1 - rate) / DRAWS), share


X = tiny.embeddings(CFG, 1, 2)


def test_site_embedding_output():
    first, _, _ = draws(X)
    assert_dropped(first, X[0], RATE)


def test_site_final_hidden():
    two_layers = parameters(**SILENT)
    two_layers["layer_1"] = two_layers["layer_0"]
    first, second, last = sampled(CFG, two_layers, X)
    np.testing.assert_array_equal(first, second)
    assert_dropped(last, X[0], 1 - (1 - RATE) ** 2)  # dropped at input or output


def test_site_attention_output():
    """Without dropout, no entry of the attention's output is 0: the norm's bias is not 0."""
    first, second, _ = draws(
        np.zeros_like(X), outer=0.0, outer_bias=0.0, query=0.0, key=0.0, u=0.0, norm_bias=0.5
    )
    added = second - first
    assert abs((added == 0).mean() - RATE) < 0.02


def test_site_feed_forward_output():
    first, second, _ = draws(X, output=0.0, outer=0.0, outer_bias=1.0)
    assert_dropped(np.where(np.abs(second - first) < 1e-5, 0, second - first), 1.0, RATE)


def test_site_feed_forward_hidden():
    """Each of the F=10 hidden units is 1, and the output is the sum of those that are kept."""
    first, second, _ = draws(
        np.zeros_like(X), output=0.0, inner=0.0, inner_bias=1.0, outer=1.0, outer_bias=0.0
    )
    added = (second - first)[(second - first) != 0]  # where the dropout of the output kept it
    counts = added * (1 - RATE) ** 2
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-4)
    variance = 10 * RATE * (1 - RATE)
    assert abs(counts.mean() - 10 * (1 - RATE)) < 0.1
    assert abs(counts.var() - variance) < 0.15


def test_site_position_embedding():
    """Inputs and content scores are 0, so attention differs only by dropout of the encodings."""
    quiet = {"outer": 0.0, "outer_bias": 0.0, "query": 0.0, "key": 0.0, "u": 0.0}
    first, second, _ = draws(np.zeros_like(X), **quiet)
    added = (second - first)[:, 0, 0]
    kept = added[added != 0]
    assert len(np.unique(np.round(kept, 4))) > 10  # the output's mask alone would leave one value


def test_site_attention_probabilities_keeps_the_mean_and_uses_its_own_rate():
    """The output is linear in the probabilities, so its mean over draws is that without dropout."""
    changes = {"outer": 0.0, "outer_bias": 0.0}
    first, second, _ = draws(X, ONLY_ATTENTION, **changes)
    np.testing.assert_array_equal(first, np.broadcast_to(X[0], first.shape))
    added = second - first
    _, mems = tiny.compiled(ONLY_ATTENTION, "core")({"params": parameters(**changes)}, X, MEMS)
    undropped = np.asarray(mems.hidden[1, 0, -2:] - mems.hidden[0, 0, -2:])
    deviation = added.std(axis=0)
    assert (deviation > 1e-3).all()
    assert (np.abs(added.mean(axis=0) - undropped) < 4.5 * deviation / np.sqrt(DRAWS)).all()


@pytest.mark.parametrize(
    ("rate", "mask"), [(0.0, "independent"), (0.5, "independent"), (None, "locked")]
)
def test_input_has_a_rate_of_its_own(rate, mask):
    """``dropout_input`` is the rate for word embeddings; ``None`` means the rate ``dropout``."""
    cfg = tiny.config(pre_lnorm=True, dropout=RATE, dropout_input=rate, dropout_mask=mask)
    first, _, _ = draws(X, cfg)
    assert_dropped(first, X[0], RATE if rate is None else rate)


def test_input_rate_is_that_of_positions_too():
    """``dropout_input`` is also the rate for position encodings; ``dropout`` does not apply."""
    quiet = {"outer": 0.0, "outer_bias": 0.0, "query": 0.0, "key": 0.0, "u": 0.0}
    zeros = np.zeros_like(X)
    moved = [
        len(np.unique(np.round((second - first)[:, 0, 0], 5)))
        for first, second, _ in (
            draws(zeros, tiny.config(pre_lnorm=True, dropout_input=RATE), **quiet),
            draws(zeros, tiny.config(pre_lnorm=True, dropout=RATE, dropout_input=0.0), **quiet),
        )
    ]
    assert moved[0] > 10
    assert moved[1] == 2  # 0, and one value that the output's mask keeps


@pytest.mark.parametrize("rate", [0.0, 0.5], ids="rate_{}".format)
def test_output_has_a_rate_of_its_own(rate):
    cfg = tiny.config(pre_lnorm=True, dropout=RATE, dropout_input=0.0, dropout_output=rate)
    silent = parameters(**SILENT)
    silent["layer_1"] = silent["layer_0"]
    first, second, last = sampled(cfg, silent, X)
    np.testing.assert_array_equal(first, np.broadcast_to(X[0], first.shape))
    np.testing.assert_array_equal(first, second)
    assert_dropped(last, X[0], rate)


IDENTITY = np.eye(6, 8).reshape(2, 3, 8)
"""A matrix ``output`` that copies entry h of head n to index 3n+h of the attention's output."""
FIRST = np.array([1.0, 0.0, 0.0])  # [H]: scores depend on entry 0 only
UNIFORM = {"outer": 0.0, "outer_bias": 0.0, "query": 0.0, "u": 0.0, "v": 0.0, "output": IDENTITY}


def test_site_projected_values_has_one_mask_for_the_segment():
    added, undropped = gathered(UNIFORM)
    assert_dropped(added[..., :6], undropped[..., :6], RATE)
    zero = added[..., :6] == 0
    np.testing.assert_array_equal(zero[:, 0], zero[:, 1])
    assert (zero[:, 0, 0] != zero[:, 0, 5]).any()


@pytest.mark.parametrize(
    ("sites", "changes"),
    [
        (1, {"u": FIRST}),
        (2, {"query": 0.7 * np.eye(8, 2)[:, :, None] * FIRST}),
        (1, {"v": FIRST}),
        (2, {"query": 0.7 * np.eye(8, 2)[:, :, None] * FIRST, "key": 0.0}),
    ],
    ids=["keys", "queries_and_keys", "positions", "queries_and_positions"],
)
def test_sites_of_projected_queries_keys_and_positions_have_one_mask_for_the_segment(
    sites, changes
):
    """Scores depend only on entry 0 of a head. If it is dropped, the weights are uniform."""
    no_positions = {} if changes.keys() & {"v"} or "key" in changes else {"position": 0.0}
    added, _ = gathered({**UNIFORM, **no_positions, **changes})
    _, uniform = gathered(UNIFORM)
    for head in (slice(0, 3), slice(3, 6)):
        values_kept = (added[..., head] != 0).all(axis=(1, 2))
        values = added[values_kept][..., head] * (1 - RATE)
        is_uniform = (np.abs(values - uniform[..., head]) < 2e-5).all(axis=2)
        np.testing.assert_array_equal(is_uniform[:, 0], is_uniform[:, 1])
        want = 1 - (1 - RATE) ** sites
        error = np.sqrt(want * (1 - want) / len(is_uniform))
        assert abs(is_uniform[:, 0].mean() - want) < 4.5 * error
        kinds = np.unique(np.round(values[:, 0], 4), axis=0)
        assert len(kinds) == 2  # the entry is dropped, or kept and enlarged


def gathered(changes):
    """The attention's output with ``dropout_qkv`` alone [DRAWS,T,D], and without dropout [T,D]."""
    cfg = tiny.config(pre_lnorm=True, dropout_qkv=RATE)
    first, second, _ = draws(X, cfg, **changes)
    np.testing.assert_array_equal(first, np.broadcast_to(X[0], first.shape))
    _, mems = tiny.compiled(cfg, "core")({"params": parameters(**changes)}, X, MEMS)
    undropped = np.asarray(mems.hidden[1, 0, -2:] - mems.hidden[0, 0, -2:])
    return np.where(np.abs(second - first) < 1e-6, 0, second - first), undropped


@pytest.mark.integration
@pytest.mark.parametrize("changes", [{}, {"cutoffs": (4, 9), "div_val": 2}], ids=str)
def test_embedding_drops_whole_words_wherever_they_stand(changes):
    """A dropped word is 0 at all its positions in all rows; others are divided by 1 - rate."""
    cfg = tiny.config(dropout_embedding=RATE, **changes)
    tokens = np.array([[3, 5, 3, 12], [5, 5, 12, 3]], np.int32)
    mems = tiny.memory(cfg, (0, 0), 4)
    variables = tiny.variables(cfg)
    run = tiny.apply(cfg, "nll")

    def embedded(key, variables):
        train = {"train": True, "rngs": {"dropout": key}}
        return run(variables, tokens, tokens, mems, **train)[1].hidden[0]

    keys = jax.random.split(jax.random.key(0), DRAWS)
    values = np.asarray(tiny.quick(jax.vmap(embedded, in_axes=(0, None)))(keys, variables))
    whole = np.asarray(run(variables, tokens, tokens, mems)[1].hidden[0])
    kept = {word: (values[:, tokens == word] != 0).all(axis=(1, 2)) for word in (3, 5, 12)}
    for word, k in kept.items():
        enlarged = k[:, None, None] * whole[tokens == word] / (1 - RATE)
        np.testing.assert_allclose(values[:, tokens == word], enlarged, rtol=2e-5)
        assert abs(k.mean() - (1 - RATE)) < 4.5 * np.sqrt(RATE * (1 - RATE) / DRAWS)
    assert abs(np.corrcoef(kept[3], kept[5])[0, 1]) < 4.5 / np.sqrt(DRAWS)


@pytest.mark.integration
def test_initial_gradients_are_finite_where_a_stream_begins_with_a_dropped_word():
    """With zero biases, the states of a dropped first word are 0 in all layers.

    In an earlier version, each LayerNorm of zeros multiplied the gradient by 316, and the gradient
    overflowed in 16 layers.
    """
    cfg = tiny.config(n_layer=16, scan_layers=True, dropout_embedding=0.9)
    model = txl_jax.TransformerXL(cfg)
    tokens, mems = tiny.tokens(cfg, 4, 6), model.init_mems(4, 0)
    variables = model.init(jax.random.key(0), tokens, mems)

    run = tiny.apply(cfg, "nll")
    loss = lambda variables, key: jnp.mean(
        run(variables, tokens, tokens, mems, train=True, rngs={"dropout": key})[0]
    )
    gradient = tiny.quick(jax.grad(loss))(variables, jax.random.key(1))
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(gradient)))
    assert 0 < norm < 100


@pytest.mark.parametrize("mask", ["independent", "locked"])
def test_a_locked_mask_is_the_same_at_all_positions_and_another_in_every_row(mask):
    """Sites: the input, the feed-forward layer's inner states and output, and the final output."""
    cfg = tiny.config(pre_lnorm=True, dropout=RATE, dropout_mask=mask)
    x = np.ones((2, 4, 8), np.float32)
    core, mems = tiny.apply(cfg, "core"), tiny.memory(cfg, (4, 4), 4)

    def states(key, params):
        train = {"train": True, "rngs": {"dropout": key}}
        h, new = core({"params": params}, x, mems, **train)
        return new.hidden[0], new.hidden[1] - new.hidden[0], h

    run = tiny.quick(jax.vmap(states, in_axes=(0, None)))
    keys = jax.random.split(jax.random.key(0), 256)
    outside = parameters(output=0.0, outer=0.0, outer_bias=1.0)
    inside = parameters(output=0.0, inner=0.0, inner_bias=1.0, outer=1.0, outer_bias=0.0)
    silent = parameters(**SILENT)
    for params in (outside, inside, silent):
        params["layer_1"] = silent["layer_0"]
    sites = {
        "input": run(keys, outside)[0],
        "feed_forward_output": run(keys, outside)[1],
        "feed_forward_hidden": run(keys, inside)[1],
        "output": run(keys, silent)[2],
    }
    for site, values in sites.items():
        values = np.round(np.asarray(values), 4)
        same = (values == values[:, :, :1]).all(axis=(2, 3))  # [draws, rows]
        assert same.all() if mask == "locked" else same.mean() < 0.05, site
        assert (values[:, 0] == values[:, 1]).all(axis=(1, 2)).mean() < 0.05, site


def test_attention_probabilities_are_never_locked():
    """The mask of attention probabilities does not depend on ``dropout_mask``."""
    locked = tiny.config(pre_lnorm=True, dropatt=RATE, dropout_mask="locked")
    for one, other in zip(draws(X, ONLY_ATTENTION), draws(X, locked), strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_dropout_without_train_and_none_at_rate_0():
    """Evaluation at any rate and training at rate 0 give the same bits, and need no rng."""
    tokens, mems = tiny.tokens(CFG, 3, 4), tiny.memory(CFG, (0, 2, 5), 5)
    plain, rates = tiny.config(), tiny.config(dropout=0.5, dropatt=0.5)
    want, _ = tiny.apply(plain, "nll")(tiny.variables(plain), tokens, tokens, mems)
    evaluated, _ = tiny.apply(rates, "nll")(tiny.variables(plain), tokens, tokens, mems)
    trained, _ = tiny.apply(plain, "nll")(tiny.variables(plain), tokens, tokens, mems, train=True)
    np.testing.assert_array_equal(evaluated, want)
    np.testing.assert_array_equal(trained, want)


@pytest.mark.integration
@pytest.mark.parametrize(
    "rates", [{"dropout": 0.2}, {"dropatt": 0.2}, {"dropout_qkv": 0.2}], ids=str
)
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


@pytest.mark.parametrize("shared", [(), (1,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_of_relu_is_dropout_after_relu_in_every_bit(dtype, shared):
    drop, rngs = Dropout(RATE, shared), {"dropout": jax.random.key(3)}
    x, moved = jax.random.normal(jax.random.key(0), (2, 3, 5, 64), dtype)
    x = x.at[0, 0].set(0)

    def both(function):
        return jax.jvp(function, (x,), (moved,)), jax.vjp(function, x)[1](moved)

    of_relu = lambda x: drop.apply({}, x, True, rngs=rngs, method="of_relu")
    found, expected = both(of_relu), both(lambda x: drop.apply({}, nn.relu(x), True, rngs=rngs))
    assert 0 < jnp.count_nonzero(expected[1][0]) < x.size
    jax.tree.map(np.testing.assert_array_equal, found, expected)
