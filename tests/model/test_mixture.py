"""A mixture of softmaxes equals its formula in every use. Models without one do not change."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny_models as tiny
from mesh_runs import MESHES, assert_close, gradient
from mesh_runs import experiment as on_mesh

import txl_jax
from txl_jax.config import ConfigError, ExperimentConfig, GenerateConfig, ProtocolConfig, override
from txl_jax.convert import ModelFormatError, params_from_pytorch, params_from_tensorflow
from txl_jax.generation.generate import generate
from txl_jax.model import cross_entropy, flops
from txl_jax.model.adaptive import Vocabulary
from txl_jax.model.mixture import mixture

K, B, T, M = 3, 2, 5, 4
FORMS = {
    "tied": tiny.config(mixtures=K),
    "untied": tiny.config(mixtures=K, tie_weight=False),
    "narrow": tiny.config(mixtures=K, d_embed=5),
}
CFG = FORMS["tied"]


def of_words(cfg):
    """The parameters outside the layers, with values large enough to affect results."""
    return {k: v for k, v in tiny.variables(cfg)["params"].items() if not isinstance(v, dict)}


def read(cfg, params, h, method, *inputs, **options) -> Any:
    return Vocabulary(cfg).apply({"params": params}, h, *inputs, method=method, **options)


def by_hand(cfg, h):
    """Log-probabilities of all words for one state in float64, adding one softmax at a time."""
    p = reference.float64(of_words(cfg))
    weight = p["embedding"] if cfg.tie_weight else p["softmax_weight"]
    prior = np.exp(h @ p["mixture_prior"])
    total = 0.0
    for k in range(cfg.mixtures):
        x = np.tanh(h @ p["mixture_latent"][:, k] + p["mixture_latent_bias"][k])
        scores = np.exp(weight @ x + p["softmax_bias"])
        total = total + prior[k] / prior.sum() * scores / scores.sum()
    return np.log(total)


@pytest.fixture(params=[4, 128], ids="blocks_of_{}".format)
def block(request, monkeypatch):
    """Sets the rows per block: B*T*K = 30 rows need several blocks of 4, or fit into one of 128."""
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", request.param)
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", 1)


@pytest.mark.parametrize("name", FORMS)
def test_nll_and_scores_are_the_formula(name, block):
    cfg = FORMS[name]
    h, targets = tiny.embeddings(cfg, B, T), tiny.tokens(cfg, B, T)
    want = np.array([[by_hand(cfg, np.float64(state)) for state in row] for row in h])
    np.testing.assert_allclose(np.exp(want).sum(-1), 1)
    log_p = read(cfg, of_words(cfg), h, "logits")
    np.testing.assert_allclose(log_p, want, atol=1e-5)
    of_targets = -np.take_along_axis(want, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(read(cfg, of_words(cfg), h, "nll", targets), of_targets, atol=1e-5)


@pytest.mark.parametrize("method", ["nll", "logits"])
def test_gradients_are_those_of_the_plain_formula(method, block):
    """Compares gradients of a randomly weighted sum of losses, by parameters and by states."""
    h, targets = tiny.embeddings(CFG, B, T), tiny.tokens(CFG, B, T)
    weights = np.random.default_rng(0).standard_normal((B, T)).astype(np.float32)
    chosen = lambda log_p: -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]

    def ours(params, h):
        if method == "nll":
            return (read(CFG, params, h, "nll", targets) * weights).sum()
        return (chosen(read(CFG, params, h, "logits")) * weights).sum()

    def plain(p, h):
        prior = jax.nn.softmax(h @ p["mixture_prior"])
        x = jnp.tanh(jnp.einsum("bti,ikj->btkj", h, p["mixture_latent"]) + p["mixture_latent_bias"])
        words = jax.nn.softmax(x @ p["embedding"].T + p["softmax_bias"])
        return (chosen(jnp.log(jnp.einsum("btk,btkv->btv", prior, words))) * weights).sum()

    got, want = (tiny.quick(jax.grad(f, (0, 1)))(of_words(CFG), h) for f in (ours, plain))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(
            a, b, atol=1e-5 * max(1, np.abs(b).max()), err_msg=jax.tree_util.keystr(path)
        )
    assert np.abs(got[0]["mixture_prior"]).max() > 0.01


def test_only_a_mixture_has_more_rank_than_its_width():
    """Without biases, one softmax of width d has log-probabilities of rank d + 1.

    Yang et al. (2018) explain this limit of a single softmax.
    """
    wide: dict[str, Any] = {"vocab_size": 40, "d_embed": 4}
    found = {}
    for k in (1, 2):
        cfg = tiny.config(mixtures=k, **wide)
        log_p = jax.nn.log_softmax(read(cfg, of_words(cfg), tiny.embeddings(cfg, 1, 64), "logits"))
        log_p = np.asarray(log_p, np.float64)[0]
        biasless = log_p - of_words(cfg)["softmax_bias"]
        sizes = np.linalg.svd(biasless, compute_uv=False)
        found[k] = int((sizes > 1e-5 * sizes[0]).sum())
    assert found[1] == 4 + 1
    assert found[2] > 2 * (4 + 1)


def test_one_softmax_has_the_parameters_it_always_had():
    """A mixture replaces only the output projection. Initial values of other parameters agree."""
    names = {"embedding", "embedding_projection", "softmax_bias", "softmax_projection_0", "u", "v"}
    drawn = {}
    for k in (1, K):
        model = txl_jax.TransformerXL(tiny.config(n_layer=1, d_embed=5, mixtures=k))
        about = np.zeros((1, 1), np.int32), model.init_mems(1, 1)
        drawn[k] = tiny.quick(model.init)(jax.random.key(0), *about)["params"]
    assert {name for name in drawn[1] if not name.startswith("layer")} == names
    added = {"mixture_prior", "mixture_latent", "mixture_latent_bias"}
    assert drawn[K].keys() - drawn[1].keys() == added
    assert drawn[1].keys() - drawn[K].keys() == {"softmax_projection_0"}
    for name in names - {"softmax_projection_0"}:
        np.testing.assert_array_equal(drawn[1][name], drawn[K][name])


@pytest.mark.parametrize(("name", "d", "replaced"), [("tied", 8, 0), ("narrow", 5, 5 * 8)])
def test_parameters_are_prior_and_latents_more(name, d, replaced):
    count = lambda cfg: sum(x.size for x in jax.tree.leaves(tiny.shapes(cfg)))
    plain = tiny.config(d_embed=FORMS[name].d_embed)
    assert count(FORMS[name]) - count(plain) == 8 * K + K * (8 * d + d) - replaced


# --------------------------------------------------------------------------------------
# Dropout of the latents.


def dropped(mask, rate=0.4):
    return tiny.config(mixtures=K, dropout_latent=rate, dropout_mask=mask)


def latents(cfg, h, key=None):
    """The mixture's latents, in training mode if a dropout key is given, else in evaluation."""
    method = lambda words: words._mixture(h, key is not None).latents
    rngs = None if key is None else {"dropout": key}
    found: Any = Vocabulary(cfg).apply({"params": of_words(cfg)}, method=method, rngs=rngs)
    return np.asarray(found)


