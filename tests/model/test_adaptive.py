"""The loss computed in blocks equals the dense softmax's loss, for targets in any clusters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny_models as tiny

from txl_jax.model import cross_entropy
from txl_jax.model.adaptive import Vocabulary

ROWS = 11
CLUSTERS = {"cutoffs": (4, 9), "tie_projs": (False, True)}
FORMS = {
    "one_cluster": tiny.config(),
    "clusters": tiny.config(**CLUSTERS),
    "clusters_narrow": tiny.config(**CLUSTERS, d_embed=5),
    "div2": tiny.config(**CLUSTERS, div_val=2),
    "div2_untied": tiny.config(**CLUSTERS, div_val=2, tie_weight=False),
}
TARGETS = {
    "of_every_cluster": [12, 0, 4, 8, 9, 3, 2, 11, 5, 4, 9],
    "all_of_the_shortlist": [0, 3, 1, 2, 0, 0, 3, 3, 1, 2, 1],
    "all_of_the_first_tail": [4, 8, 5, 6, 7, 4, 4, 8, 8, 5, 6],
    "all_of_the_last_tail": [9, 12, 10, 11, 9, 9, 12, 12, 10, 11, 12],
    "none_of_the_first_tail": [0, 12, 3, 9, 10, 0, 1, 2, 11, 3, 9],
    "one_of_the_last_tail": [0, 1, 4, 12, 8, 3, 2, 5, 7, 6, 0],
}


@functools.cache
def vocabulary(cfg):
    """Parameters outside the layers: those of embedding and softmax, and u and v."""
    whole = tiny.variables(cfg)["params"]
    return {name: leaf for name, leaf in whole.items() if not isinstance(leaf, dict)}


def states(cfg):
    return tiny.embeddings(cfg, 1, ROWS)


def block_loss(cfg, params, h, targets):
    return Vocabulary(cfg).apply({"params": params}, h, targets, method="nll")


def dense_loss(cfg, params, h, targets):
    logits: Any = Vocabulary(cfg).apply({"params": params}, h, method="logits")
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


@pytest.fixture(params=[4, 11, 1], ids="blocks_of_{}".format)
def block(request, monkeypatch):
    """Sets the rows per block: 4 (the last block of all 11 rows then has 3), 11 or 1.

    With 4 and 1, a tile has 3 words instead of all. With 11 and 1, inputs are padded as on a GPU.
    """
    if request.param != 11:
        monkeypatch.setitem(cross_entropy.TILE_WORDS, "cpu", 3)
    if request.param != 4:
        monkeypatch.setitem(cross_entropy.MULTIPLE, "cpu", 8)
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", request.param)
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", 1)
    return request.param


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("block", [4, 11], indirect=True)
def test_losses_equal_the_formulas_wherever_the_targets_fall(name, block):
    cfg, h = FORMS[name], states(FORMS[name])
    params = reference.float64(vocabulary(cfg))
    scores = [reference.log_softmax(reference.scores_of_words(params, cfg, x)) for x in h[0]]
    loss = tiny.quick(functools.partial(block_loss, cfg))
    for where, targets in TARGETS.items():
        want = [-z[target] for z, target in zip(scores, targets, strict=True)]
        got = loss(vocabulary(cfg), h, np.array([targets], np.int32))
        np.testing.assert_allclose(got[0], want, atol=1e-5, err_msg=where)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["one_cluster", "clusters_narrow", "div2"])
@pytest.mark.few(3)
def test_gradients_equal_those_of_the_dense_softmax_wherever_the_targets_fall(name, block):
    """Compares gradients by parameters and states. Losses have random weights; one weight is 0."""
    cfg, h = FORMS[name], states(FORMS[name])
    weights = np.random.default_rng(0).standard_normal((1, ROWS)).astype(np.float32)
    weights[0, 3] = 0

    def gradient(loss, params, h, targets):
        total = lambda p, x: jnp.sum(weights * loss(cfg, p, x, targets))
        return jax.grad(total, argnums=(0, 1))(params, h)

    both = tiny.quick(
        lambda *inputs: (gradient(block_loss, *inputs), gradient(dense_loss, *inputs))
    )
    for where, targets in TARGETS.items():
        got, want = both(vocabulary(cfg), h, np.array([targets], np.int32))
        jax.tree.map(
            lambda a, b, w=where: np.testing.assert_allclose(a, b, atol=2e-5, err_msg=w), got, want
        )


@pytest.mark.integration
@pytest.mark.parametrize("tile", [None, 4])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.few(1)
def test_forward_mode_in_blocks_gives_the_derivative_along_a_direction(monkeypatch, tile, some):
    """The derivative equals the dense softmax's and agrees with the gradient, also under vmap."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    inputs, moves = [(draw(7, 4), draw(6, 4), draw(6)) for _ in range(2)]
    targets, members = jnp.array([0, 5, 2, 2, 1, 3, 4]), None
    scored = jnp.ones(7)
    if some:  # only rows 4, 1, 6, 0 and 5 are scored
        members = jnp.array([4, 1, 6, 0, 5, 2, 3]), jnp.asarray(5)
        scored = jnp.ones(7).at[jnp.array([2, 3])].set(0.0)
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", 2)
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", 1)
    monkeypatch.setitem(cross_entropy.TILE_WORDS, "cpu", tile or 8)
    monkeypatch.setitem(cross_entropy.MULTIPLE, "cpu", 1 if tile else 8)
    in_blocks = lambda x, weight, bias: cross_entropy.cross_entropy(
        x, weight, bias, targets, members, "cpu"
    )

    def dense(x, weight, bias):
        log_p = jax.nn.log_softmax(x @ weight.T + bias)
        return -scored * jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0]

    (nll, along), want = jax.jvp(in_blocks, inputs, moves), jax.jvp(dense, inputs, moves)
    np.testing.assert_allclose(nll, want[0], atol=1e-5)
    np.testing.assert_allclose(along, want[1], atol=1e-5)
    of_bias = jax.jacfwd(lambda bias: in_blocks(*inputs[:2], bias))(inputs[2])
    np.testing.assert_allclose(of_bias, jax.jacrev(dense, argnums=2)(*inputs), atol=1e-5)
    gradient = jax.grad(lambda *x: in_blocks(*x).sum(), argnums=(0, 1, 2))(*inputs)
    products = jax.tree.map(lambda g, move: (g * move).sum(), gradient, moves)
    np.testing.assert_allclose(along.sum(), sum(products), rtol=1e-5)
