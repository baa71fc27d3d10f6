"""Attention weights by distance and their averages equal plain loops, and are written to files."""

import csv
import dataclasses
import functools
import json
import math
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny_models
import tiny_runs

import txl_jax
from txl_jax.analysis import attention_maps
from txl_jax.analysis.attention_figures import PositionAttention, readable_token
from txl_jax.analysis.attention_maps import AttentionReader
from txl_jax.analysis.attention_weights import (
    Averages,
    Sums,
    capture_attention,
    doubling_edges,
    segment_attention,
)
from txl_jax.analysis.results import AnalysisError
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir import with_vocab
from txl_jax.config import override
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.vocab import Vocab

T, M = 4, 6
CASES = {
    **{name: {"attention": name, **more} for name, more in tiny_models.ATTENTION.items()},
    "window of PyTorch": {"same_length": "pytorch"},
    "window of TensorFlow": {"same_length": "tf"},
    "clamp": {"clamp_len": 3},
    "few tokens for the width of a head": {"d_head": 8 * T},
    "clamp of Shaw": {"attention": "shaw", "n_positions": 6, "clamp_len": 3},
    "own biases, normalised before": {"untie_r": True, "pre_lnorm": True},
}
LETTERS = {"relative": "abcd", "shaw": "abcd", "shared_projection": "abcd"}


@pytest.fixture(autouse=True)
def compiled_quickly(monkeypatch):
    """Compiles the mode's programs with less optimisation (:func:`tiny_models.quick`)."""
    quick = types.SimpleNamespace(**{**vars(jax), "jit": tiny_models.quick})
    monkeypatch.setattr(attention_maps, "jax", quick)


def terms_of(h_i, h_j, distance, n, p, u, v, cfg):
    """Returns the terms of an attention score by letter, before the division by sqrt(d_head).

    ``h_i`` and ``h_j`` are the inputs of query and key, ``n`` is the head, and ``p`` are the
    attention parameters of the layer. ``u`` and ``v`` are the learnt vectors of the relative form.
    """
    q, k = h_i @ p["query"][:, n], h_j @ p["key"][:, n]
    if cfg.attention == "relative":
        r = reference.sinusoid(distance, cfg) @ p["position"][:, n]
        return {"a": q @ k, "b": q @ r, "c": u[n] @ k, "d": v[n] @ r}
    if cfg.attention == "shaw":
        rows = min(len(p["distance"]), cfg.clamp_len if cfg.clamp_len > 0 else 10**9)
        d = min(distance, rows - 1)
        r, b = p["distance"][d, n], p["distance_bias"][d, n]
        return {"a": q @ k, "b": q @ r, "c": p["u"][n] @ k, "d": b}
    if cfg.attention == "shared_projection":
        here = reference.sinusoid(0, cfg) @ p["query"][:, n]
        r = reference.sinusoid(distance, cfg) @ p["key"][:, n]
        return {"a": q @ k, "b": q @ r, "c": here @ k, "d": here @ r}
    return {"a": q @ k}


def slow(cfg, params, tokens, memory, mem_len):
    """Returns attention weights by distance for one row of tokens, and the next memory, by loops.

    The weights are arrays [layer, head, query, distance]: under "all" from the sum of all terms of
    the score, and under a term's letter from this term alone. Distances that a query does not see
    are NaN.
    """
    t, n_past = len(tokens), len(memory[0])
    embedded = [reference.embedding(params, cfg, token) for token in tokens]
    _, after = reference.core(params, cfg, embedded, memory, max(mem_len, t))
    if cfg.same_length:
        assert mem_len >= t  # otherwise the core above used a wider window
    shape = (cfg.n_layer, cfg.n_head, t, mem_len + t)
    letters = LETTERS.get(cfg.attention, "")
    found = {name: np.full(shape, np.nan) for name in ("all", *letters)}
    for layer in range(cfg.n_layer):
        p, u, v = params[f"layer_{layer}"], params.get("u"), params.get("v")
        if cfg.untie_r:
            u, v = u[layer], v[layer]
        states = after[layer][-t:]
        if cfg.attention == "absolute_per_layer":
            table = p["positions"]
            states = [h + table[len(table) - t + i] for i, h in enumerate(states)]
        everything, p_attention = memory[layer] + states, p["attention"]
        if cfg.pre_lnorm:
            everything = [reference.layer_norm(h, p["norm_attention"], cfg) for h in everything]
        for n in range(cfg.n_head):
            for i in range(t):
                here = n_past + i
                rows: dict[str, dict[int, float]] = {name: {} for name in found}
                for j in reference.attention_mask(i, n_past, mem_len, cfg.same_length, ()):
                    about = (everything[here], everything[j], here - j, n, p_attention, u, v, cfg)
                    terms = terms_of(*about)
                    assert sum(terms.values()) == pytest.approx(reference.score(*about))
                    for name in rows:
                        score = terms.get(name, sum(terms.values()))
                        rows[name][here - j] = math.exp(score / math.sqrt(cfg.d_head))
                for name, row in rows.items():
                    for d, x in row.items():
                        found[name][layer, n, i, d] = x / sum(row.values())
    return found, [kept[-mem_len:] if mem_len else [] for kept in after]


