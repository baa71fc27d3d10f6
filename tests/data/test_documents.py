"""Memory is reset where a document begins, and no token is predicted from another document."""

import dataclasses
import itertools
import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from run_records import StopAt, assert_same_run
from tiny_runs import corpus_and_experiment, run_in_workdir, train

import txl_jax
from txl_jax.checkpoint.trained_model import TrainedModel, with_settings
from txl_jax.config import ConfigError, GenerateConfig, ProtocolConfig
from txl_jax.data.corpus import load_corpus
from txl_jax.data.errors import DataError
from txl_jax.data.feed import training_batch
from txl_jax.data.on_device import device_text, training_position
from txl_jax.data.pieces import (
    Pieces,
    _note_running_text,
    check_starts,
    ended_at,
    running_text,
    separated,
    separator_ends,
    split_edges,
)
from txl_jax.data.sources.tokens import read_documents
from txl_jax.data.streams import ordered_streams, shuffled_streams
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation import any_text
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.evaluation.protocols import target_indices
from txl_jax.evaluation.split import score_split
from txl_jax.generation.write import write_continuations
from txl_jax.library import language_model
from txl_jax.parallel.mesh import make_mesh
from txl_jax.training.loss import batch_loss, denominators
from txl_jax.training.preemption import PreemptionGuard

SIZES = (23, 2, 40, 7, 31, 2, 9)
V = 13


def documents(shared=False, sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, V, sum(sizes)).astype(np.uint16)
    starts = np.cumsum([0, *sizes[:-1]])
    if shared:
        tokens[starts] = 0
    return Pieces(tokens, starts, shared)


# --------------------------------------------------------------------------------------
# Layout.


def test_a_document_has_the_separator_that_it_shares_with_the_next():
    found = separated(np.array([0, 5, 6, 0, 2, 3, 0, 4, 0]), 0, "x")
    assert [d.tolist() for d in found] == [[0, 5, 6, 0], [0, 2, 3, 0], [0, 4, 0]]
    assert (len(found), found.n_targets) == (3, 8)
    found = separated(np.array([7, 7, 0, 0, 3]), 0, "x")  # no separator at the beginning or the end
    assert [d.tolist() for d in found] == [[7, 7, 0], [0, 0], [0, 3]]
    assert found[-1].tolist() == [0, 3]
    with pytest.raises(IndexError):
        found[3]
    with pytest.raises(DataError, match="x: the separator 9 does not occur"):
        separated(np.array([1, 2]), 9, "x")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("b", "t"), [(1, 5), (3, 4), (20, 8), (2, 200)])
def test_each_target_of_each_document_is_scored_once(shared, b, t):
    split = documents(shared)
    where = Pieces(np.arange(len(split.ids)), split.starts, shared)
    expected = [i for d in where for i in d[1:].tolist()]
    found, resets = [], []
    for segment in txl_jax.segments(where, b, t):
        real = segment.weights > 0
        found += segment.targets[real].tolist()
        np.testing.assert_array_equal(segment.inputs[real] + 1, segment.targets[real])
        resets += segment.inputs[np.asarray(segment.resets)].tolist()
    assert sorted(found) == expected
    assert sorted(resets) == split.starts.tolist()
    assert ordered_streams(split, b, t).n_targets == split.n_targets == len(expected)
    protocol = ProtocolConfig(batch_size=b, seg_len=t)
    indices = target_indices(protocol, split)
    assert shared if indices is None else indices.tolist() == expected


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("options", [{}, {"context_len": 3}, {"partial_shuffle": True}])
def test_training_streams_reset_where_a_document_or_a_stream_begins(shared, options):
    split = documents(shared)
    where = Pieces(np.arange(len(split.ids)), split.starts, shared)
    streams = shuffled_streams(where, 3, 5, seed=1, seg_len_std=0, **options)
    stride = len(split.ids) // 3
    begins = {*split.starts.tolist(), 0, stride, 2 * stride}
    count = 0
    for index in range(streams.n_segments):
        segment = streams.at_step(index)
        own, real = segment.inputs[:, -5:], segment.weights > 0
        resets = np.asarray(segment.resets)[:, -5:]
        filled = np.arange(5) < (np.asarray(segment.lengths) - streams.context_len)[:, None]
        np.testing.assert_array_equal(resets, np.isin(own, [*begins]) & filled)
        if not shared:
            assert not np.isin(segment.targets[real], [*begins]).any()
        count += int(real.sum())
    if "partial_shuffle" not in options:
        assert count == streams.n_targets


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"context_len": 3}, {"seg_len_std": 1.0}, {"context_len": 3, "partial_shuffle": True}],
)
def test_a_text_on_the_device_gives_the_same_batches(shared, options):
    streams = shuffled_streams(documents(shared), 3, 10, seed=1, **options)
    text = device_text(streams)
    for step in range(8):
        expected = training_batch(streams, step, "reset", 4)
        found = jax.jit(text.batch)(training_position(streams, step, "reset", 4))
        for field in dataclasses.fields(expected):
            pair = getattr(expected, field.name), getattr(found, field.name)
            assert field.name == "soft" or np.array_equal(*pair), field.name


