"""The temperature is chosen on the validation split, and the test split is read only when asked."""

import json

import pytest

import txl_jax
from benchmarks import temperature
from txl_jax.evaluation.evaluator import split_evaluator


@pytest.fixture(scope="module")
def workdir(trained_run, tmp_path_factory):
    return trained_run.copied(tmp_path_factory.mktemp("temperature") / "run")


@pytest.mark.integration
def test_the_least_validation_loss_chooses_and_test_is_not_read(workdir, monkeypatch):
    read = []
    of = temperature.split_evaluator

    def noted(model, protocol, *rest):
        read.append(protocol)
        return of(model, protocol, *rest)

    monkeypatch.setattr(temperature, "split_evaluator", noted)
    result = temperature.main([str(workdir), "--temperatures=0.5,2"])
    assert {p.split for p in read} == {"valid"}
    assert [p.temperature for p in read] == [0.5, 1.0, 2.0]
    losses = {row["temperature"]: row["loss"] for row in result["valid"]}
    assert result["chosen"] == min(losses, key=lambda t: losses[t])
    assert len(set(losses.values())) == 3
    assert json.loads((workdir / "temperature.json").read_text()) == result


@pytest.mark.integration
def test_the_test_split_is_scored_at_1_and_at_the_chosen_temperature(workdir):
    result = temperature.main([str(workdir), "--temperatures=0.5", "--test"])
    of_test = [row["temperature"] for row in result["test"]]
    assert of_test == sorted({1.0, result["chosen"]})
    trained = txl_jax.load(str(workdir))
    corpus = temperature.corpus_from_config(trained.config.data)
    mesh = temperature.scoring_mesh(trained.config.mesh, trained.config.model, 4)
    plain = split_evaluator(trained.config.model, trained.config.evaluate, corpus, mesh)
    at_1 = next(row["loss"] for row in result["test"] if row["temperature"] == 1)
    score = plain.run(trained.params)
    assert score is not None
    assert at_1 == pytest.approx(score.loss, abs=1e-6)
