"""Losses by context length are those of a model that reads that context and nothing else."""

import csv
import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest
import tiny_models
import tiny_runs

from txl_jax.analysis import context
from txl_jax.analysis.context import effective_length, losses_by_context, target_slice
from txl_jax.analysis.recl import Losses
from txl_jax.analysis.results import AnalysisError
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir import with_vocab
from txl_jax.config import (
    ConfigError,
    ContextConfig,
    ExperimentConfig,
    MeshConfig,
    ProtocolConfig,
    override,
)
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.pieces import Pieces
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.mesh import make_mesh

FORMS: dict[str, dict[str, Any]] = {
    "relative": {},
    "clamped": {"clamp_len": 3},
    "windowed": {"same_length": "tf"},
    "shaw": {"attention": "shaw", "n_positions": 6},
    "absolute": {"attention": "absolute"},
    "absolute_per_layer": {"attention": "absolute_per_layer", "n_positions": 20, "d_head": 4},
}
TOKENS = tiny_models.tokens(tiny_models.config(), 1, 41)[0]


def settings(**changes):
    return ContextConfig(**{"lengths": (2, 7), "stride": 1, "batch_size": 3, **changes})


def measured(cfg, c, tokens=TOKENS):
    return losses_by_context(cfg, tiny_models.variables(cfg)["params"], tokens, c)


@functools.cache
def in_windows(cfg, starts: tuple[int, ...], n: int) -> np.ndarray:
    """Losses of all targets in windows of n tokens; the model sees nothing outside a window."""
    windows = TOKENS[np.array(starts)[:, None] + np.arange(n)]
    mems = TransformerXL(cfg).init_mems(len(starts), 0)
    nll = tiny_models.quick(tiny_models.apply(cfg, "nll"))
    found, _ = nll(tiny_models.variables(cfg), windows[:, :-1], windows[:, 1:], mems)
    return np.asarray(found)


@functools.cache
def loss_alone(cfg, n: int) -> dict[int, float]:
    """The loss of every target, by position, if the model reads only the n tokens before it."""
    starts = range(len(TOKENS) - n)
    return dict(zip(range(n, 41), in_windows(cfg, tuple(starts), n + 1)[:, -1], strict=True))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("form", "stride"),
    [
        ("relative", 1),
        ("relative", 4),
        ("shaw", 4),
        *(
            pytest.param(form, stride, marks=pytest.mark.slow)
            for form, stride in (("shaw", 1), ("clamped", 4), ("windowed", 4))
        ),
    ],
)
@pytest.mark.few(1)
def test_a_target_loses_what_a_fresh_model_loses_with_its_context_alone(form, stride):
    """Targets are 7 to 38; windows start at multiples of the stride; the last window is short."""
    cfg = tiny_models.config(**FORMS[form])
    alone = dataclasses.replace(cfg, same_length=False)
    c = settings(stride=stride, max_tokens=32)
    for row, length in zip(measured(cfg, c), c.lengths, strict=True):
        for t, loss in zip(range(7, 39), row, strict=True):
            seen = t - (t - length) // stride * stride
            assert length <= seen < length + stride
            assert loss == pytest.approx(loss_alone(alone, seen)[t], abs=1e-5)


@pytest.mark.parametrize(
    ("form", "stride"),
    [
        ("absolute", 4),
        pytest.param("absolute", 1, marks=pytest.mark.slow),
        pytest.param("absolute_per_layer", 4, marks=pytest.mark.slow),
    ],
)
def test_a_form_that_counts_from_the_end_loses_what_it_does_in_a_window_by_itself(form, stride):
    cfg = tiny_models.config(**FORMS[form])
    c = settings(stride=stride, max_tokens=31)
    for row, length in zip(measured(cfg, c), c.lengths, strict=True):
        starts = tuple(range(0, 38 - length, stride))
        full = tuple(start for start in starts if start + length + stride <= 38)
        found: dict[int, float] = {}
        for group in (full, starts[len(full) :]):  # the last window can be short
            if group:
                n = min(length + stride, 38 - group[0])
                for start, nll in zip(group, in_windows(cfg, group, n), strict=True):
                    found.update(
                        zip(range(start + length, start + n), nll[length - 1 :], strict=True)
                    )
        np.testing.assert_allclose(row, [found[t] for t in range(7, 38)], atol=1e-5)