# --------------------------------------------------------------------------------------
# Documents read one after another have the same loss as documents read alone.


def model_and_params(**changes):
    cfg = txl_jax.TransformerXLConfig(
        vocab_size=V, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16, init_std=0.5, **changes
    )
    model = txl_jax.TransformerXL(cfg)
    mems = model.init_mems(1, 4)
    return model, model.init(jax.random.key(0), np.zeros((1, 3), int), mems)["params"]


def loss_alone(model, params, split, m, t):
    """Returns the summed loss of all targets if each document is read by itself.

    A document begins with an empty memory of ``m`` states, and is read in segments of ``t`` tokens.
    This is slow, but obviously right.
    """
    total = 0.0
    nll = jax.jit(
        lambda x, y, mems, n: model.apply({"params": params}, x, y, mems, lengths=n, method="nll")
    )
    for document in split:
        mems, ids = model.init_mems(1, m), np.asarray(document, np.int32)
        for i in range(0, len(ids) - 1, t):
            x, y = ids[i : i + t][: len(ids) - 1 - i], ids[i + 1 : i + t + 1]
            pad = lambda z: np.pad(z, (0, t - len(z)))[None]
            losses, mems = nll(pad(x), pad(y), mems, np.array([len(y)]))
            total += float(losses[0, : len(y)].sum())
    return total


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])  # if False, memory caches keys and values
@pytest.mark.parametrize("b", [1, 3])
def test_evaluation_gives_the_loss_of_each_document_alone(shared, dynamic, b):
    model, params = model_and_params(same_length="tf")
    split, t, m = documents(shared), 5, 15
    changes: Any = {"rule": "sgd", "learning_rate": 1e-30} if dynamic else {}
    protocol = ProtocolConfig(
        batch_size=b, seg_len=t, mem_len=m, dynamic=txl_jax.config.DynamicConfig(**changes)
    )
    mesh = make_mesh(txl_jax.ExperimentConfig().mesh, model.cfg, b)
    result = Evaluator(model.cfg, protocol, split, mesh).run(params)
    assert result is not None
    expected = loss_alone(model, params, split, m, t)
    np.testing.assert_allclose(result.loss, expected / split.n_targets, rtol=1e-5)
    assert result.targets == split.n_targets


@pytest.mark.parametrize("shared", [False, True])
def test_the_training_forward_pass_gives_the_loss_of_each_document_alone(shared):
    model, params = model_and_params(same_length="tf")
    split, t, m = documents(shared), 5, 15
    streams = shuffled_streams(split, 1, t, seed=0)
    total, mems = 0.0, model.init_mems(1, m)
    loss = jax.jit(
        lambda batch, mems: batch_loss(
            params,
            model,
            batch,
            mems,
            jax.random.key(0),
            txl_jax.config.LossConfig(),
            denominators(batch.weights),
            padded=True,
        )[1]
    )
    for step in range(streams.n_segments):
        nll_sum, mems = loss(training_batch(streams, step, "reset"), mems)
        total += float(nll_sum)
    np.testing.assert_allclose(total, loss_alone(model, params, split, m, t), rtol=1e-5)


