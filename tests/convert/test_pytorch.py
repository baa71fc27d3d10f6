"""Arrays and arguments of the PyTorch programs are converted; some are ignored or refused.

test_recorded_pytorch.py tests that converted models give the same numbers.
"""

import dataclasses

import foreign_states
import jax
import numpy as np
import pytest
import tiny_models as tiny

import txl_jax
from txl_jax.convert import ModelFormatError, config_from_pytorch, params_from_pytorch

SHAPE = {"n_token": 11, "n_layer": 1, "n_head": 2, "d_model": 8, "d_head": 4, "d_inner": 12}
CUT = {"n_token": 23, "cutoffs": [7, 15]}

FORMS: dict[str, dict] = {
    "plain": {},
    "untied": {"tie_weight": False},
    "narrow": {"d_embed": 6},
    "narrow_tied_projection": {"d_embed": 6, "tie_projs": [True]},
    "untie_r": {"untie_r": True, "n_layer": 2},
    "shaw": {"attn_type": 1, "tgt_len": 3, "mem_len": 2},
    "absolute": {"attn_type": 2},
    "absolute_per_layer": {"attn_type": 3, "tgt_len": 3, "mem_len": 0},
    "div1": CUT,
    "div1_narrow": {**CUT, "d_embed": 6, "tie_projs": [True, False, True]},
    "div2": {**CUT, "div_val": 2, "tie_projs": [False, True, True]},
    "div2_untied": {**CUT, "div_val": 2, "tie_weight": False},
}


def shape_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


def assert_same_tree(got, want):
    assert shape_of(got) == shape_of(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("form", FORMS)
def test_converted_parameters_have_the_tree_and_shapes_of_init(form):
    cfg = config_from_pytorch({**SHAPE, **FORMS[form]})
    params = params_from_pytorch(foreign_states.pytorch(cfg), cfg)
    assert shape_of(params) == shape_of(tiny.shapes(cfg))


def test_parameters_are_float32_whatever_the_state_is():
    cfg = config_from_pytorch(SHAPE)
    for dtype in (np.float16, np.float64):
        state = {name: a.astype(dtype) for name, a in foreign_states.pytorch(cfg).items()}
        assert shape_of(params_from_pytorch(state, cfg)) == shape_of(tiny.shapes(cfg))


@pytest.mark.parametrize("form", FORMS)
def test_nvidias_names_give_the_same_parameters(form):
    cfg = config_from_pytorch({**SHAPE, **FORMS[form]})
    state = foreign_states.nvidia(cfg)
    assert "crit.out_layers_biases.0" in state
    want = params_from_pytorch(foreign_states.pytorch(cfg), cfg)
    assert_same_tree(params_from_pytorch(state, cfg), want)


def test_what_is_tied_may_be_absent():
    cfg = config_from_pytorch({**SHAPE, **FORMS["div2"]})
    state = foreign_states.pytorch(cfg)
    want = params_from_pytorch(state, cfg)
    aliases = ("crit.out_layers.0.weight", "crit.out_layers.2.weight", "crit.out_projs.1")
    rest = {name: array for name, array in state.items() if name not in aliases}
    assert_same_tree(params_from_pytorch(rest, cfg), want)


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        ("crit.out_layers.1.weight", r"weight differs from word_emb\.emb_layers\.1\.weight, and"),
        ("crit.out_projs.2", r"projs\.2 differs from word_emb\.emb_projs\.2, and tie_projs\[2\]"),
    ],
)
def test_what_differs_from_what_it_is_tied_to_is_refused(alias, message):
    cfg = config_from_pytorch({**SHAPE, **FORMS["div2"]})
    state = foreign_states.pytorch(cfg)
    with pytest.raises(ModelFormatError, match=message):
        params_from_pytorch({**state, alias: state[alias] + 1}, cfg)


def test_tails_stand_in_the_heads_columns_in_the_opposite_order():
    cfg = config_from_pytorch({**SHAPE, **CUT})
    state = foreign_states.pytorch(cfg)
    params = params_from_pytorch(state, cfg)
    np.testing.assert_array_equal(params["cluster_weight"][0], state["crit.cluster_weight"][1])
    np.testing.assert_array_equal(params["cluster_bias"][1], state["crit.cluster_bias"][0])


def test_a_state_of_a_sampled_softmax_has_its_output_layer_by_another_name():
    cfg = config_from_pytorch({**SHAPE, "sample_softmax": 5})
    assert cfg.sample_softmax == 5
    state = foreign_states.pytorch(cfg)
    want = params_from_pytorch(state, cfg)
    moved = {name.replace("crit.out_layers.0", "out_layer"): a for name, a in state.items()}
    assert_same_tree(params_from_pytorch(moved, cfg), want)


# --------------------------------------------------------------------------------------
# Arguments.


def test_config_takes_the_originals_defaults_and_ignores_lengths():
    cfg = config_from_pytorch({**SHAPE, "tgt_len": 70, "ext_len": 0, "mem_len": 70})
    assert cfg == txl_jax.TransformerXLConfig(
        vocab_size=11, n_layer=1, n_head=2, d_model=8, d_head=4, d_inner=12
    )


