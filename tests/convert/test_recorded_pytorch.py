"""Losses, memories, gradients and parameter counts equal those of the published PyTorch code.

Each recording holds parameters, inputs and results of that code (``recorded/README.md``). Sixteen
core models are in ``recorded/published/``, and models with more options in ``recorded/``. There can
be more in the shared folder. Tolerance: 1e-5, in float32.
"""

import jax
import numpy as np
import pytest
import tiny_models as tiny
from recipe_sizes import parameter_counts
from recorded_models import Recorded, recordings

import txl_jax
from txl_jax.convert import config_from_pytorch, params_from_pytorch

pytestmark = pytest.mark.usefixtures("float32_products")

TOLERANCE = 1e-5
CORE = ("plain_mem_gt", "clamp_len", "pre_lnorm", "nv_same_length_mem_gt", "adaptive_div2_tied")


def test_the_recordings_of_this_repository_are_found():
    folders = [where for _, where in recordings()]
    assert folders.count("published") == 16
    assert folders.count("recorded") >= 30


def models():
    """Returns a test parameter per recording; those outside ``CORE`` are marked as integration."""
    rest = lambda name, where: where != "published" or name not in CORE
    mark = lambda *which: [pytest.mark.integration] if rest(*which) else []
    return [pytest.param(*which, marks=mark(*which)) for which in recordings()]


@pytest.mark.parametrize(("name", "where"), models())
@pytest.mark.few(6)
def test_losses_memories_and_gradients_equal_the_published_code(name, where):
    run = Recorded(name, where)
    cfg = config_from_pytorch(run.constructor_args())
    params = params_from_pytorch(run.under("param/"), cfg)
    model = txl_jax.TransformerXL(cfg)
    mems = run.first_mems(model)
    context = {"context_len": run.context_len} if run.context_len else {}

    def loss(params, inputs, targets, mems):
        nll, new = model.apply({"params": params}, inputs, targets, mems, method="nll", **context)
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
    """Asserts that each layer's memory equals the recorded memory after segment ``i``.

    ``recorded`` has an array [states, batch, width] for each layer. Any arrays after those of the
    layers are not compared.
    """
    assert (len(recorded) >= n_layer) == (mems.mem_len > 0)
    for n in range(n_layer if mems.mem_len else 0):
        want = recorded[str(n)]
        filled = len(want)
        np.testing.assert_array_equal(mems.filled, filled, err_msg=f"filled, segment {i}")
        states = np.asarray(mems.hidden[n])[:, mems.mem_len - filled :]
        assert_close(states.swapaxes(0, 1), want, f"memory of layer {n}, segment {i}")


def shape(vocab_size, n_layer, d_model, n_head, d_head, d_inner, **options):
    names = ("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner")
    values = (vocab_size, n_layer, d_model, n_head, d_head, d_inner)
    return {**dict(zip(names, values, strict=True)), **options}


ALL_BUT_FIRST = {"tie_projs": (False, True, True, True)}
WT103 = {"cutoffs": (20_000, 40_000, 200_000), **ALL_BUT_FIRST}
NVIDIA = {"cutoffs": (19_997, 39_997, 199_997), **ALL_BUT_FIRST}
LM1B = {"cutoffs": (60_000, 100_000, 640_000), "div_val": 4}
TF_LM1B = {**LM1B, "untie_r": True, "proj_same_dim": False}
WT103_BASE = (267_735, 16, 410, 10, 41, 2100)
WT103_LARGE = (267_735, 18, 1024, 16, 64, 4096)
LM1B_BASE = (793_471, 18, 1024, 8, 128, 4096)
LM1B_LARGE = (793_471, 24, 1280, 16, 80, 8192)

PUBLISHED_SHAPES = {
    "enwik8_12l": shape(204, 12, 512, 8, 64, 2048),
    "enwik8_18l": shape(204, 18, 640, 10, 64, 2200),
    "enwik8_24l": shape(204, 24, 1024, 8, 128, 3072),
    "text8_12l": shape(27, 12, 512, 8, 64, 2048),
    "text8_24l": shape(27, 24, 1024, 8, 128, 3072),
    "wt103_base": shape(*WT103_BASE, **WT103),
    "wt103_large": shape(*WT103_LARGE, **WT103, div_val=4),
    "wt103_large_16_layers": {**shape(*WT103_LARGE, **WT103, div_val=4), "n_layer": 16},
    "lm1b_base": shape(*LM1B_BASE, **LM1B),
    "lm1b_large": shape(*LM1B_LARGE, **LM1B),
    "nvidia_wt103_base": shape(267_735, 16, 512, 8, 64, 2048, **NVIDIA),
    "nvidia_wt103_large": shape(*WT103_LARGE, **NVIDIA, div_val=4),
    "ptb_authors": shape(10_000, 16, 380, 10, 38, 900, attention="shared_projection"),
    "wt103_base_tf": shape(*WT103_BASE, **WT103, untie_r=True),
    "wt103_large_tf": shape(*WT103_LARGE, **WT103, div_val=4, untie_r=True),
    "lm1b_base_tf": shape(*LM1B_BASE, **TF_LM1B),
    "lm1b_large_tf": shape(*LM1B_LARGE, **TF_LM1B),
}
"""Model shapes of the published programs' recipes; RESULTS.md has their parameter counts."""


@pytest.mark.integration
@pytest.mark.parametrize("recipe", PUBLISHED_SHAPES)
@pytest.mark.few(5)
def test_number_of_parameters_is_the_published_codes(recipe):
    cfg = txl_jax.TransformerXLConfig(**PUBLISHED_SHAPES[recipe])
    counts = parameter_counts() | {"wt103_large_16_layers": 257_889_098}
    assert sum(leaf.size for leaf in jax.tree.leaves(tiny.shapes(cfg))) == counts[recipe]