@pytest.mark.parametrize("mask", ["independent", "locked"])
def test_latents_are_dropped_in_training_alone_and_keep_their_mean(mask):
    cfg, h = dropped(mask), tiny.embeddings(CFG, B, T)
    p = of_words(cfg)
    own = [p[name] for name in ("mixture_prior", "mixture_latent", "mixture_latent_bias")]
    whole = np.asarray(mixture(jnp.asarray(h), *own).latents)
    np.testing.assert_array_equal(latents(cfg, h), whole)
    draw = tiny.quick(jax.vmap(lambda key: jnp.asarray(_drawn(cfg, h, key))))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 2000)))
    zero = drawn == 0
    assert zero.mean() == pytest.approx(0.4, abs=0.01)
    kept = np.broadcast_to(whole / 0.6, drawn.shape)
    np.testing.assert_allclose(drawn[~zero], kept[~zero], atol=1e-6)
    np.testing.assert_allclose(drawn.mean(0), whole, atol=0.1)
    shared = (zero == zero[:, :, :1]).all()  # do all positions share a mask?
    assert shared == (mask == "locked")
    assert not (zero == zero[:, :1]).all()  # each row has its own mask
    assert not (zero == zero[..., :1, :]).all()  # each softmax too


def _drawn(cfg, h, key):
    method = lambda words: words._mixture(h, True).latents
    return Vocabulary(cfg).apply({"params": of_words(cfg)}, method=method, rngs={"dropout": key})


