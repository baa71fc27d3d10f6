"""The parameter tree is equal for every method, and is initialised and used as documented."""

import functools
import re

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax
from txl_jax.config import ConfigError
from txl_jax.model import initializers

CFG = tiny.config()


def tree(cfg, *inputs, **kwargs):
    """The shape and dtype of each parameter that ``init`` would return, by its path."""
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


D, V = 8, 13
VOCABULARY: list[tuple[dict, dict]] = [
    ({}, {"embedding": (V, D), "softmax_bias": (V,)}),
    ({"tie_projs": (True,)}, {"embedding": (V, D), "softmax_bias": (V,)}),
    (
        {"d_embed": 5, "tie_weight": False},
        {
            "embedding": (V, 5), "embedding_projection": (5, D), "softmax_weight": (V, 5),
            "softmax_bias": (V,), "softmax_projection_0": (5, D),
        },
    ),
    (
        {"d_embed": 9, "tie_projs": (True,)},
        {"embedding": (V, 9), "embedding_projection": (9, D), "softmax_bias": (V,)},
    ),
    (
        {"cutoffs": (4, 9), "tie_projs": (False, True)},
        {
            "embedding": (V, D), "softmax_bias": (V,),
            "cluster_weight": (2, D), "cluster_bias": (2,),
        },
    ),
    (
        {"cutoffs": (4, 9), "d_embed": 6, "tie_projs": (False, True)},
        {
            "embedding": (V, 6), "embedding_projection": (6, D), "softmax_bias": (V,),
            "softmax_projection_0": (6, D), "softmax_projection_2": (6, D),
            "cluster_weight": (2, 6), "cluster_bias": (2,),
        },
    ),
    (
        {"cutoffs": (4, 9), "div_val": 2, "tie_projs": (False, True, True)},
        {
            "embedding_0": (4, 8), "embedding_1": (5, 4), "embedding_2": (4, 2),
            "embedding_projection_0": (8, D), "embedding_projection_1": (4, D),
            "embedding_projection_2": (2, D), "softmax_projection_0": (8, D),
            "softmax_bias_0": (4,), "softmax_bias_1": (5,), "softmax_bias_2": (4,),
            "cluster_weight": (2, 8), "cluster_bias": (2,),
        },
    ),
    (
        {
            "cutoffs": (4,), "div_val": 2, "d_embed": 16, "tie_weight": False,
            "proj_same_dim": False,
        },
        {
            "embedding_0": (4, 16), "embedding_1": (9, 8), "embedding_projection_0": (16, D),
            "softmax_weight_0": (4, 16), "softmax_weight_1": (9, 8),
            "softmax_projection_0": (16, D), "softmax_bias_0": (4,), "softmax_bias_1": (9,),
            "cluster_weight": (1, 16), "cluster_bias": (1,),
        },
    ),
    (
        {"div_val": 2, "tie_projs": (True,)},
        {"embedding_0": (V, 8), "embedding_projection_0": (8, D), "softmax_bias_0": (V,)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "want"), VOCABULARY, ids=[str(c) for c, _ in VOCABULARY])
def test_words_have_these_parameters_and_no_others(changes, want):
    got = tree(tiny.config(**changes), tiny.tokens(CFG, 1, 3))
    core = tree(tiny.config(vocab_size=None), tiny.embeddings(CFG, 1, 3), method="core")
    assert {k: shape for k, (shape, _) in got.items() if k not in core} == {
        f"params/{name}": shape for name, shape in want.items()
    }


N, H = 2, 3
QKVO = {"query": (D, N, H), "key": (D, N, H), "value": (D, N, H), "output": (N, H, D)}
SHAW = {"u": (N, H), "distance": (6, N, H), "distance_bias": (6, N)}
OF_ATTENTION: dict[str, dict] = {
    "relative": {**QKVO, "position": (D, N, H)},
    "shaw": {**QKVO, **SHAW},
    "absolute": QKVO,
    "absolute_per_layer": {
        **{"query": (D, N, 4), "key": (D, N, 4), "value": (D, N, 4), "output": (N, 4, D)},
        "../positions": (9, D),
    },
    "shared_projection": QKVO,
}


@pytest.mark.parametrize("attention", OF_ATTENTION)
def test_attention_has_these_parameters_and_no_others(attention):
    cfg = tiny.config(**tiny.attention(attention), vocab_size=None)
    flat = flax.traverse_util.flatten_dict(tiny.shapes(cfg), sep="/")
    rest = {"feed_forward", "norm_attention", "norm_feed_forward"}
    got = {k: leaf.shape for k, leaf in flat.items() if not rest & set(k.split("/"))}
    want = {"u": (N, H), "v": (N, H)} if attention == "relative" else {}
    for n in range(2):
        for name, shape in OF_ATTENTION[attention].items():
            want[f"layer_{n}/attention/{name}".replace("attention/../", "")] = shape
    assert got == want


def test_the_settings_of_gtrxl_add_these_parameters_and_no_others():
    flat = lambda cfg: flax.traverse_util.flatten_dict(tiny.shapes(cfg), sep="/")
    got = {name: leaf.shape for name, leaf in flat(tiny.config(**tiny.GTRXL)).items()}
    assert flat(CFG).items() <= flat(tiny.config(**tiny.GTRXL)).items()
    gate: dict[str, tuple] = {"from_output": (D, 3, D), "from_input": (D, 3, D), "bias": (D,)}
    want: dict[str, tuple] = {"norm_output/scale": (D,), "norm_output/bias": (D,)}
    for n in range(2):
        want[f"layer_{n}/attention/value_bias"] = (N, H)
        want[f"layer_{n}/attention/output_bias"] = (D,)
        for sublayer in ("attention", "feed_forward"):
            want |= {f"layer_{n}/gate_{sublayer}/{name}": shape for name, shape in gate.items()}
    assert {name: shape for name, shape in got.items() if name not in flat(CFG)} == want


BIG = {"vocab_size": 300, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 80}
INITIAL: dict[str, dict] = {
    "relative": {"untie_r": True, "tie_weight": False},
    "gtrxl": {**tiny.GTRXL, "gate_bias": 0.0},
    "shaw_clusters": {
        "attention": "shaw", "n_positions": 20, "cutoffs": (100, 200), "div_val": 2,
    },
    "positions_per_layer_and_narrow": {
        "attention": "absolute_per_layer", "n_positions": 20, "d_embed": 40,
    },
}  # fmt: skip
COUNT = {
    "relative": 5 + 2 * 13,
    "gtrxl": 6 + 2 * 21,
    "shaw_clusters": 14 + 2 * 15,
    "positions_per_layer_and_narrow": 30,
}


@pytest.mark.integration
@pytest.mark.parametrize("form", INITIAL)
@pytest.mark.few(1)
def test_initial_values_are_independent_and_have_the_configured_deviation(form):
    cfg = tiny.config(**BIG, init_std=0.005, proj_init_std=0.03, **INITIAL[form])
    model = txl_jax.TransformerXL(cfg)
    init = tiny.quick(lambda key: model.init(key, tiny.tokens(cfg, 1, 1), model.init_mems(1, 0)))
    flat = flax.traverse_util.flatten_dict(init(jax.random.key(0))["params"], sep="/")
    assert len(flat) == COUNT[form]
    for name, value in flat.items():
        if "bias" in name:
            np.testing.assert_array_equal(value, 0, err_msg=name)
            continue
        mean = 1.0 if name.endswith("scale") else 0.0
        deviation = 0.03 if "projection" in name else 0.005
        # The standard error of the mean; divided by sqrt(2), that of the standard deviation.
        errors = deviation / np.sqrt(value.size)
        assert abs(np.mean(value) - mean) < 4.5 * errors, name
        assert abs(np.std(value) - deviation) < 4.5 * errors / np.sqrt(2), name
    drawn = [np.asarray(v) for name, v in flat.items() if "bias" not in name]
    for i, one in enumerate(drawn):  # u is not v, and no layer is a copy of another
        for other in drawn[:i]:
            assert one.shape != other.shape or np.mean(one == other) < 0.01


def test_gates_start_from_the_configured_bias():
    cfg = tiny.config(gate="gru", gate_bias=1.5)
    model = txl_jax.TransformerXL(cfg)
    init = tiny.quick(lambda key: model.init(key, tiny.tokens(cfg, 1, 1), model.init_mems(1, 0)))
    layer = init(jax.random.key(0))["params"]["layer_1"]
    for name in ("gate_attention", "gate_feed_forward"):
        np.testing.assert_array_equal(layer[name]["bias"], np.full(D, 1.5, np.float32))


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


@pytest.mark.parametrize(
    ("context_len", "targets"),
    [(0, (3, 3)), (0, (2, 4)), (1, (3, 4))],
    ids=str,
)
def test_targets_that_are_not_the_tokens_after_the_context_are_refused(context_len, targets):
    tokens, mems = tiny.tokens(CFG, 3, 4), tiny.memory(CFG, (0, 0, 0), 0)
    message = re.escape(f"targets {targets} and tokens (3, 4) do not fit")
    with pytest.raises(ValueError, match=message):
        tiny.apply(CFG, "nll")(
            tiny.variables(CFG), tokens, np.zeros(targets, np.int32), mems, context_len=context_len
        )


def test_context_with_a_cache_is_refused():
    tokens, mems = tiny.tokens(CFG, 3, 4), tiny.memory(CFG, (0, 2, 5), 5)
    model, variables = txl_jax.TransformerXL(CFG), tiny.variables(CFG)
    cache = model.apply(variables, mems, seg_len=4, method="init_cache")
    with pytest.raises(ValueError, match=r"context_len = 1 is not possible with a cache"):
        tiny.apply(CFG, "nll")(variables, tokens, tokens[:, 1:], cache, context_len=1)


@pytest.mark.integration
def test_states_of_nll_are_those_of_core_at_scored_positions_before_the_outputs_dropout():
    cfg = tiny.config(dropout_output=0.5, cutoffs=(4, 9))
    tokens, mems = tiny.tokens(cfg, 3, 4), tiny.memory(cfg, (0, 0, 0), 0)
    train = {"train": True, "rngs": {"dropout": jax.random.key(0)}}
    both = tiny.apply(cfg, "nll_and_states")
    run = lambda **extra: both(tiny.variables(cfg), tokens, tokens[:, 1:], mems, **extra)
    nll, states, _ = run(context_len=1)
    dropped_nll, undropped, _ = run(context_len=1, **train)
    embedded = tiny.variables(cfg)["params"]["embedding"][tokens] * np.sqrt(8)
    want, _ = tiny.apply(cfg, "core")(tiny.variables(cfg), embedded, mems)
    # On some processors (an AMD EPYC with AVX512) the two programs round a state 1.2e-6 apart.
    np.testing.assert_allclose(states, want[:, 1:], atol=2e-6)
    np.testing.assert_array_equal(undropped, states)
    assert (np.abs(dropped_nll - nll) > 1e-4).all()


def test_logits_after_a_context_are_the_last_of_all_logits():
    tokens = tiny.tokens(CFG, 3, 4)
    mems = txl_jax.TransformerXL(CFG).init_mems(3, 0)
    run = functools.partial(tiny.apply(CFG, "__call__"), tiny.variables(CFG), tokens, mems)
    whole, part = run()[0], run(context_len=3)[0]
    assert part.shape == (3, 1, 13)
    np.testing.assert_allclose(part, whole[:, 3:], atol=2e-6)
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=rf"context_len = {wrong}: .*at least one of the 4"):
            run(context_len=wrong)


def test_for_an_nvidia_gpu_draws_can_be_calls_of_one_kernel():
    draw = jax.jit(lambda key: initializers.normal(0.1)(key, (4, 8)))

    def calls():
        lowered = draw.trace(jax.random.key(0)).lower(lowering_platforms=("cuda",))
        return lowered.as_text().count("cu_threefry2x32")

    assert calls() == 0
    with initializers.shared_draws():
        assert calls() == 1
    assert calls() == 0
