"""The tree of parameters: same from every method, drawn as stated, used as stated."""

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax
from txl_jax.config import ConfigError

CFG = tiny.config()


def tree(cfg, *inputs, **kwargs):
    """Shapes and dtypes that ``init`` would give, by path."""
    model = txl_jax.TransformerXL(cfg)
    init = lambda key: model.init(key, *inputs, model.init_mems(1, 2), **kwargs)
    flat = flax.traverse_util.flatten_dict(jax.eval_shape(init, jax.random.key(0)), sep="/")
    return {name: (leaf.shape, leaf.dtype) for name, leaf in flat.items()}


def test_init_gives_the_same_tree_by_call_and_by_nll():
    tokens = tiny.tokens(CFG, 1, 3)
    assert tree(CFG, tokens) == tree(CFG, tokens, tokens, method="nll")


def test_core_works_without_a_vocabulary_and_has_no_vocabulary_parameters():
    cfg = tiny.config(vocab_size=None)
    x = tiny.embeddings(cfg, 3, 4)
    alone = tree(cfg, x[:1], method="core")
    with_vocabulary = tree(CFG, tiny.tokens(CFG, 1, 3))
    assert set(with_vocabulary) - set(alone) == {"params/embedding", "params/softmax_bias"}
    assert set(alone) < set(with_vocabulary)
    h, mems = tiny.apply(cfg, "core")(tiny.variables(cfg), x, tiny.memory(cfg, (0, 2, 5), 5))
    assert h.shape == (3, 4, 8)
    np.testing.assert_array_equal(mems.filled, [4, 5, 5])


def test_tokens_without_a_vocabulary_are_refused_naming_the_setting():
    cfg = tiny.config(vocab_size=None)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is None.*core"):
        tiny.apply(cfg, "__call__")(
            tiny.variables(cfg), np.zeros((3, 4), np.int32), tiny.memory(cfg, (0, 2, 5), 5)
        )


def test_parameters_stay_float32_whatever_the_compute_dtype():
    for dtype in ("bfloat16", "float16"):
        leaves = tree(tiny.config(dtype=dtype), tiny.tokens(CFG, 1, 3)).values()
        assert {leaf_dtype for _, leaf_dtype in leaves} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("untie_r", "shape"), [(False, (2, 3)), (True, (2, 2, 3))])
def test_u_and_v_are_shared_or_per_layer(untie_r, shape):
    got = tree(tiny.config(untie_r=untie_r), tiny.tokens(CFG, 1, 3))
    assert got["params/u"][0] == got["params/v"][0] == shape


def test_initial_values_are_independent_and_have_the_configured_deviation():
    cfg = tiny.config(
        vocab_size=50, n_layer=2, d_model=64, n_head=4, d_head=16, d_inner=80,
        init_std=0.005, tie_weight=False,
    )  # fmt: skip
    model = txl_jax.TransformerXL(cfg)
    init = tiny.quick(lambda key: model.init(key, tiny.tokens(cfg, 1, 1), model.init_mems(1, 0)))
    flat = flax.traverse_util.flatten_dict(init(jax.random.key(0))["params"], sep="/")
    assert len(flat) == 5 + 2 * 13
    for name, value in flat.items():
        if name.endswith("bias"):
            np.testing.assert_array_equal(value, 0, err_msg=name)
            continue
        mean = 1.0 if name.endswith("scale") else 0.0
        errors = 0.005 / np.sqrt(value.size)  # of the mean; of the deviation: / sqrt(2)
        assert abs(np.mean(value) - mean) < 4.5 * errors, name
        assert abs(np.std(value) - 0.005) < 4.5 * errors / np.sqrt(2), name
    drawn = [np.asarray(v) for name, v in flat.items() if not name.endswith("bias")]
    for i, one in enumerate(drawn):  # u is not v, and no layer is a copy of another
        for other in drawn[:i]:
            assert one.shape != other.shape or np.mean(one == other) < 0.01


def test_token_embeddings_are_multiplied_by_the_root_of_d_model():
    tokens, variables = tiny.tokens(CFG, 3, 4), tiny.variables(CFG)
    mems = tiny.memory(CFG, (0, 2, 5), 5)
    p = variables["params"]
    h, _ = tiny.apply(CFG, "core")(variables, p["embedding"][tokens] * np.sqrt(8.0), mems)
    logits, _ = tiny.apply(CFG, "__call__")(variables, tokens, mems)
    np.testing.assert_allclose(logits, h @ p["embedding"].T + p["softmax_bias"], atol=2e-5)


def test_tied_output_weights_are_the_embedding_and_untied_ones_are_their_own():
    untied = tiny.config(tie_weight=False)
    tokens, mems = tiny.tokens(CFG, 3, 4), tiny.memory(CFG, (0, 2, 5), 5)
    params = dict(tiny.variables(untied)["params"])
    logits = lambda cfg, p: tiny.apply(cfg, "__call__")({"params": p}, tokens, mems)[0]
    before = logits(untied, params)
    params["softmax_weight"] = params["embedding"]
    after = logits(untied, params)
    assert np.abs(after - before).max() > 1e-2
    del params["softmax_weight"]
    np.testing.assert_array_equal(logits(CFG, params), after)


def test_nll_is_minus_the_log_softmax_of_the_logits_at_the_target():
    tokens, targets = tiny.tokens(CFG, 6, 4).reshape(2, 3, 4)
    mems = tiny.memory(CFG, (0, 2, 5), 5)
    logits, mems_of_call = tiny.apply(CFG, "__call__")(tiny.variables(CFG), tokens, mems)
    nll, mems_of_nll = tiny.apply(CFG, "nll")(tiny.variables(CFG), tokens, targets, mems)
    z = np.asarray(logits, np.float64)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    want = -np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(nll, want, atol=1e-5)
    np.testing.assert_array_equal(mems_of_call.hidden, mems_of_nll.hidden)


def test_tokens_that_are_not_integers_b_t_are_refused():
    mems = tiny.memory(CFG, (0, 2, 5), 5)
    for wrong in (np.zeros((3, 4), np.float32), np.zeros(4, np.int32)):
        with pytest.raises(ValueError, match=r"tokens must be integers \[B,T\]"):
            tiny.apply(CFG, "__call__")(tiny.variables(CFG), wrong, mems)


def test_targets_of_another_shape_are_refused():
    tokens, mems = tiny.tokens(CFG, 3, 4), tiny.memory(CFG, (0, 2, 5), 5)
    with pytest.raises(ValueError, match=r"targets \(3, 3\) and tokens \(3, 4\)"):
        tiny.apply(CFG, "nll")(tiny.variables(CFG), tokens, tokens[:, 1:], mems)