def test_losses_do_not_depend_on_the_batch_size():
    cfg = tiny_models.config()
    one, many = (measured(cfg, settings(stride=3, batch_size=b)) for b in (1, 50))
    np.testing.assert_allclose(one, many, atol=1e-5)


def evaluated(cfg, tokens, **protocol):
    c = ProtocolConfig(batch_size=1, **protocol)
    mesh = make_mesh(MeshConfig(data=1), cfg, batch_size=1)
    score = Evaluator(cfg, c, tokens, mesh).run(tiny_models.variables(cfg)["params"])
    assert score is not None
    return score.loss * score.targets


@pytest.mark.integration
@pytest.mark.parametrize("form", ["relative", "windowed"])
def test_memory_gives_what_evaluation_with_that_memory_gives(form):
    """Targets begin at token 7, so the loss of the first 7 tokens is subtracted from the text's."""
    cfg = tiny_models.config(**FORMS[form])
    c = settings(kind="memory", stride=4, batch_size=1, max_tokens=31)
    score = functools.partial(evaluated, cfg, seg_len=4, mem_len=2)
    want = score(tokens=TOKENS[:38]) - score(tokens=TOKENS[:7])
    assert measured(cfg, c)[0].sum() == pytest.approx(want, abs=1e-4)


def test_memory_of_all_that_was_read_is_the_text_read_at_once():
    """Targets 30 to 40 are in streams of 4, 4 and 3, which are read from tokens 0, 4 and 8."""
    cfg = tiny_models.config()
    c = settings(kind="memory", lengths=(2, 30), stride=10, batch_size=3)
    at_once = in_windows(cfg, (0, 4, 8), 33)
    want = np.concatenate([at_once[:, 29:], [[x] for x in last_targets(cfg)]], axis=1)
    np.testing.assert_allclose(measured(cfg, c)[1], want.reshape(-1)[:11], atol=1e-5)


def last_targets(cfg):
    """The loss of the fourth target of each stream; the third stream has only three, so 0."""
    return [*in_windows(cfg, (0, 4), 34)[:, -1], 0.0]


def test_a_form_without_memory_has_windows_in_place_of_memory():
    cfg = tiny_models.config(attention="absolute")
    windows, memory = (
        measured(cfg, settings(kind=kind, stride=4)) for kind in ("window", "memory")
    )
    np.testing.assert_array_equal(windows, memory)


@pytest.mark.parametrize(("max_tokens", "end"), [(0, 41), (7, 14), (1000, 41)])
def test_targets_begin_where_the_longest_context_is_whole(max_tokens, end):
    assert target_slice(TOKENS, settings(max_tokens=max_tokens)) == slice(7, end)


@pytest.mark.parametrize(
    ("perplexity", "threshold", "want"),
    [
        ((10, 9, 8.95, 8.94), 0.01, 200),  # 0.6% and 0.7% below 9 are not enough
        ((10, 9, 8.95, 8.9), 0.01, 300),  # a later gain counts, unlike for RECL
        ((10, 9, 8.95, 8.9), 0.02, 200),
        ((10, 11, 12, 13), 0.01, 100),
        ((10, 9, 9, 9), 0.0, 200),  # equal perplexity is no gain
        ((10, 9, 8, 7), 0.01, 400),
    ],
)
def test_the_effective_length_is_the_least_that_no_longer_one_improves(perplexity, threshold, want):
    losses = Losses("m", (100, 200, 300, 400), np.log(np.array(perplexity))[:, None])
    assert effective_length(losses, threshold) == want


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("relative", {"lengths": (5, 41)}, r"context of 41 tokens: the valid split has only 41"),
        (
            "absolute_per_layer",
            {"lengths": (5, 18), "stride": 4},
            r"stride=4, use lengths of at most 17",
        ),
    ],
)
def test_lengths_that_the_text_or_the_model_does_not_have_are_refused(form, changes, words):
    cfg = tiny_models.config(**FORMS[form])
    with pytest.raises(AnalysisError, match=words):
        measured(cfg, settings(**changes))
    context.check(cfg, TOKENS, settings(**{**changes, "lengths": (5, changes["lengths"][1] - 1)}))


def test_sentences_are_refused():
    sentences = Pieces(np.arange(4), np.array([0]), True, "sentences")
    with pytest.raises(AnalysisError, match="unordered sentences"):
        context.check(tiny_models.config(), sentences, settings())