@pytest.mark.integration
@pytest.mark.parametrize("mask", ["independent", "locked"])
def test_training_reads_scores_under_the_dropout_of_its_nll(mask):
    cfg, key = dropped(mask), jax.random.key(3)
    model, variables = txl_jax.TransformerXL(cfg), tiny.variables(cfg)
    tokens, targets, mems = tiny.tokens(cfg, B, T), tiny.tokens(cfg, B, T, 1), model.init_mems(B, M)
    train: Any = {"train": True, "rngs": {"dropout": key}}
    log_p: Any = model.apply(variables, tokens, mems, **train)[0]
    nll: Any = model.apply(variables, tokens, targets, mems, method="nll", **train)[0]
    want = -np.take_along_axis(np.asarray(log_p), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(nll, want, atol=1e-5)
    still: Any = model.apply(variables, tokens, targets, mems, method="nll")[0]
    assert np.abs(nll - still).max() > 0.1
    undropped: Any = txl_jax.TransformerXL(CFG).apply(
        variables, tokens, targets, mems, method="nll"
    )
    np.testing.assert_array_equal(still, undropped[0])


# --------------------------------------------------------------------------------------
# Where a mixture is used.


@pytest.mark.integration
def test_a_cache_gives_what_memory_gives():
    variables, model = tiny.variables(CFG), txl_jax.TransformerXL(CFG)
    tokens, mems = tiny.tokens(CFG, B, T), tiny.memory(CFG, [4, 2], M)
    want: Any = model.apply(variables, tokens, mems)[0]
    cache: Any = model.apply(variables, mems, T, method="init_cache")
    got: Any = model.apply(variables, tokens, cache)[0]
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.integration
def test_greedy_text_is_the_likeliest_word_of_the_formula_each_time():
    params, prompt = tiny.variables(CFG)["params"], np.array([1, 5, 2], np.int32)
    c = GenerateConfig(length=6, mem_len=20, temperature=0.0)
    made = np.concatenate([p.tokens for p in generate(CFG, params, [prompt], c)], axis=1)[0]
    model, text = txl_jax.TransformerXL(CFG), np.concatenate([prompt, made])[None]
    about = (text, text, model.init_mems(1, 0))
    states: Any = model.apply({"params": params}, *about, method="nll_and_states")[1]
    likeliest = [np.argmax(by_hand(CFG, np.float64(state))) for state in states[0]]
    assert made.tolist() == likeliest[2:-1]


PAST = {"model.past_decode": True, "loss.past_decode": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["2x2x2", "1x4x2"])
@pytest.mark.parametrize("terms", [{}, PAST], ids=["mixture", "past_decode"])
def test_gradients_are_one_devices_on_a_mesh(shape, terms):
    settings = {"model.mixtures": K, "model.dropout_latent": 0.3, **terms}
    want = gradient(on_mesh(**settings))
    assert_close(gradient(on_mesh(MESHES[shape], **settings)), want, 1e-5)


def test_operations_of_the_words_are_k_times_the_softmax_and_the_latents():
    p = ProtocolConfig(seg_len=5, context_len=2, mem_len=0)
    plain, rows = flops.vocabulary_flops(tiny.config(), p, 2), 10
    assert plain == 2 * rows * 13 * 8
    assert flops.vocabulary_flops(CFG, p, 2) == K * plain + 2 * rows * 8 * K * (8 + 1)


# --------------------------------------------------------------------------------------
# What is refused.


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"cutoffs": (4,)},
            r"model\.mixtures = 3: mixes .* model\.cutoffs is \(4,\); leave",
        ),
        (
            {"sample_softmax": 9},
            r"model\.mixtures = 3: mixes .* model\.sample_softmax is 9",
        ),
        ({"d_embed": 5, "tie_projs": (True,)}, r"model\.mixtures = 3: .*; set model\.tie_projs to"),
    ],
)
def test_what_does_not_go_with_a_mixture_is_refused(more, message):
    with pytest.raises(ConfigError, match=f"^config key {message}"):
        tiny.config(**{"mixtures": K, **more})


@pytest.mark.parametrize("convert", [params_from_pytorch, params_from_tensorflow])
@pytest.mark.parametrize("ours", [{"mixtures": K}, {"past_decode": True}], ids=str)
def test_other_codes_parameters_are_not_taken_for_a_model_they_lack_some_of(convert, ours):
    with pytest.raises(
        ModelFormatError,
        match=rf"model\.{next(iter(ours))} = .* have no such setting; only .* def",
    ):
        convert({}, tiny.config(**ours))


def test_a_mixture_is_asked_for_by_name():
    exp = override(ExperimentConfig(), {"model.mixtures": "15", "model.dropout_latent": "0.29"})
    assert (exp.model.mixtures, exp.model.dropout_latent) == (15, 0.29)
