"""Ablations: each row of a table is trained once and scored at all attention lengths."""

import csv
import json
import math
import shutil
import signal

import numpy as np
import pytest
import tiny_runs
from tiny_runs import TABLE
from tiny_runs import train as train_loop

from txl_jax import modes
from txl_jax.analysis import ablation, sweep
from txl_jax.analysis.results import AnalysisError
from txl_jax.checkpoint.errors import AnotherRunError
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.workdir import init_workdir, with_vocab
from txl_jax.checkpoint.workdir_files import check_writable
from txl_jax.config import ConfigError, ExperimentConfig, ProtocolConfig, override
from txl_jax.data.corpus import DataError, corpus_from_config
from txl_jax.evaluation.evaluator import Evaluator, Score
from txl_jax.training.run import Stopped

TRAINED = {"ablation.rows": "memory,none"}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A config file with three rows."""
    folder = tmp_path_factory.mktemp("table")

    path = folder / "table.py"
    changes = {
        "model.n_layer": 1,
        "train.steps": 2,
        "checkpoint.every": 2,
        "train.eval_every": 0,
        "generate.length": 0,
    }
    settings = tiny_runs.experiment(folder, **changes).to_dict()
    path.write_text(TABLE.format(settings=settings))
    return str(path)


@pytest.fixture(scope="module")
def done(table, tmp_path_factory):
    """Returns the workdir of a finished table, and the folders of its training runs."""
    workdir, trained = tmp_path_factory.mktemp("done"), []

    def train(exp, folder):
        trained.append(folder)
        corpus = corpus_from_config(exp.data)
        exp = with_vocab(exp, corpus)
        check_writable(folder, create=True)
        init_workdir(folder, exp, corpus)
        train_loop(exp, corpus, folder)

    ablation.run(table, TRAINED, str(workdir), train)
    return workdir, trained


def never(exp, folder):
    raise AssertionError(f"{folder} is trained")


def read(workdir):
    return json.loads((workdir / "ablation.json").read_text())


@pytest.mark.integration
def test_every_row_is_trained_in_a_folder_of_its_name_and_only_once(table, done):
    workdir, trained = done
    assert trained == [str(workdir / row) for row in ("memory", "none")]
    before = read(workdir)
    ablation.run(table, TRAINED, str(workdir), never)
    assert read(workdir) == before


@pytest.mark.slow
def test_a_value_is_that_of_an_evaluation_at_this_length(table, done):
    workdir, _ = done
    for name, protocol in (
        ("memory", ProtocolConfig(mem_len=24, seg_len=8, split="valid", batch_size=4)),
        ("none", ProtocolConfig(mem_len=0, context_len=16, seg_len=8, split="valid", batch_size=4)),
    ):
        (row,) = (row for row in read(workdir)["runs"] if row["row"] == name)
        trained = load(str(workdir / name))
        corpus = corpus_from_config(trained.config.data, trained.vocab)
        expected = slow_loss(trained, corpus.valid[:97], protocol)
        assert row["losses"][row["lengths"].index(24)] == pytest.approx(expected, abs=1e-5)


def slow_loss(trained, tokens, p):
    """Returns the mean loss of ``tokens`` by the protocol ``p``, by a plain loop over segments."""
    longest = -(-(len(tokens) - 1) // p.batch_size)
    losses = []
    for start in range(0, longest * p.batch_size, longest):
        mems = trained.model.init_mems(1, p.mem_len)
        for at in range(start, start + longest, p.seg_len):
            first = max(start, at - p.context_len)
            ids = np.asarray(tokens[first : at + p.seg_len + 1], np.int32)[None]
            logits, mems = trained.model.apply({"params": trained.params}, ids[:, :-1], mems)
            scored = np.asarray(logits, np.float64)[0, at - first :]
            targets = ids[0, at - first + 1 :]
            picked = scored[np.arange(len(targets)), targets]
            losses += list(np.log(np.exp(scored).sum(-1)) - picked)
    return np.mean(losses)


@pytest.mark.integration
def test_the_training_length_is_one_of_those_evaluated_and_a_table_of_positions_ends(table, done):
    rows = {row["row"]: row for row in read(done[0])["runs"]}
    assert rows["memory"]["lengths"] == [16, 24, 32]
    assert rows["none"]["lengths"] == [16, 24, 32]
    (learnt,) = ablation.table_runs(table, {"ablation.rows": "table"}, "unused")
    assert ablation.attention_lengths(learnt.exp, (24, 32)) == (16, [16, 24])  # n_positions is 24
    lines = {row["row"]: row for row in read(done[0])["table"]}
    for name, line in lines.items():
        assert line["train_length"] == 16
        assert line["init"] == rows[name]["values"][0]
        assert line["best"] == min(rows[name]["values"])
        assert rows[name]["values"][0] == pytest.approx(rows[name]["losses"][0] / math.log(2))


@pytest.mark.integration
def test_the_figures_are_in_a_csv_and_two_pictures(done):
    workdir, _ = done
    with open(workdir / "ablation.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 + 3
    first = read(workdir)["runs"][0]
    assert [float(line["bpc"]) for line in lines[:3]] == first["values"]
    assert (workdir / "ablation.png").read_bytes().startswith(b"\x89PNG")
    assert (workdir / "ablation.svg").read_bytes().startswith(b"<?xml")


def test_the_best_length_is_the_shortest_that_gives_what_is_shown():
    assert ablation.best_value([1, 2, 3, 4], [9.0, 5.004, 5.001, 5.2], "ppl") == (5.001, 2)
    assert ablation.best_value([1, 2, 3], [2.0, 1.9994, 1.9990], "bpc") == (1.9990, 2)
    assert ablation.best_value([1, 2, 3], [2.0, 1.9996, 1.9990], "bpc") == (1.9990, 3)


def test_a_line_has_the_mean_over_seeds_and_their_spread():
    row = {"row": "a", "parameters": 3, "unit": "ppl", "train_length": 2, "lengths": [2, 4]}
    rows = [{**row, "values": [9.0, 7.0]}, {**row, "values": [11.0, 8.0]}]
    (line,) = ablation.summarize(rows)
    assert (line["init"], line["best"], line["length"], line["spread"]) == (10.0, 7.5, 4, 1.0)
    assert line["seeds"] == 2


@pytest.mark.integration
def test_rows_that_are_trained_already_are_taken_from_their_folders(table, done, tmp_path):
    folder = done[0] / "none"
    overrides = {"ablation.rows": "none", "ablation.workdirs": f"none={folder}"}
    runs = ablation.table_runs(table, overrides, str(tmp_path))
    assert [(one.row, one.workdir) for one in runs] == [("none", str(folder))]
    ablation.run(table, overrides, str(tmp_path), never)


@pytest.mark.integration
def test_a_folder_with_other_settings_is_refused_before_training(table, done, tmp_path):
    workdir = tmp_path / "done"
    shutil.copytree(done[0], workdir)
    (workdir / "none").rename(workdir / "kept")
    changed = TRAINED | {"optimizer.learning_rate": "0.5"}
    with pytest.raises(AnotherRunError, match="memory"):
        ablation.run(table, changed, str(workdir), never)
    assert read(workdir) == read(done[0])


@pytest.mark.integration
def test_a_row_that_was_stopped_before_its_last_validation_is_not_finished(table, done, tmp_path):
    """The row has a checkpoint of the last step, but validation might choose another one."""
    workdir, again = tmp_path / "done", []
    shutil.copytree(done[0], workdir)
    log = workdir / "none" / "metrics.jsonl"
    kept = [line for line in log.read_text().splitlines(True) if '"valid"' not in line]
    log.write_text("".join(kept))
    ablation.run(table, TRAINED, str(workdir), lambda exp, folder: again.append(folder))
    assert again == [str(workdir / "none")]


def test_every_seed_has_a_folder(table, tmp_path):
    overrides = {"ablation.rows": "none,memory", "ablation.seeds": "0,3"}
    runs = ablation.table_runs(table, overrides, str(tmp_path))
    names = [one.workdir.removeprefix(f"{tmp_path}/") for one in runs]
    assert names == ["none-seed0", "none-seed3", "memory-seed0", "memory-seed3"]
    assert [one.exp.seed for one in runs] == [0, 3, 0, 3]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_to_one_training_stops_the_table(table, tmp_path, monkeypatch, capsys, sent, code):
    trained = []

    def stopped(exp, folder):
        trained.append(folder)
        raise Stopped(sent, ", and the state is saved")

    monkeypatch.setattr(sweep, "train_and_evaluate", stopped)
    assert modes.ablate(table, {}, str(tmp_path)) == code
    assert trained == [str(tmp_path / "memory")]
    assert f"stopped by {sent.name}, and the state is saved; to resume:" in capsys.readouterr().err
    assert not (tmp_path / "ablation.json").exists()


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"ablation.rows": "memry"},
            "ablation.rows: there is no row 'memry'; the rows are memory, none, table",
        ),
        ({"ablation.workdirs": "none"}, "ablation.workdirs: 'none' must be ROW=WORKDIR"),
        ({"ablation.lengths": "4,8"}, "ablation.lengths: 4 is less than evaluate.seg_len"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_training(table, tmp_path, overrides, text):
    with pytest.raises(AnalysisError, match=text.replace("(", r"\(")):
        ablation.run(table, overrides, str(tmp_path), never)


def test_a_split_too_short_for_the_streams_is_refused_before_training(table, tmp_path):
    with pytest.raises(
        DataError, match="memory: the valid split has 3 tokens, too few for a target in each stream"
    ):
        ablation.run(table, {"ablation.max_tokens": "2"}, str(tmp_path), never)


def test_dynamic_evaluation_has_the_training_split_for_its_statistics(
    table, done, tmp_path, monkeypatch
):
    monkeypatch.setattr(Evaluator, "run", lambda *_, **__: Score(0.5, 96, 0.0))
    flags = {"evaluate.dynamic.rule": "rms", "ablation.workdirs": f"memory={done[0] / 'memory'}"}
    ablation.run(table, {**flags, "ablation.rows": "memory"}, str(tmp_path), never)
    assert read(tmp_path)["runs"][0]["losses"] == [0.5] * 3


def test_recomputed_context_takes_no_warm_start():
    exp = override(ExperimentConfig(), {"evaluate.warm_start": 64, "train.mem_len": 0})
    protocol = ablation.protocol_at_length(exp, 256)
    assert (protocol.mem_len, protocol.context_len, protocol.warm_start) == (0, 128, 0)


def test_rows_of_different_texts_are_refused_before_training(tmp_path):
    with pytest.raises(AnalysisError, match=r"rows of different texts \(ptb, stdlib\) cannot be"):
        ablation.run("configs/siblings.py", {}, str(tmp_path), never)


def test_a_config_without_rows_and_one_row_are_no_table(table, tmp_path):
    with pytest.raises(AnalysisError, match="has no rows; name a table"):
        ablation.table_runs("configs/quickstart.py", {}, str(tmp_path))
    with pytest.raises(AnalysisError, match="name the table without a row"):
        ablation.table_runs(f"{table}:none", {}, str(tmp_path))
    with pytest.raises(ConfigError, match="no file"):
        ablation.table_runs("nope.py", {}, str(tmp_path))