def test_config_of_every_argument():
    cfg = config_from_pytorch(
        {
            **SHAPE,
            "dropout": 0.1,
            "dropatt": 0.2,
            "tie_weight": False,
            "pre_lnorm": True,
            "same_length": True,
            "clamp_len": 5,
            "untie_r": True,
            "attn_type": 0,
            "d_embed": 6,
            "div_val": 2,
            "cutoffs": [3, 7],
            "tie_projs": [False, True, False],
            "sample_softmax": -1,
            "adapt_inp": True,
            "dtype": None,
        }
    )
    assert (cfg.dropout, cfg.dropatt, cfg.clamp_len) == (0.1, 0.2, 5)
    assert (cfg.tie_weight, cfg.pre_lnorm, cfg.untie_r) == (False, True, True)
    assert (cfg.d_embed, cfg.div_val, cfg.cutoffs) == (6, 2, (3, 7))
    assert (cfg.tie_projs, cfg.proj_same_dim) == ((False, True, False), True)
    assert (cfg.same_length, cfg.sample_softmax) == ("pytorch", 0)


@pytest.mark.parametrize(("impl", "window"), [("kimiyoung", "pytorch"), ("nvidia", "tf")])
def test_same_length_means_what_each_code_base_means(impl, window):
    assert config_from_pytorch({**SHAPE, "impl": impl, "same_length": True}).same_length == window
    assert config_from_pytorch({**SHAPE, "impl": impl}).same_length is False


def test_clamp_len_0_never_clamps_as_in_the_original():
    assert config_from_pytorch({**SHAPE, "clamp_len": 0}).clamp_len == -1


@pytest.mark.parametrize(
    ("attn_type", "attention", "rows"),
    [(0, "relative", None), (1, "shaw", 12), (2, "absolute", None), (3, "absolute_per_layer", 12)],
)
def test_position_tables_have_a_row_for_each_of_all_lengths_together(attn_type, attention, rows):
    lengths = {"tgt_len": 5, "ext_len": 3, "mem_len": 4}
    cfg = config_from_pytorch({**SHAPE, **lengths, "attn_type": attn_type})
    assert (cfg.attention, cfg.n_positions) == (attention, rows)


def test_forms_with_a_position_table_need_the_lengths():
    with pytest.raises(
        ModelFormatError, match="attn_type = 1 needs are missing: 'tgt_len', 'mem_len'"
    ):
        config_from_pytorch({**SHAPE, "attn_type": 1})


def test_ties_of_projections_that_do_not_exist_have_no_effect():
    cfg = config_from_pytorch({**SHAPE, "tie_projs": [False, True, True, True]})
    assert cfg.tie_projs == (False,)
    assert config_from_pytorch({**SHAPE, "tie_projs": []}).tie_projs == (False,)
    params = params_from_pytorch(foreign_states.pytorch(cfg), cfg)
    assert not [name for name in params if "projection" in name]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"attn_type": 7}, r"attn_type = 7 is not supported; there are 0, 1, 2, 3"),
        ({"impl": "fairseq"}, r"impl = 'fairseq'.*'kimiyoung', 'nvidia'"),
        ({"sample_softmax": 100, "cutoffs": [5]}, r"sample_softmax = 100"),
        ({"d_moddel": 8}, r"no constructor arguments of MemTransformerLM: 'd_moddel'; rem"),
        ({"n_layer": 0}, r"model\.n_layer = 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_used_are_refused_by_name_and_value(extra, message):
    with pytest.raises(ValueError, match=message):
        config_from_pytorch({**SHAPE, **extra})


def test_missing_arguments_are_refused_by_name():
    with pytest.raises(ModelFormatError, match="missing: 'd_head', 'd_inner'"):
        config_from_pytorch({k: v for k, v in SHAPE.items() if k not in ("d_head", "d_inner")})


def test_all_tensors_that_do_not_fit_are_named_in_one_error():
    cfg = config_from_pytorch(SHAPE)
    state = foreign_states.pytorch(cfg)
    del state["r_r_bias"]
    state["layers.1.pos_ff.CoreNet.0.bias"] = np.zeros(12)
    state["layers.0.dec_attn.o_net.weight"] = np.zeros((8, 7))
    with pytest.raises(ModelFormatError, match="do not fit") as error:
        params_from_pytorch(state, cfg)
    assert "r_r_bias [2, 4] is missing" in str(error.value)
    assert "layers.1.pos_ff.CoreNet.0.bias is not known" in str(error.value)
    assert "layers.0.dec_attn.o_net.weight is [8, 7], expected [8, 8]" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("gate", "gru"), ("activation", "gelu"), ("attention_bias", True), ("final_norm", True)],
)
def test_settings_that_the_other_programs_do_not_have_are_refused(key, value):
    cfg = dataclasses.replace(config_from_pytorch({**SHAPE, "pre_lnorm": True}), **{key: value})
    with pytest.raises(ModelFormatError, match=rf"model\.{key} = {value!r}: the other programs"):
        params_from_pytorch({}, cfg)


def test_a_configuration_without_vocabulary_is_refused():
    with pytest.raises(ModelFormatError, match="vocab_size is None"):
        params_from_pytorch({}, tiny.config(vocab_size=None))
