"""Weight averages equal those computed in NumPy; they are saved, resumed and validated."""

import json

import jax
import numpy as np
import pytest
from tiny_runs import arrays, claimed, corpus_and_experiment, evaluate, run_in_workdir, train

import txl_jax
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.config import AverageConfig
from txl_jax.data.feed import training_batch
from txl_jax.evaluation.evaluator import split_evaluator
from txl_jax.parallel.mesh import make_mesh
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.plan import training_streams
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.run import chosen_model
from txl_jax.training.state import choose_weights, init_state
from txl_jax.training.step import train_step

BOTH = {"average.swa_start": 5, "average.ema_decay": 0.75}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def trained(folder):
    """Returns the workdir and the settings of a finished run of 12 updates.

    The run was validated after update 4 (before ``swa_start``), 8 and 12.
    """
    changes = {**BOTH, "train.eval_every": 4, "checkpoint.keep_last": 3}
    run_in_workdir(folder, folder / "run", **changes)
    return folder / "run", changes


def valid_records(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "valid"]


@pytest.mark.integration
def test_averages_are_those_written_out_over_the_updates(folder):
    changes = {**BOTH, "train.non_finite": "skip"}
    corpus, exp = corpus_and_experiment(folder, **changes)
    model, optimizer = txl_jax.TransformerXL(exp.model), make_optimizer(exp)
    state = init_state(exp, model, optimizer)
    streams = training_streams(exp, corpus)
    step = jax.jit(lambda s, b: train_step(s, b, exp, model, optimizer)[0])
    after = []
    for n in range(exp.train.steps):
        state = step(state, training_batch(streams, n, "reset"))
        after.append(arrays(state.params))
    tail, exponential = (arrays(state.averages[name]) for name in ("swa", "ema"))
    weights = np.ones(1)  # of updates 1 .. t; the newest has max(1/t, 1/4), so first all are equal
    for t in range(2, len(after) + 1):
        newest = max(1 / t, 1 - 0.75)
        weights = np.append(weights * (1 - newest), newest)
    for key in tail:
        all_of_it = np.stack([p[key] for p in after]).astype(np.float64)
        np.testing.assert_allclose(tail[key], all_of_it[5:].mean(0), rtol=1e-5, atol=1e-7)
        wanted = np.tensordot(weights, all_of_it, 1)
        np.testing.assert_allclose(exponential[key], wanted, rtol=1e-5, atol=1e-7)
    assert not np.allclose(tail["['embedding']"], exponential["['embedding']"], atol=1e-5)


def test_without_averages_nothing_is_kept(folder):
    _, exp = corpus_and_experiment(folder)
    init = lambda: init_state(exp, txl_jax.TransformerXL(exp.model), make_optimizer(exp))
    assert jax.eval_shape(init).averages == {}


@pytest.mark.slow
def test_each_average_that_has_begun_is_validated_and_the_best_is_the_model(trained, folder):
    workdir, changes = trained
    corpus, exp = corpus_and_experiment(folder, **changes)
    first, *others = valid_records(workdir)
    assert "loss_swa" not in first  # averaging begins at step 5
    evaluator = split_evaluator(exp.model, exp.validate, corpus, make_mesh(exp.mesh, exp.model, 4))
    for record in [first, *others]:
        names = [key.removeprefix("loss_") for key in record if key.startswith("loss_")]
        losses = {}
        for name in names:
            params = txl_jax.load(str(workdir), str(record["step"]), name).params
            score = evaluator.run(params)
            assert score is not None
            losses[name] = score.loss
            assert record[f"loss_{name}"] == pytest.approx(losses[name], abs=1e-6)
        assert len(set(losses.values())) == len(names)
        assert record["loss"] == min(record[f"loss_{name}"] for name in names)
        best = min(losses, key=lambda name: losses[name])
        assert txl_jax.load(str(workdir), str(record["step"])).weights == best
    assert set(losses) == {"raw", "swa", "ema"}


def test_a_finished_run_is_evaluated_with_the_weights_that_are_asked_for_now(trained):
    workdir, _ = trained
    best = txl_jax.load(str(workdir))
    for use in ("raw", "swa", "ema"):
        weights = chosen_model(str(workdir), use).weights
        assert weights == (use if use in (best.weights, *best.others) else best.weights)
    assert chosen_model(str(workdir), "best").weights == best.weights
    assert best.others


