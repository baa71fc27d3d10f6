"""The model under JAX's transformations: jit, scan over segments, vmap, grad through time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax

CFG = tiny.config()
CLUSTERS = tiny.config(n_layer=1, cutoffs=(4, 9), div_val=2)
SEGMENTS = 3


def inputs():
    tokens, targets = tiny.tokens(CFG, 6 * SEGMENTS, 4).reshape(2, SEGMENTS, 3, 4)
    return tokens, targets, txl_jax.TransformerXL(CFG).init_mems(3, 5)


def step(mems, segment):
    tokens, targets = segment
    nll, mems = tiny.apply(CFG, "nll")(tiny.variables(CFG), tokens, targets, mems)
    return mems, nll


def one_by_one(mems, tokens, targets):
    losses = []
    for segment in zip(tokens, targets, strict=True):
        mems, nll = step(mems, segment)
        losses.append(nll)
    return np.stack(losses), mems


def test_scan_over_segments_equals_a_loop():
    tokens, targets, mems = inputs()
    want, want_mems = one_by_one(mems, tokens, targets)
    new, nll = tiny.quick(lambda m: jax.lax.scan(step, m, (tokens, targets)))(mems)
    np.testing.assert_allclose(nll, want, atol=1e-5)
    np.testing.assert_allclose(new.hidden, want_mems.hidden, atol=1e-5)
    np.testing.assert_array_equal(new.filled, want_mems.filled)


def test_jit_compiles_once_for_all_segments_and_equals_op_by_op():
    tokens, targets, mems = inputs()
    want, _ = one_by_one(mems, tokens, targets)
    traces = []

    @tiny.quick
    def traced(mems, segment):
        traces.append(1)
        return step(mems, segment)

    for i in range(SEGMENTS):
        mems, nll = traced(mems, (tokens[i], targets[i]))
        np.testing.assert_allclose(nll, want[i], atol=1e-5)
    assert len(traces) == 1


def test_scan_over_segments_with_a_cache_equals_a_loop_with_memory():
    tokens, targets, mems = inputs()
    want, want_mems = one_by_one(mems, tokens, targets)
    model = txl_jax.TransformerXL(CFG)
    cache = model.apply(tiny.variables(CFG), mems, seg_len=4, method="init_cache")
    new, nll = tiny.quick(lambda m: jax.lax.scan(step, m, (tokens, targets)))(cache)
    np.testing.assert_allclose(nll, want, atol=1e-5)
    np.testing.assert_array_equal(new.filled, want_mems.filled)


def test_vmap_over_parameters_equals_each_model_by_itself():
    tokens, targets, mems = inputs()
    models = [tiny.variables(CFG, seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
    nll = lambda variables: tiny.apply(CFG, "nll")(variables, tokens[0], targets[0], mems)[0]
    got = tiny.quick(jax.vmap(nll))(stacked)
    for one, variables in zip(got, models, strict=True):
        np.testing.assert_allclose(one, nll(variables), atol=1e-5)


@pytest.mark.integration
def test_vmap_of_the_gradient_with_clusters_equals_each_model_by_itself():
    """Targets are in different clusters. Each model runs as many blocks as any model needs."""
    tokens, targets, _ = inputs()
    targets = np.stack([np.full((3, 4), 12), targets[0]]).astype(np.int32)
    mems = txl_jax.TransformerXL(CLUSTERS).init_mems(3, 0)
    models = [tiny.variables(CLUSTERS, seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)

    def loss(variables, targets):
        nll, _ = tiny.apply(CLUSTERS, "nll")(variables, tokens[0], targets, mems)
        return nll.sum(), nll

    of_one = tiny.quick(jax.value_and_grad(loss, has_aux=True))
    got = tiny.quick(jax.vmap(jax.value_and_grad(loss, has_aux=True)))(stacked, targets)
    for i, variables in enumerate(models):
        want = of_one(variables, targets[i])
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, atol=2e-5), got, want)


CLOSED_OVER = {name: tiny.attention(name) for name in tiny.ATTENTION}
CLOSED_OVER["clusters"] = {"cutoffs": (4, 9), "div_val": 2}
CLOSED_OVER["sampled"] = {"sample_softmax": 3}


@pytest.mark.parametrize("name", CLOSED_OVER)
def test_parameters_may_be_numpy_arrays_that_a_program_closes_over(name):
    """Conversion of published weights returns NumPy arrays."""
    cfg = tiny.config(**CLOSED_OVER[name])
    variables, nll = tiny.variables(cfg), tiny.apply(cfg, "nll")
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(variables))
    text, mems = tiny.tokens(cfg, 3, 4), tiny.memory(cfg, (0, 2, 5), 5)
    lengths = np.array([4, 0, 2], np.int32)

    @jax.jit
    def run(text, lengths, key):
        train = {"train": True, "rngs": {"dropout": key}}
        return nll(variables, text, text, mems, lengths=lengths, **train)[0]

    assert jax.eval_shape(run, text, lengths, jax.random.key(0)).shape == (3, 4)  # traced only


def test_gradient_of_a_segment_is_the_same_with_earlier_segments_in_the_graph():
    """No gradient flows through memory, so an earlier segment in the graph changes nothing."""
    tokens, targets, mems = inputs()

    def nll_of(variables, m, i):
        return tiny.apply(CFG, "nll")(variables, tokens[i], targets[i], m)

    def last_of_two(variables):
        _, new = nll_of(variables, mems, 0)
        return jnp.sum(nll_of(variables, new, 1)[0])

    _, after_first = nll_of(tiny.variables(CFG), mems, 0)
    second_alone = lambda variables: jnp.sum(nll_of(variables, after_first, 1)[0])
    both = lambda variables: (jax.grad(last_of_two)(variables), jax.grad(second_alone)(variables))
    through, alone = tiny.quick(both)(tiny.variables(CFG))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), through, alone)


def test_memory_is_a_pytree_that_jax_can_map_and_donate():
    mems = txl_jax.TransformerXL(CFG).init_mems(3, 5)
    doubled = jax.tree.map(lambda a: jnp.concatenate([a, a]), mems)
    assert isinstance(doubled, txl_jax.Memory)
    assert len(jax.tree.leaves(mems)) == 2
    tokens, targets, _ = inputs()
    donated = tiny.quick(step, donate_argnums=0)
    new, _ = donated(mems, (tokens[0], targets[0]))
    assert new.hidden.shape == (2, 3, 5, 8)
    assert mems.hidden.is_deleted()