def slow_sums(found, weights):
    """Returns summed attention weights by term, and how many queries see each distance.

    ``found`` is a result of :func:`slow`. Queries whose entry of ``weights`` is 0 are left out.
    """
    summed = {}
    for name, x in found.items():
        summed[name] = sum(w * np.nan_to_num(x[:, :, i]) for i, w in enumerate(weights))
    seen = sum(w * ~np.isnan(found["all"][0, 0, i]) for i, w in enumerate(weights))
    return summed, seen


@functools.cache
def watched(cfg):
    """Returns a compiled :func:`segment_attention` that takes params, inputs, mems and weights."""
    return tiny_models.quick(functools.partial(segment_attention, txl_jax.TransformerXL(cfg)))


def float64(cfg):
    return reference.float64(tiny_models.variables(cfg)["params"])


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(3)
def test_sums_are_those_of_queries_and_keys_written_out(case):
    """The rows have a full, a partly filled and an empty memory; some queries have weight 0."""
    cfg = tiny_models.config(**CASES[case])
    params, tokens = tiny_models.variables(cfg)["params"], tiny_models.tokens(cfg, 3, T)
    mems = tiny_models.memory(cfg, [M, 2, 0], M)
    weights = np.array([[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 1, 1]], np.float32)
    got, last, _ = watched(cfg)(params, tokens, mems, weights)

    mem_len = mems.mem_len
    rows = []
    for b in range(3):
        past = [list(x.astype(np.float64)) for x in tiny_models.real_states(mems, b)]
        found, _ = slow(cfg, float64(cfg), tokens[b], past, mem_len)
        rows.append(slow_sums(found, weights[b]))
        newest_first = np.nan_to_num(found["all"][:, :, -1])
        np.testing.assert_allclose(last[:, :, b, ::-1], newest_first, atol=1e-5)
    want = {name: sum(summed[name] for summed, _ in rows) for name in rows[0][0]}
    np.testing.assert_allclose(got.attention, want.pop("all"), atol=3e-5)
    assert set(got.terms) == set(want)
    for letter, x in want.items():
        np.testing.assert_allclose(got.terms[letter], x, atol=3e-5)
    np.testing.assert_array_equal(got.seen, sum(seen for _, seen in rows))
    assert float(got.queries) == weights.sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_of_each_query_sum_to_one(dtype):
    cfg = tiny_models.config(dtype=dtype)
    params, tokens = tiny_models.variables(cfg)["params"], tiny_models.tokens(cfg, 2, T)
    mems = tiny_models.memory(cfg, [M, 1], M)
    mems = mems.replace(hidden=mems.hidden.astype(dtype))
    for b, i in ((0, 0), (0, 3), (1, 0), (1, 2)):
        one = np.zeros((2, T), np.float32)
        one[b, i] = 1
        got, _, _ = watched(cfg)(params, tokens, mems, one)
        for x in (got.attention, *got.terms.values()):
            assert x.dtype == np.float32
            np.testing.assert_allclose(x.sum(axis=-1), 1, atol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("form", ["relative", "absolute_per_layer"])
def test_the_pass_that_returns_attention_gives_the_losses_of_the_model(form):
    """Losses and the inputs of all layers are equal to the last bit; no layer is missing."""
    cfg = tiny_models.config(**tiny_models.attention(form))
    tokens, mems = tiny_models.tokens(cfg, 2, T + 1), tiny_models.memory(cfg, [M, 2], M)
    apply = tiny_models.apply(cfg, "nll")
    inputs = (tiny_models.variables(cfg), tokens[:, :-1], tokens[:, 1:], mems)
    nll, after = apply(*inputs)
    with capture_attention() as layers:
        watched, watched_after = apply(*inputs)
    assert len(layers) == cfg.n_layer
    np.testing.assert_array_equal(watched, nll)
    np.testing.assert_array_equal(watched_after.hidden, after.hidden)
    weights: Any = np.ones((2, T), np.float32)
    params = inputs[0]["params"]
    model = txl_jax.TransformerXL(cfg)
    _, _, kept = segment_attention(model, params, tokens[:, :-1], mems, weights)
    np.testing.assert_array_equal(kept.hidden, after.hidden)
    with capture_attention() as nothing:
        pass
    apply(*inputs)
    assert not nothing


def test_distances_that_only_a_later_layer_sees_are_kept():
    """Here, layer 0 is patched to see distances 0 and 1 only, as a changed model might."""

    def narrow_first(call, args, kwargs, context):
        if context.method_name == "gather" and "layer_0" in context.module.path:
            args = (args[0].replace(mask=args[0].mask.replace(reach=1)),)
        return call(*args, **kwargs)

    cfg = tiny_models.config()
    params, tokens = tiny_models.variables(cfg)["params"], tiny_models.tokens(cfg, 1, T)
    mems, weights = tiny_models.memory(cfg, [M], M), jnp.ones((1, T))
    with nn.intercept_methods(narrow_first):
        sums, _, _ = segment_attention(txl_jax.TransformerXL(cfg), params, tokens, mems, weights)
    attention = Averages.of(sums).attention
    assert attention.shape[-1] == M + T
    assert (attention[0, :, 2:] == 0).all()
    assert (attention[1] > 0).all()


def trained(cfg, params=None, seg_len=T, mem_len=M, evaluated_with=M, vocab=None, **settings):
    """Returns a ``TrainedModel`` with random parameters and the given settings of attention maps.

    Its training memory is 2 states, or 0 if ``evaluated_with``, the evaluation memory, is 0.
    """
    context = 0 if evaluated_with else 2
    cut = {"seg_len": 2, "mem_len": evaluated_with and 2, "context_len": context}
    scored = {"seg_len": 2, "mem_len": evaluated_with, "context_len": context}
    exp = txl_jax.ExperimentConfig.from_dict(
        {
            "model": dataclasses.asdict(cfg),
            "train": cut,
            "validate": scored,
            "evaluate": scored,
            "attention": {"seg_len": seg_len, "mem_len": mem_len, **settings},
        }
    )
    params = tiny_models.variables(cfg)["params"] if params is None else params
    symbols = vocab or Vocab("char", [chr(ord("a") + i) for i in range(cfg.vocab_size)])
    return TrainedModel(txl_jax.TransformerXL(cfg), params, symbols, exp, step=7)


def slow_averages(cfg, streams, seg_len, mem_len, context_len):
    """Returns averages over the queries of all segments before which memory and context are full.

    These are the mean weights by term and distance, the mean distance of each head, the number of
    queries that see each distance, and the number of all queries.
    """
    params, queries = float64(cfg), 0
    total: dict[str, Any] = {}
    seen: Any = 0
    for tokens in streams:
        memory: list[list] = [[] for _ in range(cfg.n_layer)]
        for start in range(0, len(tokens) - seg_len + 1, seg_len):
            before = max(0, start - context_len)
            read = tokens[before : start + seg_len]
            found, memory = slow(cfg, params, read, memory, mem_len)
            if start < mem_len + context_len:
                continue
            own = [0] * (start - before) + [1] * seg_len
            summed, saw = slow_sums(found, own)
            total = {name: x + total.get(name, 0) for name, x in summed.items()}
            seen, queries = seen + saw, queries + seg_len
    spans = total["all"] @ np.arange(len(seen)) / queries
    total = {name: x[..., seen > 0] / seen[seen > 0] for name, x in total.items()}
    return total, spans, seen[seen > 0], queries


READ: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "relative, memory longer than in training": ({}, 1, M, 0),
    "relative, two streams": ({}, 2, 5, 0),
    "relative, no memory": ({}, 1, 0, 0),
    "relative, run again": ({}, 2, 0, 5),
    "absolute_per_layer": (
        {"attention": "absolute_per_layer", "n_positions": 9, "d_head": 4},
        1,
        0,
        5,
    ),
}


