"""Batches that the device cuts out of the text equal batches that the host sends to the device.

A run with ``train.text_on_device`` ends with exactly the same parameters as a run without it.
"""

import dataclasses
import types
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import corpus_and_experiment, run

from txl_jax.config import ConfigError
from txl_jax.data.batch import SoftTargets
from txl_jax.data.feed import training_batch
from txl_jax.data.on_device import device_text, training_position
from txl_jax.data.streams import shuffled_streams
from txl_jax.training.plan import training_streams

TOKENS = np.random.default_rng(0).integers(0, 50, 403)
KINDS: dict[str, Any] = {
    "plain": {},
    "partial shuffle": {"partial_shuffle": True},
    "drawn lengths": {"seg_len_std": 2.0},
    "partial shuffle, drawn lengths": {"partial_shuffle": True, "seg_len_std": 2.0},
    "context": {"context_len": 7},
    "context longer than a segment, partial shuffle": {"context_len": 25, "partial_shuffle": True},
    "context, drawn lengths": {"context_len": 7, "seg_len_std": 2.0, "partial_shuffle": True},
}


def streams(**about):
    return shuffled_streams(TOKENS, batch_size=3, seg_len=12, seed=4, **about)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("memory", "every"), [("reset", 0), ("carry", 5)])
def test_batches_are_those_that_are_sent(kind, memory, every):
    there = streams(**KINDS[kind])
    text = device_text(there)
    batch_at = jax.jit(lambda text, at: text.batch(at))
    for step in range(3 * there.n_segments):  # three epochs; a partial shuffle differs in each
        want = training_batch(there, step, memory, every)
        got = batch_at(text, training_position(there, step, memory, every))
        for field in ("inputs", "targets", "weights", "reset"):
            want_field, got_field = getattr(want, field), getattr(got, field)
            np.testing.assert_array_equal(got_field, want_field, err_msg=f"{field}, step {step}")
            assert got_field.dtype == want_field.dtype


def test_soft_targets_are_those_of_the_targets():
    there = streams(partial_shuffle=True, seg_len_std=2.0)
    numbered = np.arange(len(TOKENS))
    soft = SoftTargets(numbered[:, None] * [1, 10], numbered[:, None] * [0.5, 0.25])
    text = device_text(there, soft)
    places = shuffled_streams(numbered, 3, 12, seed=4, partial_shuffle=True, seg_len_std=2.0)
    for step in range(there.n_segments):
        got = text.batch(training_position(there, step, "reset")).soft
        want = training_batch(places, step, "reset")
        assert got is not None
        real = want.weights > 0
        np.testing.assert_array_equal(got.words[..., 1][real], 10 * want.targets[real])
        np.testing.assert_allclose(got.probabilities[..., 0][real], 0.5 * want.targets[real])


def params_of(outcome):
    return [np.asarray(x) for x in jax.tree.leaves(outcome.state.params)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"train.seg_len_std": 2.0, "train.partial_shuffle": True, "train.steps_per_dispatch": 3},
        pytest.param(
            {"train.micro_batches": 2, "mesh.data": 2, "train.reset_every": 5},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["drawn, shuffled, three a dispatch", "two devices, two parts"],
)
@pytest.mark.usefixtures("as_users_compile")
def test_a_run_ends_in_the_same_bits(tmp_path, changes):
    """Runs with and without ``train.text_on_device`` end with identical parameters.

    Both are compiled with the optimisations that users get. With the fewer optimisations that other
    tests use, the parameters would differ.
    """
    if changes.get("train.steps_per_dispatch"):
        changes = {**changes, "checkpoint.every": 6}
    sent = run(tmp_path, tmp_path / "sent", **changes)
    cut = run(tmp_path, tmp_path / "cut", **changes, **{"train.text_on_device": True})
    for want, got in zip(params_of(sent), params_of(cut), strict=True):
        np.testing.assert_array_equal(got, want)


def test_several_processes_are_refused_before_any_work(tmp_path, monkeypatch):
    corpus, exp = corpus_and_experiment(tmp_path, **{"train.text_on_device": True})
    training_streams(exp, corpus)
    of = lambda process: types.SimpleNamespace(process_index=process)
    monkeypatch.setattr(jax, "devices", lambda: [of(0), of(1)])
    with pytest.raises(ConfigError, match=r"train\.text_on_device: needs a single process"):
        training_streams(exp, corpus)
    sent = dataclasses.replace(exp, train=dataclasses.replace(exp.train, text_on_device=False))
    training_streams(sent, corpus)
