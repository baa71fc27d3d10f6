"""Several seeds in one program train and resume as each seed does alone."""

import json
import shutil
import signal
import types
from typing import Any

import jax
import numpy as np
import pytest
from tiers import rest_slow
from tiny_runs import arrays, call, claimed, corpus_and_experiment, experiment, run, write_config

import txl_jax
from txl_jax.checkpoint.checkpoint_folder import CheckpointFolder
from txl_jax.checkpoint.errors import CheckpointError, WorkdirError
from txl_jax.config import ConfigError, ExperimentConfig, override
from txl_jax.training.distil import FILE
from txl_jax.training.loop import train
from txl_jax.training.multi_seed import StackedSeeds, common_step, seed_array
from txl_jax.training.plan import build_plan
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.run import stored_experiment
from txl_jax.training.trainer import Trainer

SETTINGS = {
    "seed": 3,
    "model.dropout": 0.2,
    "optimizer.name": "muon",
    "train.num_seeds": 2,
    "train.steps_per_dispatch": 2,
    "train.log_every": 2,
    "train.seg_len_std": 2.0,
    "train.partial_shuffle": True,
    "train.text_on_device": True,
    "average.swa_start": 6,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def together(folder):
    """The workdir of two finished runs, with seeds 3 and 4, that one program trained."""
    corpus, exp = corpus_and_experiment(folder, **SETTINGS)
    outcomes = train(claimed_plan(exp, folder / "runs", corpus), PreemptionGuard())
    assert [outcome.finished for outcome in outcomes] == [True, True]
    return folder / "runs"


def claimed_plan(exp, workdir, corpus):
    """Returns a plan of all seeds' runs; writes config and vocabulary to each seed's folder."""
    plan = build_plan(exp, corpus, str(workdir))
    for one in plan.runs:
        claimed(one.workdir, one.exp, corpus)
    return plan


def records(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "timing"} for line in lines]


@pytest.mark.integration
@pytest.mark.parametrize("seed", rest_slow(1, [4, 3]))
def test_each_seed_is_the_same_run_as_alone(together, folder, tmp_path, seed):
    alone = SETTINGS | {"seed": seed, "train.num_seeds": 1, "train.text_on_device": False}
    run(folder, tmp_path, **alone)
    there, here = records(together / f"seed_{seed}"), records(tmp_path)
    assert [r["step"] for r in there] == [r["step"] for r in here]
    for a, b in zip(there, here, strict=True):
        assert a.keys() == b.keys()
        for key in ("loss", "grad_norm", "learning_rate", "loss_swa"):
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=2e-4), key
    assert there[-1]["loss"] != records(together / f"seed_{7 - seed}")[-1]["loss"]


@pytest.mark.integration
def test_their_folders_are_workdirs_of_single_runs(together, folder):
    model = txl_jax.load(str(together / "seed_4"), "12", "swa")
    assert (model.config.seed, model.config.train.num_seeds) == (4, 1)
    assert model.others == ("raw",)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(), ("12",)], ids=["all have it", "one lost its last"])
def test_stopped_seeds_resume_from_the_last_step_that_all_have(together, folder, tmp_path, lost):
    class StopAt(PreemptionGuard):
        left = 5

        def requested(self):
            self.left -= 1
            return self.left <= 0

    corpus, exp = corpus_and_experiment(folder, **SETTINGS)
    plan = claimed_plan(exp, tmp_path, corpus)
    stopped = train(plan, StopAt())
    assert not any(outcome.finished for outcome in stopped)
    assert 0 < int(stopped[0].state.step) < 12
    if lost:
        steps = [path.name for path in (tmp_path / "seed_3/checkpoints").iterdir()]
        shutil.rmtree(tmp_path / "seed_3/checkpoints" / max(steps, key=int))
    assert all(outcome.finished for outcome in train(plan, PreemptionGuard()))
    for seed in (3, 4):
        whole, cut = together / f"seed_{seed}", tmp_path / f"seed_{seed}"
        assert records(whole) == records(cut)
        a, b = (arrays(txl_jax.load(str(w), "12", "raw").params) for w in (whole, cut))
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


@pytest.mark.slow
def test_a_seed_that_was_ahead_saves_where_the_others_do(folder, tmp_path, monkeypatch, capsys):
    """Both seeds save step 8, and seed 4 loses it; the run resumes at step 4 and stops at 6."""
    changes = {"seed": 3, "train.num_seeds": 2, "train.eval_every": 0, "checkpoint.keep_best": 0}
    corpus, exp = corpus_and_experiment(folder, **changes)
    plan, step_done = claimed_plan(exp, tmp_path, corpus), Trainer.step_done
    folders = [CheckpointFolder(run.workdir) for run in plan.runs]
    for stop in (8, 6):

        def stopping(self, step, *args, stop=stop):
            step_done(self, step, *args)
            if step == stop:
                self.guard.signal = signal.SIGTERM

        monkeypatch.setattr(Trainer, "step_done", stopping)
        train(plan, PreemptionGuard())
        assert [one.steps() for one in folders] == [[4, stop]] * 2
        shutil.rmtree(folders[1].step_path(stop))
    assert capsys.readouterr().err.count("removed checkpoints 8, by which this seed was ahead") == 1