MOST_SPECIAL = ("relative, two streams", "absolute_per_layer")
"""Cases that run by default; the other cases run with ``-m slow``."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in MOST_SPECIAL else pytest.mark.slow) for name in READ],
)
def test_averages_of_a_text_are_those_of_it_written_out(name):
    """Queries count only in complete segments, and only when the memory before them is full."""
    changes, n_streams, mem_len, context_len = READ[name]
    cfg = tiny_models.config(**changes)
    tokens = tiny_models.tokens(cfg, 1, n_streams * 19 + 1)[0]
    read = trained(
        cfg,
        mem_len=mem_len + context_len,
        evaluated_with=0 if context_len or not mem_len else M,
        batch_size=n_streams,
        max_tokens=0,
    )
    got = AttentionReader(read).averages(tokens)
    streams = [tokens[i * 19 : (i + 1) * 19] for i in range(n_streams)]
    want, spans, seen, queries = slow_averages(cfg, streams, T, mem_len, context_len)
    np.testing.assert_allclose(got.attention, want.pop("all"), atol=1e-5)
    for letter, x in want.items():
        np.testing.assert_allclose(got.terms[letter], x, atol=1e-5)
    np.testing.assert_allclose(got.spans, spans, atol=1e-4)
    np.testing.assert_array_equal(got.seen, seen)
    assert got.queries == queries > 0
    assert set(got.terms) == set(LETTERS.get(cfg.attention, ""))


def test_short_segments_add_up_to_long_ones():
    """With ``same_length``, two segments with carried memory give the averages of one segment."""
    cfg = tiny_models.config(same_length="pytorch")
    tokens = tiny_models.tokens(cfg, 1, 33)[0]
    settings = {"mem_len": 8, "max_tokens": 0}
    whole = AttentionReader(trained(cfg, seg_len=8, **settings)).averages(tokens)
    parts = AttentionReader(trained(cfg, seg_len=4, **settings)).averages(tokens)
    assert whole.queries == parts.queries == 24
    np.testing.assert_allclose(parts.attention, whole.attention, atol=1e-5)
    for letter in "abcd":
        np.testing.assert_allclose(parts.terms[letter], whole.terms[letter], atol=1e-5)


def test_as_many_tokens_are_read_as_are_asked_for():
    cfg = tiny_models.config()
    tokens = tiny_models.tokens(cfg, 1, 60)[0]
    of = lambda text, **more: AttentionReader(trained(cfg, **more)).averages(text)
    first = of(tokens, max_tokens=9)
    assert first.queries == 12  # whole segments, after two that fill the memory
    np.testing.assert_array_equal(first.attention, of(tokens[:21], max_tokens=0).attention)


def test_the_protocols_own_clamp_and_window_hold():
    cfg = tiny_models.config()
    tokens = tiny_models.tokens(cfg, 1, 20)[0]
    read = trained(cfg)
    changes = {"evaluate.clamp_len": 3, "evaluate.same_length": "tf"}
    changed = dataclasses.replace(read, config=override(read.config, changes))
    own = trained(tiny_models.config(clamp_len=3, same_length="tf"))
    want = AttentionReader(own).averages(tokens)
    np.testing.assert_array_equal(
        AttentionReader(changed).averages(tokens).attention, want.attention
    )
    assert want.n_keys == M + 1


def test_the_widest_head_is_found():
    """Here, Shaw's learnt scalars make each head attend to one known distance."""
    cfg = tiny_models.config(attention="shaw", n_positions=9)
    params = jax.tree.map(np.zeros_like, tiny_models.variables(cfg)["params"])
    looks_at = {(0, 0): 0, (0, 1): 3, (1, 0): 5, (1, 1): 2}
    for (layer, head), distance in looks_at.items():
        params[f"layer_{layer}"]["attention"]["distance_bias"][distance, head] = 60.0
    got = AttentionReader(trained(cfg, params)).averages(tiny_models.tokens(cfg, 1, 60)[0])
    for place, distance in looks_at.items():
        assert got.spans[place] == pytest.approx(distance, abs=1e-4)
        assert got.attention[place].argmax() == distance
        np.testing.assert_allclose(got.terms["d"][place], got.attention[place], atol=1e-6)
        np.testing.assert_allclose(got.terms["a"][place] * got.seen / got.queries, _uniform(got))
    assert got.widest(3) == [(1, 0), (0, 1), (1, 1)]
    assert len(got.widest(9)) == 4


