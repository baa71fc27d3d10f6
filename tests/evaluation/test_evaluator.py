"""Scoring counts every target once and does not depend on devices or segment length."""

import contextlib
import dataclasses
import math
import types
from typing import Any

import numpy as np
import pytest
import tiny_models
import tiny_runs
from tiers import rest_integration, rest_slow

import txl_jax
from txl_jax import progress as progress_bar
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import MeshConfig, ProtocolConfig
from txl_jax.data.pieces import Pieces
from txl_jax.data.streams import Streams, segments
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation import split as split_scores
from txl_jax.evaluation.evaluator import Evaluator, segment_bar
from txl_jax.evaluation.protocols import (
    compared_protocols,
    describe,
    drop_unused_limit,
    target_indices,
)
from txl_jax.evaluation.split import conversions
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.mesh import make_mesh

CFG = tiny_models.config()
FORMS: dict[str, dict[str, Any]] = {
    "relative": {},
    "absolute": {"attention": "absolute"},
    "absolute_per_layer": {"attention": "absolute_per_layer", "n_positions": 15, "d_head": 4},
}
TOKENS = tiny_models.tokens(CFG, 1, 101)[0]


def mesh(devices=1):
    return make_mesh(MeshConfig(data=devices), CFG, batch_size=devices)


def score(devices=1, tokens=TOKENS, cfg=CFG, **protocol):
    c = ProtocolConfig(**{"batch_size": 3, "seg_len": 8, "mem_len": 12, **protocol})
    return Evaluator(cfg, c, tokens, mesh(devices)).run(tiny_models.variables(cfg)["params"])


def nll_of(cfg, tokens, mems):
    """The nll [T] of each token except the first in a single unpadded row, and the new memory."""
    row = tokens[None]
    apply = tiny_models.compiled(cfg, "nll")
    nll, after = apply(tiny_models.variables(cfg), row[:, :-1], row[:, 1:], mems)
    return np.asarray(nll)[0], after


@pytest.mark.parametrize("batch_size", rest_integration(2, [1, 7, 3, 100]))
@pytest.mark.parametrize("seg_len", [1, 8, 200])
@pytest.mark.few(3)
def test_every_target_is_scored_once_at_any_batch_and_segment(batch_size, seg_len):
    assert score(batch_size=batch_size, seg_len=seg_len).targets == len(TOKENS) - 1