def test_every_folder_gets_the_soft_targets_that_a_seed_alone_resumes_with(tmp_path):
    def trainer(seed) -> Any:
        folder = tmp_path / f"seed_{seed}"
        folder.mkdir()
        load = lambda: (folder / FILE).write_bytes(b"targets")
        log = types.SimpleNamespace(workdir=str(folder))
        return types.SimpleNamespace(step=0, text=None, log=log, load_text=load)

    StackedSeeds([trainer(3), trainer(4)]).load_text()
    assert (tmp_path / "seed_4" / FILE).read_bytes() == b"targets"


@pytest.mark.parametrize(
    ("steps", "common"),
    [
        ({3: [4, 8], 4: [4]}, 4),
        ({3: [], 4: []}, 0),
        ({3: [4], 4: []}, 0),  # killed between the seeds' first saves
        ({3: [8], 4: [4]}, "seed_3: 8; .*seed_4: 4"),
        ({3: [], 4: [8, 12]}, "seed_3: none; .*seed_4: 8, 12"),  # e.g. a seed was added
    ],
)
def test_seeds_begin_again_only_before_all_have_a_checkpoint(folder, tmp_path, steps, common):
    changes = SETTINGS | {"checkpoint.every": 4, "train.eval_every": 0}
    corpus, exp = corpus_and_experiment(folder, **changes)
    plan = build_plan(exp, corpus, str(tmp_path))
    for seed, saved in steps.items():
        for step in saved:
            (tmp_path / f"seed_{seed}" / "checkpoints" / str(step)).mkdir(parents=True)
    if isinstance(common, int):
        assert common_step(plan) == common
        return
    with pytest.raises(CheckpointError, match=f"no step has a checkpoint of all seeds .*{common}"):
        common_step(plan)


@pytest.mark.slow
def test_the_command_trains_all_and_prints_a_number_for_each(folder, tmp_path):
    changes = SETTINGS | {"train.steps": 4, "average.swa_start": 2, "generate.length": 0}
    config = write_config(folder, **changes)
    done = call(f"--config={config}", f"--workdir={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-2:]
    assert [line.split(" bpc")[0] for line in lines] == ["seed 3: held-out", "seed 4: held-out"]
    assert (tmp_path / "runs/seed_4/evaluation.json").exists()
    assert "seed 4  step 4/4" in done.stderr


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1])
def test_every_seed_gives_the_key_that_it_gives_alone(seed):
    """Several seeds are passed as an array; a single run has its seed as a constant."""
    exps = [ExperimentConfig(seed=seed)]
    (of_array,) = jax.vmap(lambda s: jax.random.key_data(jax.random.key(s)))(seed_array(exps))
    assert of_array.tolist() == jax.random.key_data(jax.random.key(seed)).tolist()


def test_a_mesh_of_several_devices_is_refused(folder):
    with pytest.raises(ConfigError, match=r"^config key train.num_seeds = 2: all seeds run on"):
        override(experiment(folder), {"train.num_seeds": 2, "mesh.data": 2})


def test_a_folder_of_seeds_is_resumed_with_all_or_refused_with_the_only_one(folder, tmp_path):
    corpus, exp = corpus_and_experiment(folder, **SETTINGS)
    for seed in (3, 5):
        claimed(
            tmp_path / f"seed_{seed}", override(exp, {"seed": seed, "train.num_seeds": 1}), corpus
        )
        if seed == 3:
            with pytest.raises(
                WorkdirError, match=r"the only run in this folder is a seed; give workdir=.*/seed_3"
            ):
                stored_experiment(str(tmp_path))
    with pytest.raises(
        WorkdirError, match=r"seed_4 is missing between the other seeds; resume each"
    ):
        stored_experiment(str(tmp_path))
    shutil.copytree(tmp_path / "seed_3", tmp_path / "seed_4")
    found = stored_experiment(str(tmp_path))
    assert (found.seed, found.train.num_seeds) == (3, 3)


@pytest.mark.slow
def test_resumed_seeds_do_not_read_the_model_they_started_from(together, folder, tmp_path):
    started = tmp_path / "started_from"
    shutil.copytree(together / "seed_3", started)
    changes = SETTINGS | {"train.steps": 4, "average.swa_start": 2, "generate.length": 0}
    config = write_config(folder, **changes, **{"train.start_from": str(started)})
    arguments = (f"--config={config}", f"--workdir={tmp_path / 'runs'}")
    assert call(*arguments).returncode == 0
    shutil.rmtree(started)
    again = call(*arguments)
    assert again.returncode == 0, again.stderr
    assert "finished at step 4" in again.stderr