def _uniform(got):
    """The mean weight of each distance if T queries attend equally to their M+1 .. M+T keys."""
    sees = np.arange(M + 1, M + T + 1)
    return [np.mean(np.where(d < sees, 1 / sees, 0)) for d in range(got.n_keys)]


def test_shares_and_bins_by_hand():
    """One head, two queries: one of them sees distance 3, and neither sees distance 4."""
    attention = np.array([[[1.0, 0.6, 0.3, 0.1, 0.0]]])
    got = Averages.of(Sums(attention, {}, np.array([2.0, 2, 2, 1, 0]), np.array(2.0)))
    np.testing.assert_allclose(got.attention[0, 0], [0.5, 0.3, 0.15, 0.1])
    np.testing.assert_allclose(got.spans, [[(0.6 + 0.6 + 0.3) / 2]])
    edges = doubling_edges(4)
    assert edges.tolist() == [0, 1, 2, 4]
    (row,) = got.rows()
    assert row["share_by_distance"] == pytest.approx({"0": 0.5, "1": 0.3, "2-3": 0.2})
    np.testing.assert_allclose(got.binned(got.attention, edges)[0, 0], [0.5, 0.3, 0.4 / 3])
    assert doubling_edges(1).tolist() == [0, 1]
    assert doubling_edges(6).tolist() == [0, 1, 2, 4, 6]


