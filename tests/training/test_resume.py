"""A run that was stopped in any way and resumed is bit-identical to an uninterrupted run."""

import collections
import dataclasses
import json
import random
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest
from run_records import StopAt, assert_same_run, final_state, records
from tiny_runs import call, corpus_and_experiment, interrupt, lm1b, run, train, write_config

from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.data.feed import training_batch
from txl_jax.data.streams import shuffled_streams
from txl_jax.training import trainer
from txl_jax.training.plan import training_streams
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.skipping import NonFiniteError

DROPOUT = {"model.dropout": 0.2, "model.dropatt": 0.1}


WITHOUT_MEMORY = {
    "model.attention": "absolute",
    "optimizer.name": "lamb",
    "loss.tar": 0.5,
    "train.steps_per_dispatch": 2,
    "train.log_every": 4,
    **{f"{section}.mem_len": 0 for section in ("train", "validate", "evaluate")},
    **{f"{section}.context_len": 8 for section in ("train", "validate", "evaluate")},
}


MUON = {"optimizer.name": "muon", "average.ema_decay": 0.5}
OPTAX = {
    "optimizer.name": "optax.adafactor",
    "optimizer.arguments.min_dim_size_to_factor": 8,
    "optimizer.embedding_ratio": 0.5,
    "average.swa_start": 3,
}


STOPS = (1, 3, 6, 9, 12, 15)  # the run stops when it asks its guard for the n-th time, for each n
DISPATCH = {"train.steps_per_dispatch": 2, "train.log_every": 4}


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        pytest.param(DROPOUT, (1, 6), id="dropout"),
        pytest.param(DROPOUT, STOPS, id="dropout, often", marks=pytest.mark.slow),
        pytest.param(MUON, STOPS, id="muon", marks=pytest.mark.slow),
        pytest.param(OPTAX, STOPS, id="optax", marks=pytest.mark.slow),
        pytest.param(DISPATCH, STOPS, id="dispatch", marks=pytest.mark.slow),
        pytest.param(WITHOUT_MEMORY, STOPS, id="without memory", marks=pytest.mark.slow),
    ],
)
def test_stopped_at_any_step_and_resumed_is_bit_identical(tmp_path, changes, asked):
    changes = {"checkpoint.every": 4, "train.steps": 12, **changes}
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    run(tmp_path, tmp_path / "whole", **changes)
    stops = 0
    for n in asked:
        outcome = train(exp, corpus, str(tmp_path / "cut"), StopAt(n))
        stops += not outcome.finished
        if step := int(outcome.state.step):  # saved where it stopped, not only at multiples of 4
            assert (tmp_path / "cut" / "checkpoints" / str(step)).is_dir()
    while not outcome.finished:
        outcome = train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard())
    assert stops >= 2
    assert_same_run(tmp_path, tmp_path / "whole", tmp_path / "cut", **changes)


@pytest.mark.slow
def test_sentences_train_over_epochs_and_resume_bit_identically(tmp_path):
    """The run reads a small lm1b for three epochs, and is stopped in the first and the second."""
    changes = {
        "data.name": "lm1b",
        "data.path": str(lm1b(tmp_path)),
        "data.vocab": None,
        "train.epoch_memory": "carry",
        "train.steps": 24,
        "validate.max_segments": 0,
        **DROPOUT,
    }
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    run(tmp_path, tmp_path / "whole", **changes)
    for n in (5, 8):  # validation asks the guard, too
        assert not train(exp, corpus, str(tmp_path / "cut"), StopAt(n)).finished
    assert train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard()).finished
    assert_same_run(tmp_path, tmp_path / "whole", tmp_path / "cut", **changes)

    found = records(tmp_path / "whole")
    streams = shuffled_streams(corpus.train, 4, 16, seed=exp.seed)
    assert found[-1]["epoch"] == pytest.approx(24 / streams.n_segments, abs=1e-3)
    assert found[-1]["epoch"] > 2
    words = (tmp_path / "lm1b" / "valid.txt").read_text().split("\n")[:-1]
    targets = sum(len(line.split()) + 1 for line in words)
    assert [r["targets"] for r in found if r["kind"] == "valid"] == [targets] * 4


def test_another_seed_reads_sentences_in_another_order(tmp_path):
    changes = {"data.name": "lm1b", "data.path": str(lm1b(tmp_path)), "data.vocab": None}
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    other = dataclasses.replace(exp, seed=exp.seed + 1)
    first, again, second = (
        [training_batch(training_streams(e, corpus), s, "carry").targets for s in range(12)]
        for e in (exp, exp, other)
    )
    np.testing.assert_array_equal(first, again)
    assert np.mean(np.array(first) != np.array(second)) > 0.3
    n = training_streams(exp, corpus).n_segments
    assert np.mean(first[0] != first[n]) > 0.3  # a new order every epoch