def test_context_that_is_read_again_ends_where_a_document_begins():
    model, params = model_and_params()
    split = documents()
    protocol = ProtocolConfig(batch_size=2, seg_len=4, mem_len=0, context_len=44)
    mesh = make_mesh(txl_jax.ExperimentConfig().mesh, model.cfg, 2)
    result = Evaluator(model.cfg, protocol, split, mesh).run(params)
    assert result is not None
    expected = loss_alone(model, params, split, m=0, t=64)  # each document in one segment
    np.testing.assert_allclose(result.loss, expected / split.n_targets, rtol=1e-5)


def test_the_protocol_of_documents_names_no_start_that_has_no_effect(tmp_path):
    path, _ = save_documents(tmp_path)
    trained, sizes = tiny_trained(path=str(path)), {"batch_size": 2, "seg_len": 5, "mem_len": 5}
    starts: Any = ({}, {"warm_start": 9}, {"first_memory": "zeros"})
    results = [trained.evaluate("train", **sizes, **start) for start in starts]
    assert len({(result.value, result.protocol) for result in results}) == 1


def test_an_analysis_says_once_that_it_reads_documents_as_one_text(capsys):
    split = documents()
    _note_running_text.cache_clear()
    for _ in range(2):
        assert running_text(split) is split.ids
    note = "note: this analysis reads documents as one text, and memory is not reset between them"
    assert capsys.readouterr().err == f"{note}\n"
    assert running_text(split.ids) is split.ids


# --------------------------------------------------------------------------------------
# Where documents come from.


def save(path, array):
    np.save(path, array)
    return path


def save_documents(folder, sizes=SIZES):
    split = documents(sizes=sizes)
    save(folder / "ids.starts.npy", split.starts)
    return save(folder / "ids.npy", split.ids), split


def listed(corpus):
    return [[d.tolist() for d in getattr(corpus, s)] for s in ("train", "valid", "test")]


def test_starts_beside_an_array_give_documents_and_splits_of_whole_ones(tmp_path):
    path, split = save_documents(tmp_path)
    corpus = load_corpus("tokens", path, valid_fraction=0.3, test_fraction=0.1)
    parts = listed(corpus)
    assert [*itertools.chain(*parts)] == [d.tolist() for d in split]
    assert [len(part) for part in parts] == [3, 2, 2]
    assert corpus.info["documents"] == {"train": 3, "valid": 2, "test": 2}
    assert isinstance(corpus.train.ids, np.memmap)
    crossing = load_corpus("tokens", path, cross_documents=True).train
    assert crossing.shared
    assert crossing.n_targets == len(crossing.ids) - 1
    before = corpus.source_hash
    save(tmp_path / "ids.starts.npy", np.delete(split.starts, 1))
    assert load_corpus("tokens", path).source_hash != before


@pytest.mark.parametrize("kind", ["byte", "char", "word"])
def test_each_line_of_a_text_may_be_a_document(tmp_path, kind):
    lines = [f"line {n}\n" for n in range(40)]
    (tmp_path / "x.txt").write_text("".join(lines))
    given = {"document_separator": "\n", "vocab": kind, "cache_dir": tmp_path / "c"}
    corpus = load_corpus("text", tmp_path / "x.txt", **given)
    splits = [getattr(corpus, split) for split in ("train", "valid", "test")]
    # Each document after the first also has the separator before it, as an input.
    found = [corpus.vocab.decode(d).removeprefix("\n") for split in splits for d in split]
    assert found == lines


def test_a_separator_gives_documents(tmp_path):
    split = documents(shared=True)
    path = save(tmp_path / "ids.npy", split.ids)
    parts = listed(load_corpus("tokens", path, document_separator="0"))
    assert [*itertools.chain(*parts)] == [d.tolist() for d in split]
    (tmp_path / "symbols.json").write_text(json.dumps(["<end>", *map(str, range(1, V))]))
    assert listed(load_corpus("tokens", path, document_separator="<end>")) == parts


