"""Output files are checked before the work; results that cannot be written are printed."""

import dataclasses
import io
import json
import os
import types

import numpy as np
import pytest
import tiny_runs

from txl_jax import modes, usage
from txl_jax.analysis import context, probe, results, speed
from txl_jax.analysis import report_page as page
from txl_jax.analysis.recl import Losses
from txl_jax.checkpoint import workdir_files
from txl_jax.checkpoint.errors import ModelFormatError, WorkdirError
from txl_jax.checkpoint.saving import export
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir_files import CONFIG
from txl_jax.config import ANALYSES, ConfigError, DataConfig, ExperimentConfig, override
from txl_jax.data.sources.probe import alphabet
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation import split as split_scores
from txl_jax.evaluation.evaluator import Score
from txl_jax.model.transformer_xl import TransformerXL


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model without parameters, so that any computation with it fails; and its corpus."""
    changes = {"context.lengths": "2,4", "context.max_tokens": "50"}
    corpus, exp = tiny_runs.corpus_and_experiment(tmp_path_factory.mktemp("text"), **changes)
    return TrainedModel(TransformerXL(exp.model), None, corpus.vocab, exp, 7), corpus


def asked_by(mode, trained):
    """Returns the model as a mode accepts it; ``probe`` needs a model of the probe's text."""
    if mode != "probe":
        return trained
    exp = override(trained.config, {"data.name": "probe", "data.path": None, "data.vocab": None})
    vocab = Vocab("char", sorted(alphabet(exp.data.probe)))
    return dataclasses.replace(trained, vocab=vocab, config=exp)


WRITING = sorted(mode for mode, row in ANALYSES.items() if row.reads == "model")
"""Analyses of one model, which write their files in its workdir."""


@pytest.mark.parametrize("mode", ["evaluate", "generate", *WRITING])
def test_a_mode_that_cannot_write_its_files_is_refused_before_its_work(
    mode, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(modes, "load", lambda *_: asked_by(mode, tiny[0]))
    run = lambda folder: modes.use_model(mode, None, {}, str(folder), "best")
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError, match=r"cannot be written \(Not a directory\)"):
        run(tmp_path / "file" / "run")
    for name in workdir_files.MODE_FILES[mode]:
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(WorkdirError, match=rf"/{name}: is a folder"):
            run(tmp_path / name)


@pytest.mark.parametrize(
    "mode", sorted(mode for mode, row in ANALYSES.items() if row.reads == "runs")
)
def test_a_comparison_that_cannot_write_its_files_is_refused_before_its_work(mode, tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(ExperimentConfig().to_dict()))
    losses = Losses("a", (100, 200), np.ones((2, 3), np.float32))
    losses.save(tmp_path / "a.npz")
    exp = override(ExperimentConfig(), {"recl.models": f"a={tmp_path / 'a.npz'}"})
    last = workdir_files.MODE_FILES[mode][-1]
    (tmp_path / last).mkdir()
    with pytest.raises(WorkdirError, match=f"{last}: is a folder"):
        modes.module_of(mode).run(exp, str(tmp_path))


def test_every_mode_has_its_files_named():
    others = {"train", "score", "interactive", "compile", "settings", "export"}
    assert workdir_files.MODE_FILES.keys() == set(usage.MODES) - others
    assert {name for names in workdir_files.MODE_FILES.values() for name in names} <= {
        *workdir_files.FILES
    }


def test_the_row_of_an_analysis_names_its_module_and_files_that_begin_with_its_mode():
    for mode, row in ANALYSES.items():
        assert callable(modes.module_of(mode).run)
        assert all(name.startswith(mode) for name in row.files)


