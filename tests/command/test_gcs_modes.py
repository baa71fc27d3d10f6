"""Several seeds, tables, conversions and loggers write the same to a bucket as to a disk.

These tests are skipped if the extra ``gcs`` or the emulator is not installed.
"""

import json
import sys
import types
from typing import Any

import numpy as np
import pytest
import tiny_runs
from foreign_runs import command, prepare
from run_records import assert_same_run
from tiny_runs import TABLE

import txl_jax
from txl_jax import files, modes, paths
from txl_jax.checkpoint.workdir import begun_dtype
from txl_jax.config import override
from txl_jax.training.events import WandbRun

SHORT: dict[str, Any] = {"model.n_layer": 1, "train.steps": 4, "generate.length": 0}


def read(workdir, name):
    return paths.path(str(workdir), name).read_bytes()


def test_a_begun_run_in_a_bucket_keeps_its_dtype_on_other_devices(tmp_path, place):
    exp = override(tiny_runs.experiment(tmp_path, **SHORT), {"model.dtype": "bfloat16"})
    files.write_json(f"{place}/config.json", exp.to_dict())
    assert begun_dtype(place) == "bfloat16"


@pytest.mark.slow
def test_several_seeds_in_a_bucket_are_those_of_a_disk(tmp_path, place):
    exp = tiny_runs.experiment(tmp_path, **SHORT, **{"train.num_seeds": 2})
    for workdir in (str(tmp_path / "seeds"), place):
        assert modes.train(exp, workdir) == 0
    for seed in range(2):
        pair = tmp_path / "seeds" / f"seed_{seed}", f"{place}/seed_{seed}"
        assert_same_run(tmp_path, *pair, **SHORT, seed=seed)
        assert b"results" in read(pair[1], "evaluation.json")
    assert modes.train(exp, place) == 0  # resumed: nothing is left to train


@pytest.mark.slow
def test_recl_compares_runs_in_a_bucket_and_writes_into_it(tmp_path, place):
    exp = tiny_runs.experiment(tmp_path, **SHORT)
    names = [f"{place}/{name}" for name in ("a", "b")]
    for seed, workdir in enumerate(names):
        txl_jax.train(override(exp, {"seed": seed}), workdir)
    settings = {
        "recl.models": [f"{name[-1]}={name}" for name in names],
        "recl.first": 4,
        "recl.delta": 4,
        "recl.longest": 12,
        "context.stride": 4,
    }
    results = []
    for workdir in (str(tmp_path / "recl"), f"{place}/recl"):
        assert modes.compare("recl", override(exp, settings), {}, workdir) == 0
        results.append(json.loads(read(workdir, "recl.json")))
    assert results[0]["models"] == results[1]["models"]
    assert {"recl.csv", "recl.png", "recl.svg"} <= set(paths.names(f"{place}/recl"))


@pytest.mark.slow
def test_a_table_is_trained_and_compared_in_a_bucket(tmp_path, place):
    settings = tiny_runs.experiment(tmp_path, **SHORT, **{"train.eval_every": 0}).to_dict()
    (tmp_path / "table.py").write_text(TABLE.format(settings=settings))
    chosen, results = {"ablation.rows": "memory,none"}, []
    for workdir in (str(tmp_path / "rows"), f"{place}/rows"):
        assert modes.ablate(str(tmp_path / "table.py"), chosen, workdir) == 0
        results.append(json.loads(read(workdir, "ablation.json")))
    assert results[0]["table"] == results[1]["table"]
    made = set(paths.names(f"{place}/rows"))
    assert {"ablation.csv", "ablation.png", "memory", "none"} <= made


@pytest.mark.slow
def test_a_conversion_writes_its_workdir_into_a_bucket(tmp_path, place):
    files = prepare(tmp_path)
    flags = [f"--args={files / 'args.json'}", "--corpus=text", f"--path={files / 'text.txt'}"]
    flags += ["--config.data.vocab=word"]
    losses = []
    for workdir in (str(files / "local"), place):
        done = command(files / "state.safetensors", f"--workdir={workdir}", *flags)
        assert done.returncode == 0, done.stderr
        losses.append(txl_jax.load(workdir).evaluate(batch_size=2).loss)
        assert command(workdir, "--to=safetensors", f"{workdir}-out").returncode == 0
        model = txl_jax.load(f"{workdir}-out")
        assert np.isfinite(model.score("the cat saw").nll)
    assert losses[0] == losses[1]
    again = command(files / "state.safetensors", f"--workdir={place}", *flags)
    assert again.returncode != 0
    assert again.stderr.count("\n") == 1


@pytest.mark.integration
def test_wandb_continues_the_run_whose_name_is_in_the_bucket(place, monkeypatch):
    """wandb writes local files, but continuing needs only the id, which is in the bucket."""
    given: list[dict[str, Any]] = []
    ignore = lambda *names, **settings: None
    run = types.SimpleNamespace(define_metric=ignore, finish=ignore)
    run.config = types.SimpleNamespace(update=ignore)

    def init(**settings):
        given.append(settings)
        return run

    fake: Any = types.ModuleType("wandb")
    fake.Settings, fake.init = dict, init
    fake.errors = types.SimpleNamespace(Error=ZeroDivisionError)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (0, 4):
        logger = WandbRun("project")
        logger.start(place, {}, step)
        logger.close()
    assert len({one["id"] for one in given}) == 1
    assert {one["name"] for one in given} == {place.rpartition("/")[2]}
    assert read(place, "wandb/id").decode() == given[0]["id"]
    assert not any("gs:" in one["dir"] for one in given)
