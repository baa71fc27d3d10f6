"""A plan builds each part of a run once, and raises an error if the run cannot work."""

import collections
import functools
import re
import sys
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs

from txl_jax import modes
from txl_jax.config import ConfigError, override
from txl_jax.data import symbols
from txl_jax.data.corpus import DataError
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.parallel import mesh as meshes
from txl_jax.training import plan
from txl_jax.training.plan import StepSetup, plan_run, training_mesh
from txl_jax.training.preemption import PreemptionGuard

SHORT = {"train.steps": 2, "train.eval_every": 0, "generate.length": 0}
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@pytest.fixture
def counts(monkeypatch):
    """Returns a counter of what is built: meshes, evaluators, first states and streams.

    The counter also counts passes over token ids.
    """
    found: collections.Counter[str] = collections.Counter()

    def counted(owner, name, what):
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args, **kwargs):
            found[what(*args, **kwargs)] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(meshes, "_mesh", lambda *_: "mesh")
    counted(Evaluator, "__init__", lambda *_, **__: "evaluator")
    counted(plan, "init_state", lambda *_: "first state")  # JAX calls it once per trace
    counted(plan, "shuffled_streams", lambda *_, name="", **__: f"streams of {name}")
    chunks = symbols.chunks
    size = lambda tokens: f"ids of {len(tokens)}"
    monkeypatch.setattr(
        symbols, "chunks", lambda tokens: found.update([size(tokens)]) or chunks(tokens)
    )
    return found


@pytest.mark.integration
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_run_builds_each_part_once_and_does_not_check_ids_again(tmp_path, counts, seeds):
    exp = tiny_runs.experiment(tmp_path, **SHORT, **{"train.num_seeds": seeds})
    seen = plan_run(exp, str(tmp_path / "seen"))  # prepares the text
    train = np.asarray(seen.corpus.train)
    trained_on = f"ids of {len(train)}"
    list(symbols.chunks(train))
    assert counts[trained_on] == 1, "a pass over the ids is counted"
    counts.clear()
    assert modes.train(exp, str(tmp_path / "run")) == 0
    assert counts["mesh"] == 2, "of training, and of the final evaluation"
    assert counts["evaluator"] == 3, "of validation, and of the final evaluation's two protocols"
    assert counts["streams of the train split"] == seeds
    assert counts[trained_on] == 0, "the prepared file has the recorded hash"
    assert counts["first state"] == 2, "of one layer, for its size, and of the run"


def test_from_the_command_to_an_update_are_at_most_seven_calls(tmp_path, monkeypatch):
    """The calls are ``main``, ``run``, those down to the loop, and the compiled program."""
    called: list[str] = []

    def requested(self: Any) -> bool:
        frame: Any = sys._getframe(1)
        while frame is not None and not called:
            names = []
            while frame is not None and "txl_jax" in frame.f_globals.get("__name__", ""):
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            called.extend(names)
        return True

    monkeypatch.setattr(PreemptionGuard, "requested", requested)
    modes.train(tiny_runs.experiment(tmp_path, **SHORT), str(tmp_path / "run"))
    assert called[0] == "train", "the loop asks before each update"
    assert len(["main", "run", *called, "program"]) <= 7, called


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"train.batch_size": 100_000}, DataError, "the train split has"),
        ({"validate.batch_size": 100_000}, DataError, "the valid split has"),
        ({"evaluate.batch_size": 100_000}, DataError, "the test split has"),
        ({"train.mem_len": 100_000}, ConfigError, "train.mem_len = 100000: a stream of the train"),
        ({"model.vocab_size": 5}, ConfigError, "model.vocab_size = 5"),
        ({"generate.prompt": "\u20ac", "generate.length": 8}, DataError, "generate.prompt"),
        ({"mesh.data": 3}, ConfigError, "mesh.data = 3"),
        ({"model.kernel": "triton"}, ConfigError, "model.kernel = 'triton' needs an NVIDIA GPU"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_work_raises_before_the_workdir_exists(tmp_path, changes, error, words):
    exp = override(tiny_runs.experiment(tmp_path, **SHORT), changes)
    with pytest.raises(error, match=re.escape(words)):
        plan_run(exp, str(tmp_path / "runs" / "run"))
    assert not (tmp_path / "runs").exists()


def test_the_first_state_is_lowered_with_draws_that_share_a_kernel(tmp_path):
    """If each parameter's draw had its own kernel, XLA would compile for minutes for a GPU."""
    draws = lambda: jax.config.jax_threefry_gpu_kernel_lowering  # type: ignore[attr-defined]
    exp = override(tiny_runs.experiment(tmp_path), {"model.vocab_size": 7})
    setup, seen = StepSetup.on(training_mesh(exp), exp), list[bool]()

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == LOWERED and about.get("fun_name") == "jit(draw)":
            seen.append(draws())

    jax.monitoring.register_event_duration_secs_listener(listen)
    setup.lower_initialise()
    jax.monitoring.unregister_event_duration_listener(listen)
    assert (seen, draws()) == ([True], False)