def test_each_file_of_a_folder_is_a_document(tmp_path):
    split = documents()
    (tmp_path / "songs").mkdir()
    for n, document in enumerate(split):
        save(tmp_path / "songs" / f"{n}.npy", document.astype("int64"))
    cache = tmp_path / "cache"
    corpus = load_corpus("tokens", tmp_path / "songs", cache_dir=cache)
    assert [*itertools.chain(*listed(corpus))] == [d.tolist() for d in split]
    assert corpus.train.ids.dtype == np.uint16
    save(tmp_path / "songs" / "0.npy", np.array([1]))
    with pytest.raises(DataError, match=r"0.npy: has one token; a document needs at least 2"):
        load_corpus("tokens", tmp_path / "songs", cache_dir=cache)


@pytest.mark.parametrize(
    ("starts", "fault"),
    [
        ([0, 5, 3], "document 1 begins at 5 before start 3; it needs at least 2 tokens"),
        ([0, 3, 3], "document 1 begins at 3 before start 3; it needs"),
        ([1, 5], "the first start of a document must be 0"),
        ([0, 4, 5], "document 1 begins at 4 before start 5; it needs"),
        ([0, 11], "document 1 begins at 11 of 12 tokens; it needs"),
        ([0, 12], "document 1 begins at 12 of 12 tokens; it needs"),
        ([0.0, 5.0], "type float64: must be 1-D integers"),
        ([[0, 5]], "must be 1-D integers"),
        ([], "the first start of a document must be 0"),
    ],
)
def test_unusable_starts_are_refused(starts, fault):
    with pytest.raises(DataError, match=f"^x: .*{fault}"):
        check_starts(np.array(starts), 12, "x")


def test_what_contradicts_documents_is_refused(tmp_path):
    path, _ = save_documents(tmp_path, (5, 5))
    given: Any = (
        ({"document_separator": "0"}, "ids.starts.npy gives the starts of documents too"),
        ({}, "has 2 documents for 3 splits"),
    )
    for settings, fault in given:
        with pytest.raises(DataError, match=fault):
            load_corpus("tokens", path, **settings)
    with pytest.raises(DataError, match="'x': is no id and no symbol"):
        load_corpus("tokens", save(tmp_path / "y.npy", np.arange(90)), document_separator="x")
    refused: tuple[Any, ...] = (
        {"name": "ptb", "cross_documents": True},
        {"name": "tokens", "document_files": True},
    )
    for settings in refused:
        with pytest.raises(ConfigError, match=r"data\."):
            txl_jax.ExperimentConfig.from_dict({"data": settings})


def test_splits_have_the_documents_nearest_to_the_fractions():
    assert split_edges(np.array([0, 10, 80, 95]), 100, 0.1, 0.1, "x") == [0, 2, 3, 4]
    assert split_edges(np.array([0, 98, 99]), 100, 0.05, 0.05, "x") == [0, 1, 2, 3]


@pytest.mark.parametrize("vocab", ["byte", "char", "word"])
def test_a_separator_of_a_text_gives_documents(tmp_path, vocab):
    texts = [f"song {n} has{' la' * n} .\n<end>\n" for n in range(40)]
    (tmp_path / "x.txt").write_text("".join(texts))
    corpus = load_corpus(
        "text",
        tmp_path / "x.txt",
        vocab=vocab,
        document_separator="<end>\n",
        cache_dir=tmp_path / "c",
    )
    found = []
    for split in ("train", "valid", "test"):
        part = getattr(corpus, split)
        assert part.shared
        whole = [corpus.vocab.decode(d) for d in part]
        assert all(text.startswith("\n") for text in whole[1:])
        found += [text.removeprefix("\n") if n else text for n, text in enumerate(whole)]
    assert found == texts
    with pytest.raises(
        DataError, match=r"the valid split is empty; give .* documents \(check separators\)"
    ):
        load_corpus(
            "text", tmp_path / "x.txt", document_separator="<stop>", cache_dir=tmp_path / "c"
        )