@pytest.mark.slow
def test_stopped_while_validating_validates_again_and_is_bit_identical(tmp_path):
    corpus, exp = corpus_and_experiment(tmp_path)
    run(tmp_path, tmp_path / "whole")

    class StopInValidation(PreemptionGuard):
        def requested(self):
            import inspect

            caller = inspect.stack()[1].function
            if caller == "run":  # Evaluator.run
                self.signal = signal.SIGTERM
            return self.signal is not None

    for _ in range(2):  # stopped in the same validation twice
        assert not train(exp, corpus, str(tmp_path / "cut"), StopInValidation()).finished
    assert train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard()).finished
    assert_same_run(tmp_path, tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_killed_between_a_late_validation_and_its_checkpoint_logs_it_once(tmp_path, monkeypatch):
    corpus, exp = corpus_and_experiment(tmp_path)
    run(tmp_path, tmp_path / "whole")
    stop = PreemptionGuard()
    stop_in_validation = lambda *_, **__: setattr(stop, "signal", signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr("txl_jax.evaluation.evaluator.Evaluator.run", stop_in_validation)
        assert not train(exp, corpus, str(tmp_path / "cut"), stop).finished
    with monkeypatch.context() as patch:  # the record is written, the checkpoint is not
        patch.setattr(Checkpoints, "replace", lambda *_: (_ for _ in ()).throw(SystemExit(9)))
        with pytest.raises(SystemExit):
            train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard())
    assert train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard()).finished
    assert_same_run(tmp_path, tmp_path / "whole", tmp_path / "cut")


@pytest.mark.integration
def test_a_finished_run_started_again_changes_nothing(tmp_path):
    run(tmp_path, tmp_path / "run")
    before = records(tmp_path / "run"), final_state(tmp_path, tmp_path / "run")
    assert run(tmp_path, tmp_path / "run").finished
    assert records(tmp_path / "run") == before[0]
    for key, value in final_state(tmp_path, tmp_path / "run").items():
        np.testing.assert_array_equal(value, before[1][key])


@pytest.mark.integration
def test_a_resumed_run_says_that_its_validation_has_changed(tmp_path, capsys):
    """The best checkpoint is chosen by validation loss, which other settings can change."""
    few = {"train.steps": 4, "train.eval_every": 2}
    run(tmp_path, tmp_path / "run", **few)
    assert "validation has changed" not in capsys.readouterr().err
    run(tmp_path, tmp_path / "run", **few, **{"validate.batch_size": 2})
    assert "validation has changed" not in capsys.readouterr().err
    run(tmp_path, tmp_path / "run", **few, **{"validate.temperature": 1.5})
    said = "since checkpoint 4 validation has changed (validate.temperature: 1.0 -> 1.5); the best"
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def killed_folder(tmp_path_factory):
    """A folder with a text and the finished run ``whole``, and that run's config of 400 steps."""
    folder = tmp_path_factory.mktemp("killed")
    config = write_config(folder, **KILLED)
    done = call(f"--config={config}", f"--workdir={folder / 'whole'}")
    assert done.returncode == 0, done.stderr
    return folder, config


KILLED: dict[str, Any] = {
    **DROPOUT,
    "train.steps": 400,
    "train.log_every": 7,
    "train.eval_every": 90,
    "checkpoint.every": 25,
    "generate.length": 0,
}


def _last_step(metrics):
    """The step of the last complete record in a file that is being written."""
    steps = [0]
    for line in metrics.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            steps.append(json.loads(line)["step"])
    return steps[-1]


