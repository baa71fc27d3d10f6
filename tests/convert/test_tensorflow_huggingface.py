"""TF's and Hugging Face's layouts convert to the same parameters as the PyTorch layout.

The states are not from real checkpoints: ``foreign_states.py`` makes them in each program's layout.
Other tests compare the PyTorch layout with recorded numbers. The softmax must agree with the
formulas of TF's and Hugging Face's programs.
"""

import foreign_states
import jax
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax
from txl_jax.convert import (
    ModelFormatError,
    config_from_huggingface,
    config_from_tensorflow,
    params_from_huggingface,
    params_from_pytorch,
    params_from_tensorflow,
)

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 8, "d_head": 3, "d_inner": 10}
TF = {**SHAPE, "n_token": 23}
HF = {**SHAPE, "vocab_size": 23, "cutoffs": [7, 15], "div_val": 2, "d_embed": 8}
CUT = {"cutoffs": [7, 15]}

TF_FORMS: dict[str, dict] = {
    "plain": {},
    "narrow": {"d_embed": 6},
    "untie_r": {"untie_r": True},
    "div1": {**CUT, "proj_share_all_but_first": True},
    "div1_narrow": {**CUT, "d_embed": 6, "proj_share_all_but_first": True},
    "div1_narrow_unshared": {**CUT, "d_embed": 6},
    "div2": {**CUT, "div_val": 2, "proj_share_all_but_first": True, "untie_r": True},
    "div2_no_same_size_projections": {**CUT, "div_val": 2, "proj_same_dim": False},
}

HF_FORMS: dict[str, dict] = {
    "div2": {},
    "shared_bias": {"untie_r": False},
    "div1": {"div_val": 1},
    "div1_narrow": {"div_val": 1, "d_embed": 6},
    "none_shared": {"proj_share_all_but_first": False},
    "untied": {"tie_word_embeddings": False},
    "plain": {"cutoffs": [], "div_val": 1},
}


