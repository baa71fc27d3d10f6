"""A run with ``train.profile`` leaves a trace of the steps that the setting names."""

import gzip
import json

import jax
import pytest
from tiny_runs import corpus_and_experiment, experiment, train

from txl_jax.config import ConfigError
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.profile import traced_steps


@pytest.fixture
def calls(monkeypatch):
    """A list of the profiler's calls in order, to which the test adds each step that it runs."""
    made: list = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: made.append(f"to {folder}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
    return made


@pytest.mark.parametrize(
    ("steps", "seen", "expected"),
    [
        ((2, 4), range(7), [0, 1, 2, "to run/tensorboard", 3, 4, "stop", 5, 6]),
        ((3, 5), range(0, 9, 2), [0, 2, 4, "to run/tensorboard", 6, "stop", 8]),
        ((0, 9), range(3), [0, "to run/tensorboard", 1, 2, "stop"]),  # the run ends early
        ((1, 2), range(5, 7), [5, 6]),  # resumed after the steps to trace
        (None, range(3), [0, 1, 2]),
    ],
)
def test_the_trace_has_the_steps_between_start_and_stop(calls, steps, seen, expected):
    with traced_steps(steps, "run", lambda line: None) as trace:
        for step in seen:
            calls.append(step)
            trace(step, jax.numpy.zeros(()))
    assert calls == expected


@pytest.mark.parametrize(("seen", "last"), [(range(0, 13, 4), 8), (range(0, 5, 4), 4)])
def test_the_message_has_the_last_step_of_the_trace(calls, seen, last):
    lines: list[str] = []
    with traced_steps((2, 7), "run", lines.append) as trace:
        for step in seen:
            trace(step, jax.numpy.zeros(()))
    assert lines == [f"traced steps to {last}: run/tensorboard"]


@pytest.mark.parametrize("wrong", ["5", "5:5", "7:3", "a:b", "-1:4", "1:2:3"])
def test_other_texts_than_a_range_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match=r"train\.profile.*must be START:STOP"):
        experiment(tmp_path, **{"train.profile": wrong})


def test_a_range_beyond_the_last_step_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.profile.*must stop at train.steps 12"):
        experiment(tmp_path, **{"train.profile": "10:13"})


@pytest.mark.slow
def test_a_run_leaves_a_trace_that_tensorboard_and_perfetto_read(tmp_path, capsys):
    corpus, exp = corpus_and_experiment(tmp_path, **{"train.profile": "6:9"})
    train(exp, corpus, str(tmp_path / "run"), PreemptionGuard())
    assert f"traced steps to 9: {tmp_path}/run/tensorboard" in capsys.readouterr().err
    folder = tmp_path / "run" / "tensorboard" / "plugins" / "profile"
    (xplane,) = folder.glob("*/*.xplane.pb")  # for xprof and TensorBoard
    assert b"train_step" in xplane.read_bytes() or b"jit_updates" in xplane.read_bytes()
    (events,) = folder.glob("*/*.trace.json.gz")  # for Perfetto
    assert json.loads(gzip.decompress(events.read_bytes()))["traceEvents"]
