"""Memory: which states it keeps, what attention reads of them, and that it gets no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax
from txl_jax.model import memory as memory_lib

CFG = tiny.config()
PRE_NORM = tiny.config(pre_lnorm=True)


def numbered(first, count):
    """States [L=1,B=1,count,D=1] with the values first, first+1 and so on."""
    return jnp.arange(first, first + count, dtype=jnp.float32).reshape(1, 1, count, 1)


def memory_of(values, filled):
    hidden = jnp.asarray(values, jnp.float32).reshape(1, 1, -1, 1)
    return txl_jax.Memory(hidden=hidden, filled=jnp.array([filled]))


@pytest.mark.parametrize(
    ("mem_len", "seg_len", "want", "filled"),
    [(5, 2, [3, 4, 5, 11, 12], 5), (3, 3, [11, 12, 13], 3), (2, 4, [13, 14], 2), (0, 2, [], 0)],
)
def test_memory_is_the_last_m_of_memory_and_segment(mem_len, seg_len, want, filled):
    old = memory_of(np.arange(1, mem_len + 1), mem_len)
    new = memory_lib.update(old, numbered(11, seg_len))
    np.testing.assert_array_equal(new.hidden[0, 0, :, 0], want)
    assert int(new.filled[0]) == filled


def test_filled_grows_by_the_segment_until_memory_is_full():
    mems = txl_jax.TransformerXL(CFG).init_mems(3, 5)
    seen = []
    for _ in range(3):
        _, mems = tiny.apply(CFG, "nll")(tiny.variables(CFG), *[tiny.tokens(CFG, 3, 4)] * 2, mems)
        seen.append(np.asarray(mems.filled).tolist())
    assert seen == [[4, 4, 4], [5, 5, 5], [5, 5, 5]]
    assert mems.filled.dtype == jnp.int32


def test_layer_0_remembers_the_scaled_embeddings():
    tokens = tiny.tokens(CFG, 3, 4)
    variables = tiny.variables(CFG)
    _, mems = tiny.apply(CFG, "nll")(variables, tokens, tokens, tiny.memory(CFG, (0, 2, 5), 5))
    want = variables["params"]["embedding"][tokens] * np.sqrt(8)
    np.testing.assert_allclose(mems.hidden[0][:, -4:], want, rtol=1e-6)


def test_init_mems_works_unbound_and_is_empty():
    mems = txl_jax.TransformerXL(CFG).init_mems(batch_size=3, mem_len=5)
    assert mems.hidden.shape == (2, 3, 5, 8)
    assert mems.hidden.dtype == jnp.float32
    assert mems.mem_len == 5
    assert not mems.hidden.any()
    np.testing.assert_array_equal(mems.filled, [0, 0, 0])
    assert mems.filled.dtype == jnp.int32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_memory_is_kept_in_the_compute_dtype(dtype):
    cfg = tiny.config(dtype=dtype)
    mems = txl_jax.TransformerXL(cfg).init_mems(3, 5)
    assert mems.hidden.dtype == dtype
    _, mems = jax.eval_shape(
        tiny.apply(cfg, "core"), tiny.variables(cfg), tiny.embeddings(cfg, 3, 4), mems
    )
    assert mems.hidden.dtype == dtype


@pytest.mark.parametrize("mem_len", [0, 1, 5])
def test_shapes_of_memory_never_change(mem_len):
    mems = txl_jax.TransformerXL(CFG).init_mems(3, mem_len)
    for extra in ({}, {"lengths": np.array([1, 2, 3])}, {"reset": np.ones((3, 4), bool)}):
        _, new = jax.eval_shape(
            tiny.apply(CFG, "core"), tiny.variables(CFG), tiny.embeddings(CFG, 3, 4), mems, **extra
        )
        assert jax.tree.map(lambda a: (a.shape, a.dtype), new) == jax.tree.map(
            lambda a: (a.shape, a.dtype), mems
        )


def test_mem_len_0_gives_the_scores_of_an_empty_memory():
    tokens = tiny.tokens(CFG, 3, 4)
    variables, model = tiny.variables(CFG), txl_jax.TransformerXL(CFG)
    without, mems = tiny.compiled(CFG, "nll")(variables, tokens, tokens, model.init_mems(3, 0))
    empty, _ = tiny.apply(CFG, "nll")(variables, tokens, tokens, model.init_mems(3, 5))
    np.testing.assert_allclose(without, empty, atol=2e-6)
    assert mems.hidden.shape == (2, 3, 0, 8)
    np.testing.assert_array_equal(mems.filled, [0, 0, 0])


@pytest.mark.parametrize("cfg", [CFG, PRE_NORM], ids=["post_norm", "pre_norm"])
def test_unfilled_slots_change_no_bit_of_the_result(cfg):
    tokens, filled = tiny.tokens(cfg, 3, 4), np.array([0, 2, 5])
    mems = tiny.memory(cfg, filled, 5)
    real = np.arange(5) >= 5 - filled[:, None]
    garbage = np.where(real[None, :, :, None], mems.hidden, np.float32(3e7))
    nll, new = tiny.apply(cfg, "nll")(tiny.variables(cfg), tokens, tokens, mems)
    nll_garbage, new_garbage = tiny.apply(cfg, "nll")(
        tiny.variables(cfg), tokens, tokens, mems.replace(hidden=garbage)
    )
    np.testing.assert_array_equal(nll, nll_garbage)
    for row in range(3):
        np.testing.assert_array_equal(
            tiny.real_states(new, row), tiny.real_states(new_garbage, row)
        )


@pytest.mark.parametrize("cfg", [CFG, PRE_NORM], ids=["post_norm", "pre_norm"])
def test_output_depends_on_memory_but_no_gradient_reaches_it(cfg):
    x, mems = tiny.embeddings(cfg, 3, 4), tiny.memory(cfg, (5, 5, 5), 5)
    core = tiny.apply(cfg, "core")

    def everything(hidden):
        h, new = core(tiny.variables(cfg), x, mems.replace(hidden=hidden))
        return h.sum() + (h**3).sum() + (new.hidden**2).sum(), h

    gradient_of = tiny.quick(jax.grad(everything, has_aux=True))
    gradient, h = gradient_of(mems.hidden)
    np.testing.assert_array_equal(gradient, 0)
    _, moved = gradient_of(-mems.hidden)
    assert np.abs(moved - h).max() > 1e-3


@pytest.mark.parametrize("lengths", [None, np.array([4, 1, 3])], ids=["full", "lengths"])
def test_new_memory_carries_no_gradient_to_the_segment_or_the_parameters(lengths):
    mems = tiny.memory(CFG, (0, 2, 5), 5)

    def remembered(x, variables):
        _, new = tiny.apply(CFG, "core")(variables, x, mems, lengths=lengths)
        return (new.hidden**2).sum()

    gradient_of = tiny.quick(jax.grad(remembered, argnums=(0, 1)))
    for gradient in jax.tree.leaves(gradient_of(tiny.embeddings(CFG, 3, 4), tiny.variables(CFG))):
        np.testing.assert_array_equal(gradient, 0)


def test_mems_of_another_shape_are_refused_naming_both_shapes():
    x, variables = tiny.embeddings(CFG, 3, 4), tiny.variables(CFG)
    model = txl_jax.TransformerXL(CFG)
    right = model.init_mems(3, 5)
    fewer_layers = right.replace(hidden=right.hidden[:1])
    narrower = right.replace(hidden=right.hidden[..., :4])
    filled_of_two = right.replace(filled=right.filled[:2])
    for wrong in (model.init_mems(2, 5), fewer_layers, narrower):
        with pytest.raises(ValueError, match=r"mems.hidden must be floats \[2,3,M,8\], not") as e:
            model.apply(variables, x, wrong, method="core")
        assert str(list(wrong.hidden.shape)).replace(" ", "") in str(e.value)
    with pytest.raises(ValueError, match=r"mems.filled must be integers \[3\], not int32 \[2\]"):
        model.apply(variables, x, filled_of_two, method="core")


def test_window_pytorch_with_mem_len_0_is_refused_by_the_model():
    cfg = tiny.config(same_length="pytorch")
    mems = txl_jax.TransformerXL(cfg).init_mems(3, 0)
    with pytest.raises(ValueError, match=r"same_length='pytorch'.*mem_len is 0"):
        tiny.apply(cfg, "core")(tiny.variables(cfg), tiny.embeddings(cfg, 3, 4), mems)


@pytest.mark.parametrize("name", ["absolute", "absolute_per_layer"])
def test_forms_without_memory_refuse_one_and_a_cache_naming_the_way_out(name):
    cfg = tiny.config(**tiny.attention(name))
    model, variables = txl_jax.TransformerXL(cfg), tiny.variables(cfg)
    with pytest.raises(
        ValueError, match=rf"'{name}' has no memory, but mems has 5 slots.*context_len"
    ):
        model.apply(variables, tiny.embeddings(cfg, 3, 4), model.init_mems(3, 5), method="core")
    with pytest.raises(ValueError, match=rf"'{name}' has no memory"):
        model.apply(variables, model.init_mems(3, 0), seg_len=4, method="init_cache")


def test_a_segment_longer_than_the_table_of_positions_is_refused():
    cfg = tiny.config(**tiny.attention("absolute_per_layer"))
    x, mems = tiny.embeddings(cfg, 3, 10), tiny.memory(cfg, (0, 0, 0), 0)
    with pytest.raises(ValueError, match=r"10 tokens is longer than model\.n_positions 9"):
        tiny.apply(cfg, "core")(tiny.variables(cfg), x, mems)


def test_a_cache_is_refused_in_training_for_longer_segments_and_for_another_batch():
    model, variables = txl_jax.TransformerXL(CFG), tiny.variables(CFG)
    cache = model.apply(variables, model.init_mems(3, 5), seg_len=4, method="init_cache")
    core = lambda rows, t, **extra: model.apply(
        variables, tiny.embeddings(CFG, rows, t), cache, method="core", **extra
    )
    with pytest.raises(ValueError, match=r"train=True is not possible with this cache"):
        core(3, 4, train=True)
    with pytest.raises(ValueError, match=r"segment of 5 tokens is not possible.*at most 4 tokens"):
        core(3, 5)
    with pytest.raises(ValueError, match=r"the cache's keys must be floats \[2,2,R,3\]"):
        core(2, 4)


@pytest.mark.parametrize("name", tiny.WITH_MEMORY)
def test_a_cache_holds_what_memory_projects_and_shapes_that_never_change(name):
    """The cache holds keys and values, not hidden states: a step projects only its own tokens."""
    cfg = tiny.config(**tiny.attention(name))
    cache = tiny.quick(
        lambda m: txl_jax.TransformerXL(cfg).apply(
            tiny.variables(cfg), m, seg_len=4, method="init_cache"
        )
    )(tiny.memory(cfg, (0, 2, 5), 5))
    params = tiny.variables(cfg)["params"]
    hidden = tiny.memory(cfg, (0, 2, 5), 5).hidden
    for n in range(2):
        want = np.einsum("bmd,dnh->nbmh", hidden[n], params[f"layer_{n}"]["attention"]["key"])
        np.testing.assert_allclose(cache.past(n).keys, want, atol=1e-5)
    shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    for t in (4, 1):
        _, new = jax.eval_shape(
            tiny.apply(cfg, "core"), tiny.variables(cfg), tiny.embeddings(cfg, 3, t), cache
        )
        assert shapes(new) == shapes(cache)


@pytest.mark.parametrize(("platform", "as_integers"), [("cpu", True), ("gpu", False)])
def test_slots_of_bfloat16_are_written_as_integers_on_a_cpu_alone(
    monkeypatch, platform, as_integers
):
    monkeypatch.setattr(memory_lib, "platform_of", lambda mesh: platform)
    slots, states = jnp.ones((1, 2, 5, 3), jnp.bfloat16), jnp.zeros((1, 2, 2, 3), jnp.bfloat16)
    write = lambda slots, states: memory_lib._written(slots, states, jnp.int32(3), None)
    assert ("bitcast" in str(jax.make_jaxpr(write)(slots, states))) is as_integers
    expected = np.ones((1, 2, 5, 3))
    expected[:, :, 3:] = 0
    np.testing.assert_array_equal(write(slots, states).astype(jnp.float32), expected)
