"""The same numbers as the published PyTorch code: losses, memories, gradients, parameter counts.

The fixtures hold its parameters, inputs and results (README there). Tolerance: 1e-5, float32.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import shared_files
import tiny_models as tiny

import txl_jax
from txl_jax.convert import config_from_pytorch, params_from_pytorch

MUST_PASS = (
    "plain_mem_gt",
    "plain_mem_lt",
    "plain_mem0",
    "pre_lnorm",
    "same_length_mem_gt",
    "untie_r",
    "clamp_len",
    "untied_softmax",
    "zero_init_mems",
    "nv_same_length_mem_gt",
)
"""Fixtures of what is supported. Any other is skipped, with the reason that conversion gives."""

TOLERANCE = 1e-5
SHAPE = {"n_token": 11, "n_layer": 1, "n_head": 2, "d_model": 8, "d_head": 4, "d_inner": 12}


def fixture_names():
    found = {Path(f).stem for f in (shared_files.ROOT / "fixtures" / "model").glob("*.json")}
    return sorted(found | set(MUST_PASS))


class Recorded:
    """One recorded run of the original."""

    def __init__(self, name):
        folder = shared_files.path("fixtures/model")
        self.meta = json.loads((folder / f"{name}.json").read_text())
        self.arrays = np.load(folder / f"{name}.npz")
        self.n_segments = len(self.meta["segment_lengths"])
        self.mem_len = self.meta["constructor"]["mem_len"]

    def constructor_args(self):
        untie_r = {"untie_r": True} if self.meta["extras"].get("untie_r") else {}
        return {**self.meta["constructor"], "impl": self.meta["impl"], **untie_r}

    def under(self, prefix):
        """Every array whose key starts with ``prefix``, by the rest of the key."""
        return {k[len(prefix) :]: self.arrays[k] for k in self.arrays.files if k.startswith(prefix)}

    def first_mems(self, model):
        mems = model.init_mems(self.meta["batch_size"], self.mem_len)
        given = self.under("init_mem/")
        if given:  # TF's way: zeros that are attended to
            assert not any(state.any() for state in given.values())
            mems = mems.replace(filled=np.full_like(mems.filled, self.mem_len))
        return mems


@pytest.mark.parametrize("name", fixture_names())
def test_losses_memories_and_gradients_equal_the_published_code(name):
    run = Recorded(name)
    try:
        cfg = config_from_pytorch(run.constructor_args())
    except ValueError as reason:
        (pytest.fail if name in MUST_PASS else pytest.skip)(f"not supported: {reason}")
    params = params_from_pytorch(run.under("param/"), cfg)
    model = txl_jax.TransformerXL(cfg)
    mems = run.first_mems(model)

    def loss(params, inputs, targets, mems):
        nll, new = model.apply({"params": params}, inputs, targets, mems, method="nll")
        return nll.mean(), (nll, new)

    gradient_of = tiny.quick(jax.grad(loss, has_aux=True))
    for i in range(run.n_segments):
        inputs, targets = run.arrays[f"seg{i}/inp"].T, run.arrays[f"seg{i}/tgt"].T
        gradient, (nll, mems) = gradient_of(params, inputs, targets, mems)
        assert_close(nll.T, run.arrays[f"seg{i}/loss"], f"loss, segment {i}")
        assert_memories_equal(mems, run.under(f"seg{i}/mem/"), cfg.n_layer, i)
        recorded = run.under(f"grad_seg{i}/")
        assert bool(recorded) == (i > 0)
        if recorded:
            want = params_from_pytorch(recorded, cfg)
            jax.tree_util.tree_map_with_path(
                lambda path, got, want, i=i: assert_close(
                    got, want, f"gradient of {jax.tree_util.keystr(path)}, segment {i}"
                ),
                gradient,
                want,
            )


def assert_close(got, want, what):
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE, err_msg=what)


def assert_memories_equal(mems, recorded, n_layer, i):
    """Theirs grows from nothing, layer by layer [filled,B,D]; an L+1st one is never used."""
    assert (len(recorded) >= n_layer) == (mems.mem_len > 0)
    for n in range(n_layer if mems.mem_len else 0):
        want = recorded[str(n)]
        filled = len(want)
        np.testing.assert_array_equal(mems.filled, filled, err_msg=f"filled, segment {i}")
        states = np.asarray(mems.hidden[n])[:, mems.mem_len - filled :]
        assert_close(states.swapaxes(0, 1), want, f"memory of layer {n}, segment {i}")


PUBLISHED_COUNTS = {  # the published code at these shapes
    "enwik8_12l": (204, 12, 512, 8, 64, 2048, 41_055_436),
    "enwik8_18l": (204, 18, 640, 10, 64, 2200, 87_781_244),
    "enwik8_24l": (204, 24, 1024, 8, 128, 3072, 277_231_820),
    "text8_12l": (27, 12, 512, 8, 64, 2048, 40_964_635),
    "text8_24l": (27, 24, 1024, 8, 128, 3072, 277_050_395),
}


@pytest.mark.parametrize("recipe", PUBLISHED_COUNTS)
def test_number_of_parameters_is_the_published_codes(recipe):
    vocab_size, n_layer, d_model, n_head, d_head, d_inner, count = PUBLISHED_COUNTS[recipe]
    cfg = txl_jax.TransformerXLConfig(
        vocab_size=vocab_size,
        n_layer=n_layer,
        d_model=d_model,
        n_head=n_head,
        d_head=d_head,
        d_inner=d_inner,
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(tiny.shapes(cfg))) == count


def state_of(cfg, nvidia=False):
    """A state of the original's names and shapes, random values."""
    c, rng = cfg, np.random.default_rng(0)
    d, heads = c.d_model, c.n_head * c.d_head
    bias = "crit.out_layers_biases.0" if nvidia else "crit.out_layers.0.bias"
    shapes = {
        "r_w_bias": (c.n_head, c.d_head),
        "r_r_bias": (c.n_head, c.d_head),
        "word_emb.emb_layers.0.weight": (c.vocab_size, d),
        bias: (c.vocab_size,),
        "pos_emb.inv_freq": (d // 2,),
    }
    for n in range(c.n_layer):
        shapes |= {
            f"layers.{n}.dec_attn.qkv_net.weight": (3 * heads, d),
            f"layers.{n}.dec_attn.r_net.weight": (heads, d),
            f"layers.{n}.dec_attn.o_net.weight": (d, heads),
            f"layers.{n}.dec_attn.layer_norm.weight": (d,),
            f"layers.{n}.dec_attn.layer_norm.bias": (d,),
            f"layers.{n}.pos_ff.CoreNet.0.weight": (c.d_inner, d),
            f"layers.{n}.pos_ff.CoreNet.0.bias": (c.d_inner,),
            f"layers.{n}.pos_ff.CoreNet.3.weight": (d, c.d_inner),
            f"layers.{n}.pos_ff.CoreNet.3.bias": (d,),
            f"layers.{n}.pos_ff.layer_norm.weight": (d,),
            f"layers.{n}.pos_ff.layer_norm.bias": (d,),
        }
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("nvidia", [False, True], ids=["kimiyoung", "nvidia"])
@pytest.mark.parametrize("extra", [{}, {"tie_weight": False}], ids=["tied", "untied"])
def test_converted_parameters_have_the_tree_and_shapes_of_init(extra, nvidia):
    cfg = config_from_pytorch({**SHAPE, **extra})
    state = state_of(cfg, nvidia)
    if not cfg.tie_weight:
        weight = "crit.out_layers_weights.0" if nvidia else "crit.out_layers.0.weight"
        state[weight] = np.ones((11, 8))
    params = params_from_pytorch(state, cfg)
    shape = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)
    assert shape(params) == shape(tiny.shapes(cfg))