def assert_equal(got, want):
    """Asserts that values are equal; ``jax.tree.map`` raises an error if the trees differ."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


def without_missing_projections(cfg, state):
    """Returns a state of the PyTorch program without the projections that TF's program lacks.

    Without ``proj_same_dim``, TF has no projection for the first part of the vocabulary.
    """
    drop = () if cfg.proj_same_dim else ("word_emb.emb_projs.0", "crit.out_projs.0")
    return {name: array for name, array in state.items() if name not in drop}


@pytest.mark.parametrize("form", TF_FORMS)
def test_tensorflows_variables_give_the_parameters_of_the_pytorch_layout(form):
    cfg = config_from_tensorflow({**TF, **TF_FORMS[form]})
    got = params_from_tensorflow(foreign_states.tensorflow(cfg), cfg)
    state = without_missing_projections(cfg, foreign_states.pytorch(cfg))
    assert_equal(got, params_from_pytorch(state, cfg))
    shape = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)
    assert shape(got) == shape(tiny.shapes(cfg))


@pytest.mark.parametrize("form", HF_FORMS)
def test_huggingfaces_state_gives_the_parameters_of_the_pytorch_layout(form):
    cfg = config_from_huggingface({**HF, **HF_FORMS[form]})
    got = params_from_huggingface(foreign_states.huggingface(cfg), cfg)
    assert_equal(got, params_from_pytorch(foreign_states.pytorch(cfg), cfg))


def test_null_is_the_default_of_a_setting():
    for build, given in ((config_from_huggingface, HF), (config_from_tensorflow, TF)):
        nulls = dict.fromkeys(("clamp_len", "dropout", "cutoffs" if given is TF else "dropatt"))
        assert build({**given, **nulls}) == build(dict(given))


@pytest.mark.parametrize("build", [config_from_huggingface, config_from_tensorflow])
@pytest.mark.parametrize(("name", "value"), [("cutoffs", 5), ("clamp_len", "8")])
def test_a_setting_of_another_type_is_named(build, name, value):
    given = HF if build is config_from_huggingface else TF
    with pytest.raises(ModelFormatError, match=rf"^{name} = {value!r}: must be a"):
        build({**given, name: value})


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def adaptive_nll(h, targets, ends, weights, biases, projections, cluster):
    """Returns the loss of each target by the formula that TF and Hugging Face use.

    In this adaptive softmax, part i of the vocabulary has the ids from ends[i] to ends[i + 1] - 1.
    Part 0, the head, also has a logit for each later part i, in column ends[1] + i - 1; ``cluster``
    is the weight and the bias of these columns. ``weights`` and ``biases`` have an entry per part.
    ``projections[i]`` [width of part i, width of h] is applied to ``h`` first, unless it is None.
    """
    into = lambda h, p: h if p is None else h @ p.T
    head_weight = np.concatenate([weights[0], cluster[0]])
    head_bias = np.concatenate([biases[0], cluster[1]])
    head = log_softmax(into(h, projections[0]) @ head_weight.T + head_bias)
    found = []
    for row, target in enumerate(targets):
        i = np.searchsorted(ends, target, side="right") - 1
        if i == 0:
            found.append(head[row, target])
            continue
        tail = log_softmax(into(h[row], projections[i]) @ weights[i].T + biases[i])
        found.append(head[row, ends[1] + i - 1] + tail[target - ends[i]])
    return -np.array(found)


def ours(cfg, params, h, targets):
    model = txl_jax.TransformerXL(cfg)
    score = lambda module, h, targets: module.vocabulary.nll(h, targets)
    inputs = jax.numpy.asarray(h)[None], jax.numpy.asarray(targets)[None]
    return model.apply({"params": params}, *inputs, method=score)[0]


@pytest.mark.parametrize("form", ["div1_narrow", "div2", "div2_no_same_size_projections"])
def test_tensorflows_softmax_follows_its_formula(form):
    cfg = config_from_tensorflow({**TF, **TF_FORMS[form]})
    variables = foreign_states.tensorflow(cfg)
    get = lambda name: variables.get("transformer/" + name)
    ends, parts, narrow = (0, 7, 15, 23), range(3), cfg.div_val == 1
    tables = [get(f"adaptive_embed/cutoff_{i}/lookup_table") for i in parts]
    inputs = [get(f"adaptive_embed/cutoff_{i}/proj_W") for i in parts]
    if narrow:
        whole = get("adaptive_embed/lookup_table")
        tables = [whole[ends[i] : ends[i + 1]] for i in parts]
        inputs = [get("adaptive_embed/proj_W")] * 3
    own = [get(f"adaptive_softmax/cutoff_{i}/proj") for i in parts]
    projections = [a if a is not None else b for a, b in zip(own, inputs, strict=True)]
    biases = [get(f"adaptive_softmax/cutoff_{i}/b") for i in parts]
    cluster = [get(f"adaptive_softmax/cutoff_0/cluster_{part}") for part in "Wb"]
    h = np.random.default_rng(1).standard_normal((23, 8)).astype(np.float32)
    want = adaptive_nll(h, np.arange(23), ends, tables, biases, projections, cluster)
    got = ours(cfg, params_from_tensorflow(variables, cfg), h, np.arange(23))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_huggingfaces_softmax_follows_its_formula():
    cfg = config_from_huggingface(HF)
    state = foreign_states.huggingface(cfg)
    weights = [state[f"crit.out_layers.{i}.weight"] for i in range(3)]
    biases = [state[f"crit.out_layers.{i}.bias"] for i in range(3)]
    projections = [state[f"crit.out_projs.{i}"].T for i in range(3)]
    cluster = [state["crit.cluster_weight"], state["crit.cluster_bias"]]
    h = np.random.default_rng(1).standard_normal((23, 8)).astype(np.float32)
    ends, targets = (0, 7, 15, 23), np.arange(23)
    want = adaptive_nll(h, targets, ends, weights, biases, projections, cluster)
    got = ours(cfg, params_from_huggingface(state, cfg), h, targets)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------
# Arguments.


def test_tensorflows_flags():
    cfg = config_from_tensorflow(
        {
            **TF,
            "d_embed": 8,
            "dropout": 0.2,
            "dropatt": 0.0,
            "untie_r": True,
            "same_length": True,
            "clamp_len": 9,
            "div_val": 2,
            "proj_share_all_but_first": True,
            "proj_same_dim": False,
            "init_std": 0.005,
            "tgt_len": 5,
            "mem_len": 5,
            "cutoffs": [0, 7, 15, 23],  # as in corpus-info.json: with 0 and the vocabulary size
        }
    )
    assert (cfg.dropout, cfg.dropatt, cfg.clamp_len) == (0.2, 0.0, 9)
    assert (cfg.same_length, cfg.untie_r, cfg.norm_epsilon) == ("tf", True, 1e-12)
    assert (cfg.cutoffs, cfg.tie_projs) == ((7, 15), (False, True, True))
    assert (cfg.proj_same_dim, cfg.init_std, cfg.d_embed) == (False, 0.005, None)


def test_without_cutoffs_tensorflow_shares_the_projection():
    assert config_from_tensorflow({**TF, "d_embed": 6}).tie_projs == (True,)


def test_huggingfaces_keys():
    cfg = config_from_huggingface({**HF, "model_type": "transfo-xl", "mem_len": 1600})
    assert (cfg.same_length, cfg.clamp_len, cfg.untie_r) == ("pytorch", 1000, True)
    assert (cfg.tie_projs, cfg.tie_weight) == ((False, True, True), True)
    assert config_from_huggingface({**HF, "tie_projs": [True, False]}).tie_projs == (True, False)
    assert config_from_huggingface({**HF, "tie_weight": False}).tie_weight is False
    assert config_from_huggingface({**HF, "untie_r": False}).untie_r is False
    assert config_from_huggingface({**HF, "layer_norm_epsilon": 1e-6}).norm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("convert", "args", "message"),
    [
        (config_from_tensorflow, {**TF, "attn_type": 1}, "no flags of the .*'attn_type'; remove"),
        (config_from_tensorflow, SHAPE, "TensorFlow model are missing: 'n_token'"),
        (config_from_huggingface, {**HF, "attn_type": 1}, "attn_type = 1 is not supported"),
        (config_from_huggingface, SHAPE, "keys of config.json are missing: 'vocab_size'"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(convert, args, message):
    with pytest.raises(ModelFormatError, match=message):
        convert(args)


def test_variables_that_do_not_fit_are_named():
    cfg = config_from_tensorflow({**TF, **CUT, "div_val": 2})
    variables = foreign_states.tensorflow(cfg)
    del variables["transformer/layer_1/rel_attn/r/kernel"]
    variables["transformer/adaptive_softmax/cutoff_3/b"] = np.zeros(4)
    with pytest.raises(ModelFormatError, match="layer_1/rel_attn/r/kernel") as error:
        params_from_tensorflow(variables, cfg)
    assert "adaptive_softmax/cutoff_3/b is not known" in str(error.value)


def test_a_bias_that_differs_between_layers_is_not_a_shared_one():
    cfg = config_from_huggingface({**HF, "untie_r": False})
    state = foreign_states.huggingface(cfg)
    state["transformer.layers.1.dec_attn.r_w_bias"] = np.zeros((2, 3))
    with pytest.raises(ModelFormatError, match=r"layers\.1\.dec_attn\.r_w_bias differs"):
        params_from_huggingface(state, cfg)


def test_a_bias_of_its_own_is_needed_in_every_layer():
    cfg = config_from_huggingface(HF)
    state = foreign_states.huggingface(cfg)
    del state["transformer.layers.1.dec_attn.r_r_bias"]
    with pytest.raises(ModelFormatError, match=r"layers\.1\.dec_attn\.r_r_bias .* is missing"):
        params_from_huggingface(state, cfg)


def test_a_huggingface_model_without_softmax_is_refused():
    cfg = config_from_huggingface(HF)
    state = foreign_states.huggingface(cfg)
    body = {k: v for k, v in state.items() if not k.startswith("crit.")}
    with pytest.raises(ModelFormatError, match=r"crit\.out_layers\.0\.bias \[7\] is missing"):
        params_from_huggingface(body, cfg)