def test_a_separator_that_is_no_word_of_the_text_is_refused(tmp_path):
    given = {"vocab": "word", "cache_dir": tmp_path / "c"}
    fault = r"data.document_separator = '<end>': has a word that is not in the vocabulary"
    for unknown in ("<unk>", "d"):
        text = "a b <unk> c.<end>\nb a c <unk>.<end>\n" * 60
        (tmp_path / "x.txt").write_text(text.replace("<unk>", unknown))
        with pytest.raises(DataError, match=f"^{fault}; write it between spaces"):
            load_corpus("text", tmp_path / "x.txt", document_separator="<end>", **given)
    (tmp_path / "x.txt").write_text("my friends sat here to the end\n" * 60)
    fault = "document 0: ends with 'friend', and the separator is 'end'; write the separator"
    with pytest.raises(DataError, match=fault):
        load_corpus("text", tmp_path / "x.txt", document_separator="end", **given)
    (tmp_path / "x.txt").write_text("a b end c endless d end\n" * 60)
    fault = "document 2: begins with 'less' right after the separator 'end'; write the separator"
    with pytest.raises(DataError, match=fault):
        load_corpus("text", tmp_path / "x.txt", document_separator="end", **given)
    (tmp_path / "x.txt").write_text("a <unk> b\n" * 60)
    assert load_corpus("text", tmp_path / "x.txt", document_separator="<unk>", **given).train.shared


def test_two_separators_share_no_token(tmp_path):
    (tmp_path / "x.txt").write_text("ab\n\n\ncd\n\n\n\nef\n\n" * 40)
    given = {"document_separator": "\n\n", "cache_dir": tmp_path / "c"}
    corpus = load_corpus("text", tmp_path / "x.txt", **given)
    ids = np.asarray(corpus.train.ids)
    found = ended_at(ids, separator_ends(ids, corpus.vocab.encode("\n\n")))
    assert found.starts.tolist() == corpus.train.starts.tolist()
    # Before a scored text, the model reads the last token of a separator, 0. This 0 and the 0 that
    # begins the text do not count as a further separator.
    model, params = model_and_params()
    line, mark = np.array([0, 5, 6, 0, 0, 0, 7]), np.array([0, 0])
    c = txl_jax.config.ScoreConfig(mem_len=8, seg_len=8)
    (nll,) = any_text.score_lines(model.cfg, params, [line], mark[-1:], c, mark)
    alone = [np.array([0, 0, 5, 6, 0, 0]), np.array([0, 0, 7])]
    expected = any_text.score_texts(model.cfg, params, alone, c)
    np.testing.assert_allclose(nll, np.concatenate(expected), rtol=1e-5)


def test_the_files_of_a_folder_of_texts_are_documents_if_asked(tmp_path):
    folder = tmp_path / "songs"
    folder.mkdir()
    texts = [f"song {n} " + "la " * n + "\n" * (n % 2) for n in range(30)]
    for n, text in enumerate(texts):
        (folder / f"{n:02}.txt").write_text(text)
    corpus = load_corpus("text", folder, document_files=True, cache_dir=tmp_path / "c")
    parts = [getattr(corpus, s) for s in ("train", "valid", "test")]
    whole = [text if text.endswith("\n") else text + "\n" for text in texts]
    assert [corpus.vocab.decode(d) for part in parts for d in part] == whole
    assert not parts[0].shared
    archive = shutil.make_archive(str(folder), "zip", folder)
    zipped = load_corpus("text", archive, document_files=True, cache_dir=tmp_path / "c")
    np.testing.assert_array_equal(zipped.train.starts, parts[0].starts)
    plain = load_corpus("text", folder, cache_dir=tmp_path / "c")
    assert isinstance(plain.train, np.ndarray)