def test_config_takes_the_originals_defaults_and_ignores_lengths():
    cfg = config_from_pytorch({**SHAPE, "tgt_len": 70, "ext_len": 0, "mem_len": 70})
    assert cfg == txl_jax.TransformerXLConfig(
        vocab_size=11, n_layer=1, n_head=2, d_model=8, d_head=4, d_inner=12
    )


def test_config_of_every_supported_argument():
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
            "d_embed": 8,
            "div_val": 1,
            "cutoffs": [],
            "tie_projs": [False],
            "sample_softmax": -1,
        }
    )
    assert (cfg.dropout, cfg.dropatt, cfg.clamp_len) == (0.1, 0.2, 5)
    assert (cfg.tie_weight, cfg.pre_lnorm, cfg.untie_r) == (False, True, True)
    assert cfg.same_length == "pytorch"


@pytest.mark.parametrize(("impl", "window"), [("kimiyoung", "pytorch"), ("nvidia", "tf")])
def test_same_length_means_what_each_code_base_means(impl, window):
    assert config_from_pytorch({**SHAPE, "impl": impl, "same_length": True}).same_length == window
    assert config_from_pytorch({**SHAPE, "impl": impl}).same_length is False


def test_clamp_len_0_never_clamps_as_in_the_original():
    assert config_from_pytorch({**SHAPE, "clamp_len": 0}).clamp_len == -1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"attn_type": 7}, r"attn_type = 7 is not supported; supported: 0"),
        ({"impl": "fairseq"}, r"impl = 'fairseq'.*'kimiyoung', 'nvidia'"),
        ({"sample_softmax": 100}, r"sample_softmax = 100"),
        ({"d_moddel": 8}, r"not constructor arguments of the original: 'd_moddel'"),
        ({"n_layer": 0}, r"model\.n_layer = 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_used_are_refused_by_name_and_value(extra, message):
    with pytest.raises(ValueError, match=message):
        config_from_pytorch({**SHAPE, **extra})


def test_missing_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="missing: 'd_head', 'd_inner'"):
        config_from_pytorch({k: v for k, v in SHAPE.items() if k not in ("d_head", "d_inner")})


def test_all_tensors_that_do_not_fit_are_named_in_one_error():
    cfg = config_from_pytorch(SHAPE)
    state = state_of(cfg)
    del state["r_r_bias"]
    state["layers.1.pos_ff.CoreNet.0.bias"] = np.zeros(12)
    state["layers.0.dec_attn.o_net.weight"] = np.zeros((8, 7))
    with pytest.raises(ValueError, match="does not fit") as error:
        params_from_pytorch(state, cfg)
    assert "r_r_bias [2, 4] is missing" in str(error.value)
    assert "layers.1.pos_ff.CoreNet.0.bias is not known" in str(error.value)
    assert "layers.0.dec_attn.o_net.weight is [8, 7], expected [8, 8]" in str(error.value)


def test_output_weights_that_differ_from_a_tied_embedding_are_refused():
    cfg = config_from_pytorch(SHAPE)
    state = state_of(cfg)
    state["crit.out_layers.0.weight"] = state["word_emb.emb_layers.0.weight"]
    params_from_pytorch(state, cfg)
    state["crit.out_layers.0.weight"] = state["crit.out_layers.0.weight"] + 1
    with pytest.raises(ValueError, match=r"crit\.out_layers\.0\.weight differs from the embedding"):
        params_from_pytorch(state, cfg)


def test_a_configuration_without_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size is None"):
        params_from_pytorch({}, tiny.config(vocab_size=None))
