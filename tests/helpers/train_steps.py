"""Runs a few training steps under any settings, and compares two such runs."""

import numpy as np
from tiny_runs import arrays, corpus_and_experiment

from txl_jax.data.feed import training_feed
from txl_jax.training.plan import StepSetup, training_mesh, training_streams

STEPS = 4


def train_steps(folder, **changes):
    """State and per-step metrics after a few steps under some settings."""
    changes = {"train.batch_size": 8, "model.n_layer": 1, **changes}
    corpus, exp = corpus_and_experiment(folder, **changes)
    t = exp.train
    setup = StepSetup.on(training_mesh(exp), exp)
    state, step = setup.initial_state(exp), setup.update()
    streams = training_streams(exp, corpus)
    several = t.steps_per_dispatch > 1
    feed = training_feed(
        streams,
        0,
        STEPS,
        t.epoch_memory,
        t.steps_per_dispatch,
        setup.shardings.rows(several),
        t.reset_every,
    )
    history = []
    for batch in feed:
        state, metrics = step(state, batch)
        history.append({k: np.atleast_1d(v) for k, v in metrics.items()})
    joined = {k: np.concatenate([m[k] for m in history]) for k in history[0]}
    return state, joined


def assert_same_training(a, b, tolerance):
    (state_a, metrics_a), (state_b, metrics_b) = a, b
    for key in metrics_a:
        np.testing.assert_allclose(
            metrics_a[key], metrics_b[key], rtol=tolerance, atol=1e-9, err_msg=key
        )
    for key, value in arrays(state_a.mems).items():
        np.testing.assert_allclose(value, arrays(state_b.mems)[key], rtol=0, atol=1e-4, err_msg=key)