@pytest.mark.parametrize("mode", ["train", "generate"])
def test_a_file_of_samples_that_cannot_be_written_is_refused_before_the_work(
    mode, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(modes, "load", lambda *_: tiny[0])
    monkeypatch.setattr("txl_jax.training.run.train", None)
    path = str(tmp_path / "none" / "samples.jsonl")
    flags = {"generate.json": path}
    calls = {
        "train": lambda: modes.train(override(tiny[0].config, flags), str(tmp_path / "run")),
        "generate": lambda: modes.use_model(mode, None, flags, str(tmp_path), "best"),
    }
    told = r"generate.json = .*No such file.*; name a file in a folder that exists"
    with pytest.raises(ConfigError, match=told):
        calls[mode]()


def test_checking_a_file_changes_nothing(tmp_path):
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("kept")
    for path in (None, "-", str(there), str(new), os.devnull):
        workdir_files.check_file("score.json", path, DataConfig())
    assert there.read_text() == "kept"
    assert not new.exists()
    with pytest.raises(ConfigError, match=r"score.json = .*cannot be written \(Is a directory\)"):
        workdir_files.check_file("score.json", str(tmp_path), DataConfig())


def test_an_export_that_cannot_be_written_is_refused_before_the_model_is_read(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFormatError, match=r"file/out: .*/file cannot be written; name"):
        export(str(tmp_path / "no_workdir"), str(tmp_path / "file" / "out"))


def full(*_, **__):
    raise OSError(28, "cannot write: No space left on device", "a file")


def evaluator_of_half_a_nat(model, protocol, corpus, mesh):
    """Returns an evaluator that computes nothing: its loss is always half a nat per target."""
    run = lambda *_: Score(0.5, 99, 0.1)
    return types.SimpleNamespace(run=run, model=types.SimpleNamespace(mesh=mesh))


def test_an_evaluation_is_printed_where_it_cannot_be_written(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(split_scores, "split_evaluator", evaluator_of_half_a_nat)
    monkeypatch.setattr(split_scores, "write_json", full)
    trained, corpus = tiny
    with pytest.raises(OSError, match="No space left"):
        tiny_runs.evaluate(trained, corpus, tmp_path)
    assert "memory 32     0.7213 bpc" in capsys.readouterr().out


def test_a_text_that_is_read_in_lower_case_is_evaluated_with_a_note(
    tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(split_scores, "split_evaluator", evaluator_of_half_a_nat)
    trained, corpus = tiny
    foreign = dataclasses.replace(corpus, info={**corpus.info, "foreign_vocab": True})
    split_scores.score_split(trained, foreign)
    assert "note" not in capsys.readouterr().err
    words = Vocab("word", ["<eos>", "<unk>", *map(str, range(30))])
    foreign = dataclasses.replace(foreign, vocab=words)
    split_scores.score_split(trained, foreign)
    assert capsys.readouterr().err == (
        "note: the model's vocabulary has no capital letters: the text is read in lower case\n"
    )


def test_an_analysis_is_printed_where_it_cannot_be_written(tiny, tmp_path, monkeypatch, capsys):
    measured = lambda trained, corpus, c, name, progress: Losses(
        name, c.lengths, np.full((2, 5), 0.5, np.float32)
    )
    row = {"length": 8, "windows_over_memory": {"median": 321.0}}
    monkeypatch.setattr(context, "measure", measured)
    monkeypatch.setattr(speed, "measure_rows", lambda *_: [row])
    monkeypatch.setattr(speed, "format_row", lambda row: "a row")
    for module, words in ((context, "effective context 2"), (speed, "8: 321 times quicker")):
        monkeypatch.setattr(results, "write_json", full)
        monkeypatch.setattr(results, "write_arrays", full)
        with pytest.raises(OSError, match="No space left"):
            module.run(tiny[0], str(tmp_path))
        assert words in capsys.readouterr().out


def test_a_probe_is_printed_where_it_cannot_be_written(tiny, tmp_path, monkeypatch, capsys):
    trained = asked_by("probe", tiny[0])
    reach = {"mem_len": 16, "reach": 48, "measured": 40}
    scored = lambda trained, model, mem_len, d: {
        "mem_len": mem_len, "distance": d, "accuracy": 1.0, "loss_nats": 0.0, "answers": 5,
    }  # fmt: skip
    monkeypatch.setattr(probe, "score_distance", scored)
    monkeypatch.setattr(probe, "measured_reach", lambda *_: reach["measured"])
    monkeypatch.setattr(probe, "describe_model", lambda _: "a model")
    monkeypatch.setattr(results, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        probe.run(trained, str(tmp_path))
    assert "answers found 9 times in 10, memory 0: to 256 tokens" in capsys.readouterr().out


def test_characters_that_standard_output_lacks_end_no_mode(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    monkeypatch.setattr(page, "run", lambda exp, workdir: "caf\u00e9 \udcff")
    modes.set_up_output()
    assert modes.compare("report", ExperimentConfig(), {}, "unused") == 0
    assert raw.getvalue() == b"caf\\xe9 \\udcff\n"