@pytest.mark.parametrize("position", [11, 42])
def test_a_position_sees_what_it_would_with_all_of_the_text_before(position):
    """Position 11 is the first with a full memory; 42 has more text before it than layers reach."""
    cfg = tiny_models.config()
    tokens = tiny_models.tokens(cfg, 1, 50)[0]
    reader = AttentionReader(trained(cfg, position=position))
    reader.check(tokens, "the text")
    got = reader.at_position(tokens, position)
    memory: list[list] = [[] for _ in range(cfg.n_layer)]
    for end in range((position + 1) % T + T, position + 2, T):
        found, memory = slow(cfg, float64(cfg), tokens[end - T : end], memory, M)
    np.testing.assert_allclose(got, found["all"][:, :, -1], atol=1e-5)


def test_a_position_of_a_model_without_memory_sees_its_context():
    cfg = tiny_models.config(attention="absolute")
    tokens = tiny_models.tokens(cfg, 1, 50)[0]
    reader = AttentionReader(trained(cfg, evaluated_with=0, position=9))
    reader.check(tokens, "the text")
    window = slow(cfg, float64(cfg), tokens[: M + T], [[], []], 0)[0]
    np.testing.assert_allclose(reader.at_position(tokens, 9), window["all"][:, :, -1], atol=1e-5)


def test_the_attended_tokens_are_those_of_their_distance():
    probabilities = np.array([[[0.1, 0.0, 0.6, 0.3]]])
    vocab = Vocab("char", list("abcd"))
    heads = PositionAttention(9, probabilities, np.array([3, 0, 1, 2]), [(0, 0)], vocab)
    assert heads.largest(0, 0) == [2, 3, 0]  # without the key of weight 0
    assert [heads.text_around(d, 2) for d in (2, 3, 0)] == [
        ("d", "a", "bc"),
        ("", "d", "ab"),
        ("ab", "c", ""),
    ]
    words = Vocab("word", ["<eos>", "on", "off", "the"])
    assert dataclasses.replace(heads, vocab=words).text_around(2, 20) == (
        "the ",
        "<eos>",
        " on off",
    )


def test_tokens_can_be_read():
    of = lambda vocab, text: [readable_token(vocab, i) for i in vocab.encode(text)]
    assert of(Vocab.all_bytes(), "a\n \té$") == ["a", "\\n", "␣", "\\t", "\\xc3", "\\xa9", "$"]
    assert of(Vocab.from_chars(["\n aé"]), "a\n é") == ["a", "\\n", "␣", "é"]
    assert of(Vocab("letter", ["_", "a"]), "a a") == ["a", "_", "a"]
    assert of(Vocab("word", ["<eos>", "a_b"]), "a_b\n") == ["a_b", "<eos>"]


def whole(folder, **changes):
    """Returns a model with random parameters, and its corpus."""
    exp = tiny_runs.experiment(
        folder, **{"attention.seg_len": 8, "attention.mem_len": 24, "attention.max_tokens": 64}
    )
    exp = override(exp, {"attention.position": 100, **changes})
    corpus = corpus_from_config(exp.data)
    exp = with_vocab(exp, corpus)
    params = tiny_models.variables(exp.model)["params"]
    return TrainedModel(txl_jax.TransformerXL(exp.model), params, corpus.vocab, exp, step=7), corpus