def test_empty_files_are_no_documents(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("")
    with pytest.raises(DataError, match="has 0 documents for 3 splits; give more documents"):
        load_corpus("text", tmp_path, document_files=True, cache_dir=tmp_path / "c")


# --------------------------------------------------------------------------------------
# Runs.


@pytest.mark.slow
def test_a_run_on_documents_resumes_with_the_same_bits_and_reports_each_document(tmp_path):
    sizes = tuple(np.random.default_rng(0).integers(2, 60, 60).tolist())
    path, _ = save_documents(tmp_path, sizes)
    changes = {"data.name": "tokens", "data.vocab": None, "data.path": str(path)}
    changes |= {"generate.prompt": "1 2"}
    run_in_workdir(tmp_path, tmp_path / "whole", **changes)
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    for stop in (3, 8):
        assert not train(exp, corpus, str(tmp_path / "cut"), StopAt(stop)).finished
    assert train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard()).finished
    assert_same_run(tmp_path, tmp_path / "whole", tmp_path / "cut", **changes)
    trained = txl_jax.load(tmp_path / "whole")
    result = score_split(trained, corpus)
    assert result is not None
    assert result.documents == len(corpus.test)
    assert result.document_loss is not None
    whole = result.loss * result.targets
    np.testing.assert_allclose(result.document_loss * result.documents, whole)
    assert "memory reset at each document" in result.protocol


def tiny_trained(**data):
    """Returns a language model of token ids with random parameters and the settings ``data``."""
    model, params = model_and_params()
    exp = txl_jax.ExperimentConfig.from_dict({"data": {"name": "tokens", **data}})
    exp = dataclasses.replace(exp, model=model.cfg)
    vocab = Vocab.from_ids(V)
    return language_model(TrainedModel(model, params, vocab, exp, step=0))


def test_scoring_empties_memory_at_each_separator():
    split, trained = documents(shared=True), tiny_trained(document_separator="0")
    settings = {"mem_len": 15, "seg_len": 5}
    ids = np.asarray(split.ids, np.int64)
    whole = trained.score(ids[1:], **settings)  # score() adds a separator before the text
    alone = [trained.score(np.asarray(d[1:]), **settings).lines[0].nll for d in split]
    np.testing.assert_allclose(whole.lines[0].nll, np.concatenate(alone), rtol=1e-5)
    running = tiny_trained().score(ids[1:], **settings).lines[0].nll
    assert np.abs(running - whole.lines[0].nll).max() > 1e-3  # without resets, losses differ


def test_generation_ends_at_a_separator_and_forgets_what_is_before_one():
    trained = tiny_trained(document_separator="0")
    made = trained.generate("5 6 7", length=40, mem_len=8, samples=20)
    ended = [one for one in made if one.ended == "separator"]
    assert ended
    for one in ended:
        assert one.ids[-1] == 0
        assert 0 not in one.ids[:-1]
        assert one.text.split() == [str(i) for i in one.ids[:-1]]
    same = [trained.generate(p, length=9, mem_len=8, temperature=0)[0] for p in ("3 9 0 4", "0 4")]
    assert same[0].continuation == same[1].continuation
    np.testing.assert_array_equal(same[0].nll, same[1].nll)
    assert trained.generate("", length=1, mem_len=8)[0].ids[0] == 0


def test_a_separator_is_a_symbol_of_the_model_whatever_is_beside_the_array(tmp_path, capsys):
    split, symbols = documents(shared=True), ["end of song", *map(str, range(1, V))]
    for name in ("own", "bare", "other"):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "ids.npy", split.ids)
    (tmp_path / "own" / "symbols.json").write_text(json.dumps(symbols))
    (tmp_path / "other" / "symbols.json").write_text(json.dumps(symbols[::-1]))
    data = {"document_separator": "end of song", "path": str(tmp_path / "own" / "ids.npy")}
    trained = dataclasses.replace(tiny_trained(**data), vocab=Vocab.from_ids(V, symbols))
    assert trained.generate("", length=1, mem_len=8)[0].ids[0] == 0
    own, bare = (
        trained.evaluate("train", {"path": tmp_path / name}, batch_size=1, seg_len=5, mem_len=5)
        for name in ("own", "bare")
    )
    assert (own.value, own.documents) == (bare.value, bare.documents)
    settings = {"score.path": str(tmp_path / "bare" / "ids.npy"), "score.seg_len": 5}
    any_text.run(with_settings(trained, txl_jax.config.override(trained.config, settings)), "x")
    assert len(capsys.readouterr().out.splitlines()) == len(split)
    fault = r"symbols.json: id 0 is '12' here and 'end of song' in the model's vocabulary"
    with pytest.raises(DataError, match=fault):
        trained.evaluate("train", {"path": tmp_path / "other"})
    fault = "'end of song': is no id and no symbol of the model"
    with pytest.raises(DataError, match=fault):
        dataclasses.replace(trained, vocab=Vocab.from_ids(V)).evaluate("train")


