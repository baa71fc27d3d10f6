"""A sweep trains each combination and seed once, lists failed runs separately, names the best."""

import csv
import json
import re
import statistics
import sys
from typing import Any

import pytest
import tiny_runs

import txl_jax
from txl_jax import modes
from txl_jax.analysis import sweep as sweep_mode
from txl_jax.analysis.results import AnalysisError
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.config import ConfigError, ExperimentConfig, override

GRID = {"optimizer.learning_rate": [5e-3, 1e-3], "loss.ar": [0.0, 0.5]}
TINY = {"model.n_layer": 1, "train.steps": 4, "train.eval_every": 2, "generate.length": 0}


def experiment(folder, grid=GRID, seeds=2, **changes):
    exp = tiny_runs.experiment(folder, **{**TINY, **changes})
    return override(exp, {"sweep.grid": grid, "sweep.seeds": seeds})


def fake_train(losses):
    """Returns a fake training function: it writes a checkpoint, a validation and an evaluation."""

    def train(exp, folder):
        loss = losses(exp)
        if isinstance(loss, Exception):
            raise loss
        checkpoint = tiny_runs.pathlib.Path(folder) / "checkpoints" / str(exp.train.steps)
        checkpoint.mkdir(parents=True)
        (checkpoint / "_CHECKPOINT_METADATA").write_text("{}")
        record = {"kind": "valid", "step": exp.train.steps, "loss": loss, "bpc": loss}
        (checkpoint.parents[1] / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        (checkpoint.parents[1] / "evaluation.json").write_text("{}")
        trained.append(folder)

    trained: list[str] = []
    made: Any = train
    made.folders = trained
    return made


def loss_of(exp):
    return 1 + exp.optimizer.learning_rate * 100 + exp.loss.ar + exp.seed / 100


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.mark.integration
def test_every_combination_and_seed_is_trained_once_in_a_folder_of_its_own(folder, capsys):
    train, again = fake_train(loss_of), fake_train(loss_of)
    found = sweep_mode.run(experiment(folder), str(folder / "s"), train)
    names = {path.removeprefix(f"{folder}/s/") for path in train.folders}
    assert len(names) == 8
    assert "learning_rate=0.005-ar=0.5/seed_1" in names
    told = [f"run {n} of 8: {path}" for n, path in enumerate(train.folders, 1)]
    assert capsys.readouterr().err.splitlines()[-8:] == told
    more = experiment(folder, {**GRID, "loss.ar": [0.0, 0.5, 1.0]}, seeds=3)
    sweep_mode.run(more, str(folder / "s"), again)
    assert not set(again.folders) & set(train.folders)
    assert len(again.folders) == 18 - 8
    assert found.rows[0].settings == {"optimizer.learning_rate": 1e-3, "loss.ar": 0.0}


@pytest.mark.integration
def test_a_run_that_was_stopped_before_its_evaluation_is_finished(folder):
    first, again = fake_train(loss_of), fake_train(loss_of)
    sweep_mode.run(experiment(folder), str(folder / "s"), first)
    tiny_runs.pathlib.Path(first.folders[3], "evaluation.json").unlink()
    found = sweep_mode.run(experiment(folder), str(folder / "s"), again)
    # The run is trained again, and the fake training fails because its files exist already.
    assert list(found.failed) == [first.folders[3]]


@pytest.mark.integration
def test_the_table_has_mean_spread_and_best_and_the_files_have_every_run(folder):
    found = sweep_mode.run(experiment(folder), str(folder / "s"), fake_train(loss_of))
    for row in found.rows:
        exp = override(experiment(folder), row.settings)
        values = [loss_of(override(exp, {"seed": seed})) for seed in (0, 1)]
        assert row.values == pytest.approx(sorted(values))
        assert row.mean == pytest.approx(statistics.fmean(values))
    assert [row.mean for row in found.rows] == sorted(row.mean for row in found.rows)
    best = found.rows[0]
    assert best.workdirs[0].endswith("/s/learning_rate=0.001-ar=0.0/seed_0")
    header, line = str(found).splitlines()[:2]
    assert header.split() == ["validation", "loss", "seeds", "mean", "bpc", "spread", "best"]
    assert line.split() == ["learning_rate=0.001", "ar=0.0", "2", "1.105", "0.010", "1.100"]
    rows = list(csv.DictReader((folder / "s" / "sweep.csv").open()))
    assert len(rows) == 8
    assert {row["optimizer.learning_rate"] for row in rows} == {"0.005", "0.001"}
    assert len(json.loads((folder / "s" / "sweep.json").read_text())["runs"]) == 8
    assert (folder / "s" / "sweep.svg").stat().st_size > 1000


@pytest.mark.integration
def test_a_failed_run_is_named_and_the_others_are_trained(folder, capsys):
    fails = lambda exp: ValueError("not finite\nat all") if exp.loss.ar else loss_of(exp)
    found = sweep_mode.run(experiment(folder), str(folder / "s"), fake_train(fails))
    assert len(found.failed) == 4
    assert set(found.failed.values()) == {"not finite at all"}
    assert [len(row.values) for row in found.rows] == [2, 2, 0, 0]
    assert "failed" in str(found).splitlines()[-1]
    assert "learning_rate=0.001-ar=0.5/seed_1: not finite at all" in capsys.readouterr().err
    retried = fake_train(loss_of)
    assert not sweep_mode.run(experiment(folder), str(folder / "s"), retried).failed
    assert len(retried.folders) == 4
    with pytest.raises(AnalysisError, match="every run failed: no"):
        sweep_mode.run(
            experiment(folder), str(folder / "t"), fake_train(lambda _: ValueError("no"))
        )


@pytest.mark.integration
def test_a_validation_that_is_not_finite_counts_for_no_run(folder, capsys):
    losses = lambda exp: None if exp.loss.ar else loss_of(exp)  # metrics.jsonl stores NaN as null
    found = sweep_mode.run(experiment(folder), str(folder / "s"), fake_train(losses))
    assert set(found.failed.values()) == {"no validation loss is finite"}
    assert [len(row.values) for row in found.rows] == [2, 2, 0, 0]
    told = "learning_rate=0.001-ar=0.5/seed_1: no validation loss is finite"
    assert told in capsys.readouterr().err
    worse = {"kind": "valid", "step": 2, "loss": None, "bpc": None}
    with (tiny_runs.pathlib.Path(found.rows[0].workdirs[0]) / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(worse) + "\n")
    again = sweep_mode.run(experiment(folder), str(folder / "s"), fake_train(losses))
    assert again.rows[0].values == found.rows[0].values


@pytest.mark.integration
def test_an_interruption_ends_the_sweep_and_the_same_call_goes_on(folder):
    left = 3

    def stopping(exp, path):
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        first(exp, path)

    first, rest = fake_train(loss_of), fake_train(loss_of)
    with pytest.raises(KeyboardInterrupt):
        sweep_mode.run(experiment(folder), str(folder / "s"), stopping)
    sweep_mode.run(experiment(folder), str(folder / "s"), rest)
    assert (len(first.folders), len(rest.folders)) == (2, 6)


@pytest.mark.parametrize(
    ("grid", "changes", "words"),
    [
        (
            {},
            {},
            "sweep.grid = {}: has no values; give settings with values, such as sweep.grid."
            "optimizer",
        ),
        ({"loss.ar": []}, {}, "sweep.grid.loss.ar = []: has no values; give settings with values"),
        ({"loss.arr": [1]}, {}, "unknown config key 'loss.arr'; the nearest key is 'loss.ar'"),
        ({"loss.ar": [0.1, -1]}, {}, "loss.ar = -1.0: must be at least 0"),
        ({"loss.ar": [0.1, "much"]}, {}, "loss.ar = 'much': must be of type float"),
        ({"loss.ar": [0.1, 0.2, 0.10]}, {}, "sweep.grid: ar=0.1 is given twice"),
        ({"loss.ar": ["1e-1", 0.1]}, {}, "sweep.grid: ar=0.1 is given twice"),
        ({"train.start_from": ["a/b", "a_b"]}, {}, "start_from=a_b is given beside start_from=a/b"),
        ({"seed": [1, 2]}, {}, "sweep.grid.seed = [1, 2]: cannot be a key of a sweep; give"),
        ({"train.num_seeds": [1, 2]}, {}, "give the number of seeds as sweep.seeds"),
        ({"evaluate.mem_len": [1]}, {}, "does not change the trained model"),
        ({"data.vocab": ["byte", "char"]}, {}, "losses on different texts cannot be compared"),
        ({"loss": [1]}, {}, "loss = 1: is a section of settings, not one"),
        ({"train.batch_size": [4, 100_000]}, {}, "batch_size = 100000"),
        ({"optimizer.name": ["adam", "optax.loin"]}, {}, "the nearest name is 'optax.lion'"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_training(folder, grid, changes, words):
    train = fake_train(loss_of)
    with pytest.raises((ConfigError, txl_jax.DataError)) as error:
        sweep_mode.run(experiment(folder, grid, **changes), str(folder / "s"), train)
    assert words in str(error.value)
    assert train.folders == []


def test_the_folder_of_a_run_is_refused(folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is the folder of a run; give the sweep a folder of its"):
        sweep_mode.run(experiment(folder), str(folder / "run"), fake_train(lambda exp: 1.0))
    assert [path.name for path in (folder / "run").iterdir()] == ["config.json"]


@pytest.mark.integration
def test_runs_with_other_settings_in_the_folder_are_refused(folder):
    sweep_mode.run(experiment(folder), str(folder / "s"), fake_train(loss_of))
    other, train = experiment(folder, **{"model.d_model": 32}), fake_train(loss_of)
    with pytest.raises(WorkdirError) as error:
        sweep_mode.run(other, str(folder / "s"), train)
    first, *_, different = str(error.value).splitlines()
    assert f"{folder / 's'}/" in first
    assert different == "model.d_model: 16 -> 32"
    assert train.folders == []


@pytest.mark.integration
def test_runs_that_were_validated_in_another_way_are_refused(folder):
    sweep_mode.run(experiment(folder), str(folder / "s"), fake_train(loss_of))
    table, train = (folder / "s" / "sweep.json").read_bytes(), fake_train(loss_of)
    more = {"loss.ar": [0.0, 0.5, 0.7]}
    other = experiment(folder, {**GRID, **more}, **{"validate.mem_len": 3})
    with pytest.raises(WorkdirError) as error:
        sweep_mode.run(other, str(folder / "s"), train)
    first, fix, *different = str(error.value).splitlines()
    assert first.endswith(
        "/seed_0 was validated with other settings, and losses of both kinds cannot be compared"
    )
    assert fix == "name another folder for the sweep; what differs:"
    assert different == ["validate.mem_len: 16 -> 3"]
    assert train.folders == []
    assert (folder / "s" / "sweep.json").read_bytes() == table
    rows = experiment(folder, {**GRID, **more}, **{"validate.batch_size": 1})
    assert len(sweep_mode.run(rows, str(folder / "s"), train).rows) == 6
    assert len(train.folders) == 4


def test_a_grid_is_read_from_flags_as_from_python():
    flags = {"sweep.grid.optimizer.learning_rate": "5e-3,1e-3", "sweep.grid.loss.ar": "0,0.5"}
    lists = {"sweep.grid": {"model.cutoffs": "[[10], [20, 30]]", "model.pre_lnorm": "true,false"}}
    read = lambda settings: override(ExperimentConfig(), settings).sweep.grid
    assert read(flags) == GRID
    assert read(lists) == {"model.cutoffs": [[10], [20, 30]], "model.pre_lnorm": [True, False]}


@pytest.mark.integration
def test_a_sweep_in_python_trains_as_train_does_and_the_command_goes_on(
    folder, capsys, monkeypatch
):
    exp = tiny_runs.experiment(folder, **TINY)
    grid = {"optimizer.learning_rate": (5e-3, 1e30)}
    found = txl_jax.sweep(exp, folder / "s", grid, seeds=2)
    assert [len(row.values) for row in found.rows] == [2, 0]
    assert all("nan" in error for error in found.failed.values())
    alone = txl_jax.train(exp, folder / "alone", {"seed": 1})
    records = sweep_mode.validations(str(folder / "alone"))
    assert min(r["bpc"] for r in records.values()) in found.rows[0].values
    assert alone.seeds[0].step == alone.step
    capsys.readouterr()
    again = override(exp, {"sweep.grid": {"optimizer.learning_rate": [5e-3]}, "sweep.seeds": 2})
    monkeypatch.setattr(sys, "argv", ["txl", f"--config.train.steps={exp.train.steps}"])
    assert modes.sweep(again, str(folder / "s")) == 0
    printed = capsys.readouterr()
    assert "step" not in printed.out + printed.err.replace("train.steps", "")
    assert "best    " in printed.out
    assert "--config.optimizer.learning_rate=0.005" in printed.err
    (steps,) = re.findall(r"--config.train.steps=(\d+)", printed.err)
    assert int(steps) == 2 * exp.train.steps


@pytest.mark.integration
def test_training_returns_the_models_of_all_seeds(folder):
    exp = tiny_runs.experiment(folder, **TINY)
    trained = txl_jax.train(exp, folder / "seeds", {"train.num_seeds": 2, "seed": 3})
    assert [model.config.seed for model in trained.seeds] == [3, 4]
    assert trained.config.seed == 3
