"""Compares the records and final states of two runs, and defines a guard that stops a run."""

import json
import signal

import jax
import numpy as np
import pytest
from tiny_runs import arrays, corpus_and_experiment

import txl_jax
from txl_jax import paths
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.state import init_state


def records(workdir):
    """The records of metrics.jsonl without their times."""
    lines = paths.path(str(workdir), "metrics.jsonl").read_bytes().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "timing"} for line in lines]


def final_state(folder, workdir, **changes):
    """Every array of the newest checkpoint."""
    _, exp = corpus_and_experiment(folder, **changes)
    model = txl_jax.TransformerXL(exp.model)
    state = jax.eval_shape(lambda: init_state(exp, model, make_optimizer(exp)))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state
    )
    with Checkpoints(str(workdir)) as checkpoints:
        restored = checkpoints.restore(abstract, exp.to_dict())
    assert restored is not None
    assert int(restored[0].step) == exp.train.steps
    return arrays(restored[0])


def assert_same_run(folder, a, b, **changes):
    assert records(a) == records(b)
    want, got = final_state(folder, a, **changes), final_state(folder, b, **changes)
    for key in want:
        np.testing.assert_array_equal(want[key], got[key], err_msg=key)


class StopAt(PreemptionGuard):
    """A guard that asks for a stop when the run queries it for the n-th time."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def requested(self):
        self.left -= 1
        if self.left == 0:
            self.signal = signal.SIGTERM
        return self.signal is not None


def assert_near(a, b, tolerance=1e-5):
    """Asserts that records are equal, floats up to the relative ``tolerance``."""
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if isinstance(value, float):
                assert other[key] == pytest.approx(value, rel=tolerance), (one["step"], key)
            else:
                assert other[key] == value


def assert_near_state(a, b, tolerance=1e-5):
    """Asserts that arrays differ by at most ``tolerance`` times the largest entry of each."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        limit = tolerance * np.max(np.abs(value), initial=1e-2)
        np.testing.assert_allclose(b[key], value, rtol=0, atol=limit, err_msg=key)