def test_arrays_are_scored_document_by_document(tmp_path, capsys):
    path, split = save_documents(tmp_path)
    settings = {"score.path": str(path), "score.mem_len": 15, "score.seg_len": 5}
    trained = tiny_trained()
    trained = with_settings(trained, txl_jax.config.override(trained.config, settings))
    any_text.run(trained, str(tmp_path))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["tokens"] for row in rows] == [len(d) - 1 for d in split]
    model, params = model_and_params(same_length="pytorch")  # scoring uses this attention window
    alone = loss_alone(model, params, split, m=15, t=5)
    np.testing.assert_allclose(sum(row["nll"] for row in rows), alone, rtol=1e-5)
    (tmp_path / "ids.starts.npy").unlink()
    any_text.run(trained, str(tmp_path))
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["tokens"] == len(split.ids) - 1


def test_generated_ids_are_written_as_an_array_with_starts(tmp_path):
    settings: Any = {"prompt": "5 6", "length": 4, "mem_len": 8, "samples": 3}
    trained = tiny_trained()
    config = dataclasses.replace(trained.config, generate=GenerateConfig(**settings))
    write_continuations(dataclasses.replace(trained, config=config), str(tmp_path))
    data = dataclasses.replace(config.data, document_separator="0")  # unused: the file has starts
    found = read_documents(tmp_path / "sample.npy", data, V)
    expected = [one.ids.tolist() for one in trained.generate(**settings)]
    assert [ids.tolist() for ids in found] == expected
    assert (tmp_path / "sample.txt").read_text().startswith("[1.1] 5 6 ")


@pytest.mark.parametrize("key", ["prompt_file", "prompts_file"])
def test_prompts_may_be_an_array_of_ids(tmp_path, key, capsys):
    path = save(tmp_path / "prompts.npy", np.array([5, 6, 7, 2, 9]))
    save(tmp_path / "prompts.starts.npy", np.array([0, 3]))
    settings: Any = {"length": 4, "mem_len": 8}
    trained = tiny_trained()
    prompts = ["5 6 7", "2 9"] if key == "prompts_file" else ["5 6 7 2 9"]
    expected = [trained.generate(prompt, **settings)[0].ids.tolist() for prompt in prompts]
    found = trained.generate(**{key: str(path)}, **settings)
    assert [one.ids.tolist() for one in found] == expected
    settings[key] = str(path)
    config = dataclasses.replace(trained.config, generate=GenerateConfig(**settings))
    write_continuations(dataclasses.replace(trained, config=config), str(tmp_path))
    assert np.load(tmp_path / "sample.npy").tolist() == [*itertools.chain(*expected)]
    assert capsys.readouterr().out.endswith(" ".join(map(str, expected[-1])) + "\n")
    save(path, np.array([5, V]))
    with pytest.raises(DataError, match=r"starts.npy|ids\[1\] = 13: a token id must be from 0"):
        trained.generate(**{key: str(path)})


def test_an_array_of_prompts_that_cannot_be_used_is_refused_in_one_line(tmp_path):
    trained, path = tiny_trained(), tmp_path / "p.npy"
    with pytest.raises(DataError, match=r"p\.npy.*no such file"):
        trained.generate(prompt_file=str(path))
    save(path, np.array([[1, 2]]))
    with pytest.raises(DataError, match=r"p\.npy: has the shape") as caught:
        trained.generate(prompt_file=str(path))
    assert "\n" not in str(caught.value)


def test_unusable_files_of_starts_are_named_in_one_line(tmp_path):
    path, _ = save_documents(tmp_path)
    for starts in ([0, 9, 5], [0, 4, 5], [0.0, 5.0], [[0, 5]], [3, 9]):
        save(tmp_path / "ids.starts.npy", np.array(starts))
        with pytest.raises(DataError, match=r"ids.starts.npy: ") as caught:
            load_corpus("tokens", path)
        assert "\n" not in str(caught.value)