@pytest.mark.integration
def test_one_stream_with_covering_memory_is_the_text_scored_whole():
    nll, _ = nll_of(CFG, TOKENS, TransformerXL(CFG).init_mems(1, 0))
    for seg_len in (7, 20, 100):
        got = score(batch_size=1, seg_len=seg_len, mem_len=100)
        assert got.loss == pytest.approx(float(nll.mean()), abs=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize(("form", "context_len"), [*((f, 5) for f in FORMS), ("absolute", 12)])
@pytest.mark.few(2)
def test_context_is_run_again_and_not_scored(form, context_len):
    """Each segment is scored after up to C context tokens of its own stream.

    Two streams of 20 and 19 targets have segments of 8; the last segments are short.
    """
    cfg = tiny_models.config(**FORMS[form])
    total = 0.0
    for begin, end in ((0, 20), (20, 39)):
        for start in range(begin, end, 8):
            first, stop = max(begin, start - context_len), min(start + 8, end)
            nothing = txl_jax.TransformerXL(cfg).init_mems(1, 0)
            nll, _ = nll_of(cfg, TOKENS[first : stop + 1], nothing)
            total += nll[start - first :].sum()
    protocol = {"batch_size": 2, "mem_len": 0, "context_len": context_len}
    got = score(cfg=cfg, tokens=TOKENS[:40], **protocol)
    assert got.targets == 39
    assert got.loss == pytest.approx(total / 39, abs=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("first_memory", ["empty", "zeros"])
@pytest.mark.few(1)
def test_memory_before_the_first_segment_is_empty_or_zeros_that_are_attended_to(first_memory):
    total = 0.0
    for begin, end in ((0, 20), (20, 39)):
        mems = txl_jax.TransformerXL(CFG).init_mems(1, 12)
        if first_memory == "zeros":
            mems = mems.replace(filled=np.array([12], np.int32))
        for start in range(begin, end, 8):
            nll, mems = nll_of(CFG, TOKENS[start : min(start + 8, end) + 1], mems)
            total += nll.sum()
    of = lambda first: score(tokens=TOKENS[:40], batch_size=2, first_memory=first).loss
    assert of(first_memory) == pytest.approx(total / 39, abs=1e-5)
    other = {"empty": "zeros", "zeros": "empty"}[first_memory]
    assert of(other) != pytest.approx(total / 39, abs=1e-3)


@pytest.mark.integration
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize(
    "past",
    [
        {"mem_len": 12},
        {"mem_len": 0, "context_len": 6},
        {"seg_len": 9, "mem_len": 20, "clamp_len": 6},
    ],
)
@pytest.mark.few(2)
def test_devices_do_not_change_the_score_even_if_they_do_not_divide_the_streams(devices, past):
    some, one = score(devices, **past), score(1, **past)
    assert some.loss == pytest.approx(one.loss, abs=1e-6)
    assert some.targets == one.targets


@pytest.mark.parametrize("clamp_len", [-1, 6])
def test_heads_on_two_devices_do_not_change_the_score(clamp_len):
    c = ProtocolConfig(batch_size=3, seg_len=9, mem_len=20, clamp_len=clamp_len)
    params = tiny_models.variables(CFG)["params"]
    spread = make_mesh(MeshConfig(tensor=2), CFG, batch_size=3)
    one, two = (Evaluator(CFG, c, TOKENS, on).run(params) for on in (mesh(), spread))
    assert one is not None
    assert two is not None
    assert two.loss == pytest.approx(one.loss, abs=1e-6)


def sentences(of=TOKENS):
    """A text of sentences of 0 to 6 words, with a boundary of id 0 around each."""
    sizes = np.random.default_rng(0).integers(1, 8, 200)
    ends = np.cumsum([0, *sizes])
    ends = ends[ends < len(of)]
    tokens = of[: ends[-1] + 1].copy()
    tokens[ends] = 0
    return Pieces(tokens, ends[:-1], True, "sentences")


def streams_by_hand(text, begins, ends):
    """Mean nll of ranges of a text, each read as one segment with empty memory."""
    total = 0.0
    for begin, end in zip(begins, ends, strict=True):
        nothing = txl_jax.TransformerXL(CFG).init_mems(1, 0)
        total += nll_of(CFG, text[begin : end + 1], nothing)[0].sum()
    return total / (ends[-1] - begins[0])


@pytest.mark.integration
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("seg_len", [5, 16, 34])
@pytest.mark.few(2)
def test_three_streams_score_alike_on_any_devices_in_any_segments_of_a_covered_text(
    devices, seg_len
):
    got = score(devices, seg_len=seg_len, mem_len=40)
    assert got.loss == pytest.approx(streams_by_hand(TOKENS, (0, 34, 68), (34, 68, 100)), abs=1e-5)
    assert got.targets == 100


@pytest.mark.integration
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("seg_len", [5, 60])
@pytest.mark.few(2)
def test_sentences_are_scored_once_in_their_order_with_memory_across_them(devices, seg_len):
    text = sentences()
    begins = [seg.inputs[:, 0] for seg in segments(text, 3, 200)]
    got = score(devices, tokens=text, seg_len=seg_len, mem_len=60)
    rows = [int(n) for n in next(segments(text, 3, 200)).weights.sum(axis=1)]
    ends = np.cumsum(rows).tolist()
    assert np.isin(ends, text.edges(np.arange(len(text) + 1))).all()
    assert (np.array(begins) == 0).all()
    want = streams_by_hand(text.ids, [0, *ends[:-1]], ends)
    assert got.loss == pytest.approx(want, abs=1e-5)
    assert got.targets == text.n_targets


@pytest.mark.integration
@pytest.mark.parametrize("window", ["pytorch", "tf"])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("of", ["array", "sentences"])
@pytest.mark.few(2)
def test_with_a_long_enough_warm_start_streams_score_as_one_does(window, devices, of):
    """L = 2 layers look back over 2 * 6 tokens, which a warm start of 13 covers."""
    text = TOKENS if of == "array" else sentences()
    protocol = {"tokens": text, "seg_len": 8, "mem_len": 6, "same_length": window}
    one = score(batch_size=1, **protocol)
    cold = score(batch_size=5, **protocol)
    warm = score(devices, batch_size=5, warm_start=13, **protocol)
    assert warm.loss == pytest.approx(one.loss, abs=1e-5)
    assert cold.loss != pytest.approx(one.loss, abs=1e-3)
    assert one.targets == cold.targets == warm.targets


@pytest.mark.integration
@pytest.mark.parametrize("warm_start", rest_slow(1, [8, 3, 50]))
def test_a_warm_start_reads_so_many_tokens_before_each_stream_and_not_more(warm_start):
    """Reading begins up to ``warm_start`` tokens before each of five streams."""
    total = 0.0
    for begin in range(0, 100, 20):
        first = max(begin - warm_start, 0)
        nothing = txl_jax.TransformerXL(CFG).init_mems(1, 0)
        total += nll_of(CFG, TOKENS[first : begin + 21], nothing)[0][begin - first :].sum()
    got = score(batch_size=5, mem_len=100, warm_start=warm_start)
    assert got.loss == pytest.approx(total / 100, abs=1e-5)
    assert got.targets == 100


def test_a_warm_start_beyond_the_text_reads_no_more_than_there_is():
    """Of five streams of 20 targets, the last has 80 tokens before it: ten segments of 8."""
    c = ProtocolConfig(batch_size=5, seg_len=8, mem_len=12, warm_start=20_000)
    scorer = Evaluator(CFG, c, TOKENS, mesh())
    assert len(list(scorer.batches)) == 10 + 3


def test_a_target_that_is_not_scored_once_is_an_error(monkeypatch):
    read = Streams.segment

    def lossy(self, index, rows):
        seg = read(self, index, rows)
        seg.weights[0, 0] *= index != 1
        return seg

    monkeypatch.setattr(Streams, "segment", lossy)
    with pytest.raises(RuntimeError, match=r"^tokens: 99 targets were scored, but .* 100 targets"):
        score()
    assert score(max_segments=2).targets == 3 * 16 - 1


def test_memory_changes_the_score_and_the_protocol_says_which():
    assert score(mem_len=0).loss != pytest.approx(score(mem_len=12).loss, abs=1e-4)
    c = ProtocolConfig(batch_size=3, seg_len=8, mem_len=12, same_length="tf", clamp_len=5)
    assert describe(c, CFG) == "test split, 3 streams, segment 8, memory 12, window tf, clamp 5"
    zeros = ProtocolConfig(batch_size=3, seg_len=8, mem_len=12, first_memory="zeros")
    assert describe(zeros, CFG) == (
        "test split, 3 streams, segment 8, memory 12, zeros before the first segment"
    )
    warm = ProtocolConfig(batch_size=3, seg_len=8, mem_len=12, warm_start=24)
    assert describe(warm, CFG) == "test split, 3 streams, segment 8, memory 12, warm start 24"
    context = ProtocolConfig(batch_size=3, seg_len=8, mem_len=0, context_len=6)
    assert describe(context, CFG) == "test split, 3 streams, segment 8, context 6"
    neither = dataclasses.replace(zeros, mem_len=0)
    assert describe(neither, CFG) == "test split, 3 streams, segment 8, memory 0"


def test_the_protocol_names_nothing_that_has_no_effect():
    told = lambda c, **form: describe(ProtocolConfig(seg_len=8, **c), tiny_models.config(**form))
    beside = {"batch_size": 3, "mem_len": 12, "context_len": 6}
    zeros = {**beside, "first_memory": "zeros"}
    assert told(zeros) == "test split, 3 streams, segment 8, context 6 and memory 12"
    assert score(**zeros).loss == score(**beside).loss
    one = {"batch_size": 1, "mem_len": 12, "warm_start": 24}
    assert told(one) == "test split, 1 stream, segment 8, memory 12"
    table = FORMS["absolute_per_layer"]
    clamped = {"batch_size": 3, "mem_len": 0, "clamp_len": 4}
    assert told(clamped, **table) == "test split, 3 streams, segment 8, memory 0"
    cfg = tiny_models.config(**table)
    assert score(cfg=cfg, **clamped).loss == score(cfg=cfg, **{**clamped, "clamp_len": -1}).loss


def test_the_report_compares_memory_or_context_with_none():
    memory = ProtocolConfig(mem_len=12, same_length="pytorch", warm_start=24)
    context = ProtocolConfig(mem_len=0, context_len=6, seg_len=8)
    neither = ProtocolConfig(mem_len=0)
    assert compared_protocols(memory) == [
        ("memory 12", memory),
        ("no memory", ProtocolConfig(mem_len=0, same_length=False)),
    ]
    assert compared_protocols(context) == [
        ("context 6", context),
        ("no context", ProtocolConfig(mem_len=0, seg_len=8, same_length=False)),
    ]
    assert compared_protocols(neither) == [("memory 0", neither)]


@pytest.mark.parametrize("warm_start", [0, 20])
def test_progress_is_told_of_every_scored_segment(warm_start):
    told: list[tuple[int, int]] = []
    c = ProtocolConfig(batch_size=3, seg_len=8, mem_len=12, warm_start=warm_start)
    scorer = Evaluator(CFG, c, TOKENS, mesh())
    scorer.run(tiny_models.variables(CFG)["params"], progress=lambda *n: told.append(n))
    assert told == [(n, 5) for n in range(1, 6)]


def test_the_bar_is_on_standard_error_and_silent_where_it_is_over_at_once(capsys, monkeypatch):
    def shown(delay):
        monkeypatch.setattr(progress_bar, "DELAY", delay)
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        with segment_bar("test split, memory 12") as progress:
            for n in (1, 2, 3):
                progress(n, 3)
        return capsys.readouterr()

    assert shown(60.0) == ("", "")
    out, err = shown(0.0)
    assert out == ""
    assert "test split, memory 12: 100%" in err
    assert "3/3" in err


def test_the_report_shows_a_bar_of_all_segments_for_each_row(tmp_path, monkeypatch, capsys):
    """Bars are not on standard output, which has only the table."""
    seen: dict[str, list[tuple[int, int]]] = {}

    @contextlib.contextmanager
    def bar(what):
        seen[what] = []
        yield lambda *numbers: seen[what].append(numbers)

    monkeypatch.setattr(split_scores, "segment_bar", bar)
    corpus, exp = tiny_runs.corpus_and_experiment(
        tmp_path, **{"evaluate.dynamic.rule": "sgd", "evaluate.max_segments": 3}
    )
    params = tiny_models.variables(exp.model)["params"]
    trained = TrainedModel(TransformerXL(exp.model), params, corpus.vocab, exp, 0)
    result = tiny_runs.evaluate(trained, corpus, tmp_path)
    names = ["memory 32, dynamic sgd", "memory 32", "no memory"]
    assert seen == {f"test split, {name}": [(1, 3), (2, 3), (3, 3)] for name in names}
    assert result is not None
    assert [row["name"] for row in result["results"]] == names
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4
    assert out[0].endswith("dynamic evaluation sgd, rate 1e-05:")


def test_a_limit_on_segments_names_the_targets_that_are_scored():
    """The first text has two streams of 20 and 19 targets.

    The second text has three streams, each with one sentence: of 5, 4 and 3 tokens.
    """
    c = ProtocolConfig(batch_size=2, seg_len=8, max_segments=1)
    places = np.asarray(target_indices(c, TOKENS[:40]))
    assert places.tolist() == [*range(1, 9), *range(21, 29)]
    assert target_indices(dataclasses.replace(c, max_segments=0), TOKENS[:40]) is None
    text = Pieces(TOKENS[2:15], np.array([0, 5, 9]), True, "sentences")
    c = ProtocolConfig(batch_size=3, seg_len=2, max_segments=1)
    assert np.asarray(target_indices(c, text)).tolist() == [1, 2, 6, 7, 10, 11]


def test_a_limit_that_leaves_nothing_out_is_no_limit():
    c = ProtocolConfig(batch_size=2, seg_len=8, max_segments=3)
    assert drop_unused_limit(c, TOKENS[:40]) == dataclasses.replace(c, max_segments=0)
    c = dataclasses.replace(c, max_segments=2)
    assert drop_unused_limit(c, TOKENS[:40]) == c


def test_baselines_are_scored_on_the_targets_of_the_model_and_their_protocol_is_written(tmp_path):
    corpus, exp = tiny_runs.corpus_and_experiment(
        tmp_path, **{"evaluate.max_segments": 2, "evaluate.baselines": "unigram,bigram,xz"}
    )
    params = tiny_models.variables(exp.model)["params"]
    trained = TrainedModel(TransformerXL(exp.model), params, corpus.vocab, exp, 0)
    result = split_scores.score_split(trained, corpus)
    assert result is not None
    rows = result.record["results"]
    assert [row["targets"] for row in rows] == [4 * 2 * 16] * 6
    part = "test split, 4 streams, segment 16, first 2 segments only"
    assert [row["protocol"] for row in rows[2:]] == [
        f"{part}, counted on the train split",
        f"{part}, counted on the train split",
        f"{part}, compressed alone",
        f"{part}, compressed after the train split",
    ]
    counts = 1 + np.bincount(corpus.train, minlength=len(corpus.vocab))
    length = -(-(len(corpus.test) - 1) // 4)  # targets of a stream
    targets = np.concatenate([corpus.test[n * length + 1 :][:32] for n in range(4)])
    want = -np.log(counts[targets] / counts.sum()).mean()
    assert rows[2]["loss"] == pytest.approx(want, rel=1e-12)


def test_the_protocols_clamp_and_window_hold_over_the_models():
    windowed = dataclasses.replace(CFG, same_length="tf", clamp_len=4)
    c = ProtocolConfig(batch_size=3, seg_len=8, mem_len=12, same_length="tf", clamp_len=4)
    own = dataclasses.replace(c, same_length=None, clamp_len=None)
    a = Evaluator(CFG, c, TOKENS, mesh()).run(tiny_models.variables(CFG)["params"])
    b = Evaluator(windowed, own, TOKENS, mesh()).run(tiny_models.variables(CFG)["params"])
    plain = Evaluator(CFG, own, TOKENS, mesh()).run(tiny_models.variables(CFG)["params"])
    assert a is not None
    assert b is not None
    assert plain is not None
    assert a.loss == b.loss != plain.loss


@pytest.mark.integration
@pytest.mark.parametrize("form", [{}, {"cutoffs": (5,)}], ids=["plain", "adaptive"])
def test_temperature_raises_probabilities_to_its_inverse_and_normalises_them(form):
    """The expected loss is computed from probabilities at temperature 1. Memory holds the text."""
    cfg = tiny_models.config(**form)
    mems = TransformerXL(cfg).init_mems(1, 0)
    logits, _ = TransformerXL(cfg).apply(tiny_models.variables(cfg), TOKENS[None, :-1], mems)
    p = np.exp(np.asarray(logits[0], np.float64))
    p = (p / p.sum(axis=-1, keepdims=True)) ** (1 / 1.25)
    p /= p.sum(axis=-1, keepdims=True)
    want = -np.log(p[np.arange(100), TOKENS[1:]]).mean()
    protocol = {"batch_size": 1, "seg_len": 20, "mem_len": 100, "cfg": cfg}
    assert score(**protocol, temperature=1.25).loss == pytest.approx(want, abs=1e-5)
    assert score(**protocol).loss != pytest.approx(want, abs=1e-3)
    assert score(**protocol, temperature=1 + 1e-7).loss == pytest.approx(
        score(**protocol).loss, abs=1e-5
    )


def test_the_protocol_names_a_temperature_that_is_not_1():
    assert "temperature" not in describe(ProtocolConfig(), CFG)
    assert "temperature 1.08" in describe(ProtocolConfig(temperature=1.08), CFG)


def test_stopping_gives_no_score():
    c = ProtocolConfig(batch_size=3, seg_len=8, mem_len=12)
    assert (
        Evaluator(CFG, c, TOKENS, mesh()).run(
            tiny_models.variables(CFG)["params"], stop=lambda: True
        )
        is None
    )


@pytest.mark.integration
def test_losses_are_converted_to_bytes_and_words_where_all_of_the_text_was_scored():
    """10 characters in 14 bytes, 2 words and a line end; the first character has 2 bytes."""
    text = "écrit oé€\n"
    vocab = Vocab.from_chars([text])
    info = {"tokens": 10, "bytes": len(text.encode()), "words": 2, "lines": 1}

    def of(vocab, **counts) -> Any:
        told = {key: {"test": n} for key, n in {**info, **counts}.items()}
        return types.SimpleNamespace(vocab=vocab, test=vocab.encode(text), info=told)

    whole, nats = ProtocolConfig(), 20.0
    assert conversions(nats, of(vocab), whole) == {
        "bits_per_byte": pytest.approx(20 / math.log(2) / 12),
        "word_ppl": pytest.approx(math.exp(20 / 3)),
    }
    assert len(text.encode()) == 14
    every = of(Vocab.all_bytes(), tokens=14)
    assert conversions(nats, every, whole)["bits_per_byte"] == pytest.approx(20 / math.log(2) / 13)
    no_newline = of(Vocab.all_bytes(), tokens=13)
    assert conversions(nats, no_newline, whole) == {}
    assert conversions(nats, of(Vocab.from_words([text])), whole) == {}
    assert conversions(nats, of(vocab), ProtocolConfig(max_segments=1)) == {}