def test_unknown_weights_are_refused_by_name(trained):
    workdir, _ = trained
    with pytest.raises(CheckpointError, match="has no 'swa' parameters, only raw, ema"):
        txl_jax.load(str(workdir), "4", "swa")


def test_the_report_scores_the_other_weights_too(trained, folder, capsys):
    workdir, changes = trained
    corpus, _ = corpus_and_experiment(folder, **changes)
    model = txl_jax.load(str(workdir), "12", "swa")
    result = evaluate(model, corpus, workdir)
    by_name = {r["name"]: r["loss"] for r in result["results"]}
    names = [f"memory 32, {w} weights" for w in ("swa", "raw", "ema")]
    assert set(by_name) == {*names, "no memory, swa weights"}
    assert len({by_name[name] for name in names}) == 3
    assert "memory 32, ema weights" in capsys.readouterr().out


@pytest.mark.integration
def test_averages_are_restored_with_the_run(trained, folder, tmp_path):
    workdir, changes = trained
    corpus, exp = corpus_and_experiment(folder, **changes)

    class StopSoon(PreemptionGuard):
        left = 9

        def requested(self):
            self.left -= 1
            return self.left <= 0

    claimed(tmp_path, exp, corpus)
    assert not train(exp, corpus, str(tmp_path), StopSoon()).finished
    assert train(exp, corpus, str(tmp_path), PreemptionGuard()).finished
    untimed = lambda r: {k: v for k, v in r.items() if k != "timing"}
    assert [*map(untimed, valid_records(tmp_path))] == [*map(untimed, valid_records(workdir))]
    for name in ("raw", "swa", "ema"):
        whole, cut = (arrays(txl_jax.load(str(w), "12", name).params) for w in (workdir, tmp_path))
        for key in whole:
            np.testing.assert_array_equal(whole[key], cut[key], err_msg=f"{name} {key}")


def test_the_chosen_weights_are_exported(trained, tmp_path):
    workdir, _ = trained
    model = txl_jax.load(str(workdir), "12", "swa")
    txl_jax.save(model, str(tmp_path / "out"))
    there = arrays(txl_jax.load(str(tmp_path / "out")).params)
    for key, value in arrays(model.params).items():
        np.testing.assert_array_equal(there[key], value)


@pytest.mark.slow
def test_layers_under_scan_keep_the_one_that_is_named_and_on_disk_one_by_one(folder, tmp_path):
    changes = {"model.scan_layers": True, "average.swa_start": 11, "average.use": "swa"}
    run_in_workdir(folder, tmp_path, **changes)
    named = txl_jax.load(str(tmp_path), "12")
    assert (named.weights, named.others) == ("swa", ("raw",))
    tail, raw = (arrays(txl_jax.load(str(tmp_path), "12", name).params) for name in ("swa", "raw"))
    assert any("layer_1" in key for key in tail)
    for key in raw:  # the average is over one update only
        np.testing.assert_allclose(tail[key], raw[key], rtol=0, atol=1e-7, err_msg=key)


@pytest.mark.parametrize(
    ("use", "losses", "name"),
    [
        ("best", {"raw": 2.0, "swa": 1.0}, "swa"),
        ("best", {"raw": 1.0, "swa": 2.0}, "raw"),
        ("swa", {"raw": 1.0, "swa": 2.0}, "swa"),
        ("swa", {"raw": 1.0}, "raw"),
        ("raw", {"raw": 2.0, "ema": 1.0}, "raw"),
    ],
)
def test_the_model_is_the_best_or_the_one_that_is_named(use, losses, name):
    assert choose_weights(losses, AverageConfig(swa_start=1, ema_decay=0.5, use=use)) == name


@pytest.mark.integration
def test_a_run_without_means_has_the_records_it_had(trained_run):
    found = valid_records(trained_run.workdir)
    assert len(found) == 2
    assert all(key not in r for r in found for key in ("loss_raw", "weights"))
    trained = txl_jax.load(str(trained_run.workdir), "12")
    assert (trained.weights, trained.others) == ("raw", ())


@pytest.mark.slow
def test_a_checkpoint_that_was_not_validated_has_the_weights_that_are_named(folder, tmp_path):
    changes = {"average.swa_start": 5, "average.use": "swa", "checkpoint.keep_last": 9}
    run_in_workdir(folder, tmp_path, **changes)  # saved at 4 and 8, validated at 6 and 12
    names = {step: txl_jax.load(str(tmp_path), step).weights for step in ("4", "6", "8")}
    assert names == {"4": "raw", "6": "swa", "8": "swa"}