@pytest.mark.integration
def test_a_run_writes_its_pictures_and_numbers(tmp_path):
    read, corpus = whole(tmp_path)
    line = attention_maps.run(read, str(tmp_path))
    names = ["attention", "attention_heads", "attention_terms"]
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"</svg>" in (tmp_path / f"{name}.svg").read_bytes()
    found = json.loads((tmp_path / "attention.json").read_text())
    spans = {(h["layer"], h["head"]): h["mean_distance"] for h in found["heads"]}
    assert len(spans) == 4
    assert found["queries"] == 64
    for head in found["heads"]:
        assert sum(head["share_by_distance"].values()) == pytest.approx(1, abs=1e-5)
    shown_heads = [(h["layer"], h["head"]) for h in found["position"]["heads"]]
    assert shown_heads == sorted(spans, key=lambda place: -spans[place])[:3]
    layer, head = shown_heads[0]
    expected = (
        f"widest heads: layer {layer} head {head} (mean distance {spans[layer, head]:.0f} tokens"
    )
    assert line.startswith(expected)
    text = corpus.vocab.decode(corpus.valid[:101])
    for attended in found["position"]["heads"][0]["largest"]:
        token = text[100 - attended["distance"]]
        assert attended["token"] == {" ": "␣", "\n": "\\n"}.get(token, token)
    with np.load(tmp_path / "attention.npz", allow_pickle=False) as arrays:
        assert set(arrays) == {"attention", "term_a", "term_b", "term_c", "term_d", "seen"}
        assert arrays["attention"].shape == (2, 2, 32)
        mean = arrays["attention"][layer, head] * arrays["seen"] @ np.arange(32) / 64
    assert mean == pytest.approx(spans[layer, head], abs=1e-2)
    with (tmp_path / "attention.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        place = int(row["layer"]), int(row["head"])
        assert float(row["mean_distance"]) == pytest.approx(spans.pop(place), abs=1e-2)
        assert sum(float(x) for k, x in row.items() if "share" in k) == pytest.approx(1, abs=1e-4)
    assert not spans
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_attention_of_content_alone_has_no_terms(tmp_path):
    scored = {"mem_len": 0, "context_len": 8}
    changes = {f"{s}.{k}": x for s in ("train", "validate", "evaluate") for k, x in scored.items()}
    read, _ = whole(tmp_path, **changes, **{"model.attention": "absolute"})
    attention_maps.run(read, str(tmp_path))
    assert not (tmp_path / "attention_terms.png").exists()
    found = json.loads((tmp_path / "attention.json").read_text())
    assert found["terms"].startswith("left out")
    assert "context 24" in found["data"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position": 10}, r"position = 10: must be from 11, .* to 49, the last token of the text"),
        ({"position": 50}, r"position = 50: must be from 11"),
        (
            {"mem_len": 50},
            r"mem_len = 50: no segment of 4 tokens has so many preceding tokens in the text",
        ),
        ({"mem_len": 20, "batch_size": 3}, r"50 tokens in 3 streams; lower attention.mem_len"),
    ],
)
def test_what_is_not_in_the_text_is_refused(settings, message):
    cfg = tiny_models.config()
    reader = AttentionReader(trained(cfg, **{"position": 30, **settings}))
    with pytest.raises(AnalysisError, match=message):
        reader.check(tiny_models.tokens(cfg, 1, 50)[0], "the text")


def test_lengths_that_a_model_cannot_be_read_with_are_refused():
    table = tiny_models.config(**tiny_models.attention("absolute_per_layer"))
    with pytest.raises(AnalysisError, match=r"larger than model.n_positions = 9; use smaller"):
        AttentionReader(trained(table, evaluated_with=0))
    window = tiny_models.config(same_length="pytorch")
    with pytest.raises(AnalysisError, match=r"mem_len = 0: the window same_length='pytorch'"):
        AttentionReader(trained(window, mem_len=0))


def test_sentences_are_refused(tmp_path):
    """The error comes before the text is read."""
    cfg = tiny_models.config(vocab_size=3)
    read = trained(cfg, vocab=Vocab("sentence", ["<S>", "<UNK>", "a"]))
    read = dataclasses.replace(read, config=override(read.config, {"data.name": "lm1b"}))
    with pytest.raises(AnalysisError, match="'lm1b' has unordered sentences"):
        attention_maps.run(read, str(tmp_path))