def kill_and_resume(killed_folder, name, seed):
    """Kills a run at a random step, resumes it, and compares it with an uninterrupted run."""
    folder, config = killed_folder
    workdir = folder / name
    arguments = (f"--config={config}", f"--workdir={workdir}")
    draw = random.Random(seed)
    step, pause = draw.randrange(0, KILLED["train.steps"] - 10), draw.uniform(0, 0.1)

    def now():
        metrics = workdir / "metrics.jsonl"
        there = metrics.exists() and (not step or _last_step(metrics) >= step)
        if there:
            time.sleep(pause)
        return there

    code, _ = interrupt(signal.SIGKILL, *arguments, when=now)
    resumed = call(*arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(folder, folder / "whole", workdir, **KILLED)
    return code


@pytest.mark.slow
def test_kill_9_at_a_random_moment_and_resume_is_bit_identical(killed_folder):
    assert kill_and_resume(killed_folder, "killed", seed=1) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_kill_9_at_ten_random_moments_and_resume_is_bit_identical(killed_folder, seed):
    code = kill_and_resume(killed_folder, f"killed-{seed}", seed=100 + seed)
    assert code == -signal.SIGKILL


RANDOM_KILLS: dict[str, Any] = {
    **KILLED,
    "train.steps": 1500,
    "train.eval_every": 50,
    "validate.max_segments": 0,
}


def where_killed(workdir, records_before):
    """What a killed run was doing, judged by the files that it left."""
    metrics = workdir / "metrics.jsonl"
    if any((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*")):
        return "saving"
    if not metrics.exists() or metrics.read_bytes() == records_before:
        return "starting up"
    return "training or validating"


@pytest.mark.slow
def test_kill_9_at_twenty_random_times_and_resume_is_bit_identical(tmp_path, capsys):
    """Each run is killed after a random number of seconds and resumed, up to four times.

    Each kill comes within the time that an uninterrupted run takes, so the killed process can be
    starting up, training, validating or saving.
    """
    config = write_config(tmp_path, **RANDOM_KILLS)
    arguments = lambda name: (f"--config={config}", f"--workdir={tmp_path / name}")
    for name in ("cold", "whole"):  # the second run finds the compiled step and the prepared text
        started = time.monotonic()
        assert call(*arguments(name)).returncode == 0
        seconds = time.monotonic() - started
    hits: collections.Counter[str] = collections.Counter()
    draw, n_runs = random.Random(22), 0
    while hits.total() < 20:
        workdir, kills, code = tmp_path / f"run_{n_runs}", 0, -signal.SIGKILL
        n_runs += 1
        while code == -signal.SIGKILL and kills < 4 and hits.total() < 20:
            metrics = workdir / "metrics.jsonl"
            before = metrics.read_bytes() if metrics.exists() else b""
            end = time.monotonic() + draw.uniform(0, seconds)
            after_a_while = lambda end=end: time.monotonic() >= end
            code, output = interrupt(signal.SIGKILL, *arguments(workdir.name), when=after_a_while)
            assert code in (0, -signal.SIGKILL), output
            if code:
                kills += 1
                hits[where_killed(workdir, before)] += 1
        resumed = call(*arguments(workdir.name))
        assert resumed.returncode == 0, resumed.stderr
        assert_same_run(tmp_path, tmp_path / "whole", workdir, **RANDOM_KILLS)
    with capsys.disabled():
        where = ", ".join(f"{n} {what}" for what, n in hits.most_common())
        print(f"\n{hits.total()} kills hit in {n_runs} runs ({where}); all runs are identical")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGHUP, 0), (signal.SIGTERM, 0), (signal.SIGUSR1, 0), (signal.SIGINT, 130)],
)
def test_a_signal_saves_and_exits_with_the_command_to_resume(killed_folder, sent, code):
    folder, config = killed_folder
    workdir = folder / sent.name
    arguments = (f"--config={config}", f"--workdir={workdir}")
    got, output = interrupt(sent, *arguments, when=lambda: (workdir / "checkpoints/25").is_dir())
    assert got == code, output
    assert f"stopped by {sent.name}, and the state is saved; to resume:" in output
    assert f"  {sys.executable} -m txl_jax.main --config={config} --workdir={workdir}\n" in output
    assert (workdir / "loss.png").exists()
    resumed = call(*arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at step" in resumed.stderr
    assert_same_run(folder, folder / "whole", workdir, **KILLED)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    corpus, exp = corpus_and_experiment(tmp_path, **{"checkpoint.every": 2})

    def spoilt(streams, step, *arguments, **more):
        for i, batch in enumerate(feed(streams, step, *arguments, **more)):
            yield batch.replace(weights=batch.weights * np.nan) if i == 4 else batch

    feed = trainer.training_feed
    monkeypatch.setattr(trainer, "training_feed", spoilt)
    with pytest.raises(NonFiniteError) as caught:
        train(exp, corpus, str(tmp_path / "run"), PreemptionGuard())
    assert str(caught.value) == (
        "training loss is nan at step 5; training stopped, and checkpoint 4 is kept. Try a lower"
        " optimizer.learning_rate, more optimizer.warmup_steps, or model.dtype float32"
    )
    with Checkpoints(str(tmp_path / "run")) as checkpoints:
        assert checkpoints.steps() == [2, 4]


def test_an_absurd_learning_rate_is_stopped_by_name(tmp_path):
    corpus, exp = corpus_and_experiment(
        tmp_path, **{"optimizer.learning_rate": 1e38, "optimizer.warmup_steps": 0}
    )
    with pytest.raises(
        NonFiniteError, match=r"is (nan|inf) at step \d+; training stopped, and no checkpoint"
    ):
        train(exp, corpus, str(tmp_path / "run"), PreemptionGuard())


@pytest.mark.integration
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_tiny_run_beats_the_unigram_baseline(tmp_path, dtype):
    from txl_jax.evaluation.baselines import cross_entropy, unigram

    changes = {
        "train.steps": 150,
        "train.eval_every": 0,
        "validate.max_segments": 0,
        "checkpoint.every": 150,
        "model.dtype": dtype,
    }
    corpus, _ = corpus_and_experiment(tmp_path, **changes)
    run(tmp_path, tmp_path / "run", **changes)
    valid = [r for r in records(tmp_path / "run") if r["kind"] == "valid"][-1]
    assert valid["targets"] == len(corpus.valid) - 1
    size = len(corpus.vocab)
    assert valid["loss"] < cross_entropy(unigram(corpus.train, size), corpus.valid, size) - 0.5