@pytest.mark.parametrize("lengths", [(5,), (), (5, 5), (5, 2), (0, 5)])
def test_lengths_that_make_no_comparison_are_refused(lengths):
    with pytest.raises(ConfigError, match=r"context\.lengths .* two or more increasing numbers"):
        ExperimentConfig.from_dict({"context": {"lengths": lengths}})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model with random parameters and the vocabulary of a small text."""
    exp = tiny_runs.experiment(
        tmp_path_factory.mktemp("text"),
        **{"context.lengths": "2,4,8", "context.stride": "4", "context.max_tokens": "50"},
    )
    corpus = corpus_from_config(exp.data)
    exp = with_vocab(exp, corpus)
    params = tiny_models.variables(exp.model)["params"]
    return TrainedModel(TransformerXL(exp.model), params, corpus.vocab, exp, 12)


def test_the_files_hold_the_losses_and_how_they_were_measured(trained, tmp_path, capsys):
    last = context.run(trained, str(tmp_path))
    printed = capsys.readouterr().out
    c, corpus = trained.config.context, corpus_from_config(trained.config.data)
    nll = losses_by_context(trained.config.model, trained.params, corpus.valid, c)
    losses = Losses.load(tmp_path / "context_losses.npz")
    assert (losses.name, losses.contexts) == ("experiment", (2, 4, 8))
    np.testing.assert_array_equal(losses.nll, nll)
    result = json.loads((tmp_path / "context.json").read_text())
    about = {
        "step": 12,
        "kind": "window",
        "stride": 4,
        "targets": 50,
        "first_target": 8,
        "split": "valid",
        "unit": "bpc",
        "source_hash": corpus.source_hash,
    }
    assert about.items() <= result.items()
    effective = result["effective_length"]
    assert effective == effective_length(losses, 0.01)
    longest = "effective context at least 8 tokens, the longest that was measured"
    first, files = last.splitlines()
    assert first == (longest if effective == 8 else f"effective context {effective} tokens of 8")
    names = "context_losses.npz, context.json, context.csv, context.png"
    assert files == f"written to {tmp_path}: {names}"
    with open(tmp_path / "context.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row, of_json, of_length, n in zip(rows, result["results"], nll, (2, 4, 8), strict=True):
        assert (row["context"], row["kind"], row["stride"]) == (str(n), "window", "4")
        mean = of_length.astype(np.float64).mean()
        assert float(row["loss"]) == of_json["loss"] == pytest.approx(mean)
        assert float(row["bpc"]) == of_json["bpc"] == pytest.approx(mean / np.log(2))
        assert f"{of_json['bpc']:.3f} bpc" in printed
    assert (tmp_path / "context.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "context.svg").read_text()
    assert svg.startswith("<?xml")


def test_a_model_without_memory_is_measured_by_windows_and_the_files_say_so(
    trained, tmp_path, monkeypatch, capsys
):
    changes = {"model.attention": "absolute", "context.kind": "memory"}
    for section in ("train", "validate", "evaluate"):
        changes[f"{section}.mem_len"] = "0"
    exp = override(trained.config, changes)
    kinds = []

    def measured(trained, corpus, c, name, progress):
        kinds.append(c.kind)
        return Losses(name, c.lengths, np.ones((3, 5), np.float32))

    monkeypatch.setattr(context, "measure", measured)
    context.run(dataclasses.replace(trained, config=exp), str(tmp_path))
    result = json.loads((tmp_path / "context.json").read_text())
    assert kinds == ["window"]
    assert {result["kind"], *(row["kind"] for row in result["results"])} == {"window"}
    assert "(window, stride 4, 5 targets)" in capsys.readouterr().out


def test_the_clamp_is_the_evaluation_protocols(trained, tmp_path):
    protocol = dataclasses.replace(trained.config.evaluate, clamp_len=1)
    config = dataclasses.replace(trained.config, evaluate=protocol)
    context.run(dataclasses.replace(trained, config=config), str(tmp_path))
    clamped = dataclasses.replace(config.model, clamp_len=1)
    corpus = corpus_from_config(config.data)
    nll = losses_by_context(clamped, trained.params, corpus.valid, config.context)
    np.testing.assert_array_equal(Losses.load(tmp_path / "context_losses.npz").nll, nll)
    assert json.loads((tmp_path / "context.json").read_text())["clamp_len"] == 1
