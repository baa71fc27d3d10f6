"""A student learns the mean probabilities of its teachers, word by word."""

import dataclasses
import io
import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from tiny_runs import corpus_and_experiment, run, run_in_workdir, train

import txl_jax
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.config import ConfigError
from txl_jax.data.batch import SoftTargets
from txl_jax.training import distil
from txl_jax.training.distil import FILE, soft_targets, teacher_probabilities
from txl_jax.training.loss import soft_cross_entropy
from txl_jax.training.plan import training_streams
from txl_jax.training.preemption import PreemptionGuard

SHORT = {"train.steps": 6, "checkpoint.every": 6, "train.eval_every": 0}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """A folder with a text, and two workdirs trained on it with different seeds and step counts."""
    folder = tmp_path_factory.mktemp("teachers")
    names = []
    for seed, steps in ((1, 6), (2, 12)):
        names.append(str(folder / f"teacher_{seed}"))
        run_in_workdir(folder, names[-1], **SHORT | {"seed": seed, "train.steps": steps})
    return folder, names


def in_one_pass(trained, tokens):
    """Returns the next-token probabilities after each of the N tokens except the last.

    The result is [N - 1, vocabulary size]. The model reads all tokens as one segment.
    """
    mems = trained.model.init_mems(1, len(tokens))
    logits, _ = trained.model.apply({"params": trained.params}, tokens[None, :-1], mems)
    return np.asarray(jax.nn.softmax(logits[0]), np.float64)


@pytest.mark.slow
def test_soft_targets_are_the_mean_of_the_teachers(teachers):
    folder, names = teachers
    # One stream, and a memory longer than the text, give the same probabilities as one pass.
    settings = {"validate.batch_size": 1, "validate.mem_len": 128, "distil.words": 5}
    corpus, exp = corpus_and_experiment(folder, **settings)
    tokens = np.asarray(corpus.train)[:100]
    trained = [txl_jax.load(name) for name in names]
    soft: Any = teacher_probabilities([(t.model, t.params) for t in trained], tokens, exp)
    mean = sum(in_one_pass(t, tokens) for t in trained) / 2
    assert soft.words.shape == (100, 5)
    for i in range(1, 100):
        want = np.sort(mean[i - 1])[::-1][:5]
        np.testing.assert_allclose(soft.probabilities[i], want, rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(mean[i - 1][soft.words[i]], want, rtol=1e-4)
    assert soft.words[0, 0] == tokens[0]
    assert soft.probabilities[0].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.slow
def test_every_token_has_soft_targets_whatever_the_streams(teachers):
    folder, names = teachers
    corpus, exp = corpus_and_experiment(folder, **{"validate.batch_size": 7, "distil.words": 3})
    tokens = np.asarray(corpus.train)[:1001]
    trained = txl_jax.load(names[0])
    soft: Any = teacher_probabilities([(trained.model, trained.params)], tokens, exp)
    assert np.all(soft.probabilities[:, 0] >= soft.probabilities[:, 1])
    assert np.all(soft.probabilities[:, 0] > 0)
    assert all(len(set(row)) == 3 for row in soft.words.tolist())


def test_cross_entropy_is_of_the_words_and_the_rest():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(6), (2, 3))
    q = rng.dirichlet(np.ones(6), (2, 3))
    words = np.argsort(-p, axis=-1)[..., :2]
    of_words = np.take_along_axis(p, words, -1)
    got = soft_cross_entropy(jnp.log(q), SoftTargets(words.astype(np.uint16), of_words))
    for row in range(2):
        for i in range(3):
            likely = set(words[row, i].tolist())
            want = -sum(p[row, i, w] * np.log(q[row, i, w]) for w in likely)
            rest = [w for w in range(6) if w not in likely]
            want -= p[row, i, rest].sum() * np.log(q[row, i, rest].sum())
            np.testing.assert_allclose(got[row, i], want, rtol=1e-5)


def test_the_loss_is_least_at_the_probabilities_of_the_teacher():
    """The gradient is zero if the student has the teacher's probabilities."""
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(1, 1, 8)), jnp.float32)
    p = jax.nn.softmax(logits)
    likely, words = jax.lax.top_k(p, 4)
    loss = lambda z: jnp.sum(soft_cross_entropy(jax.nn.log_softmax(z), SoftTargets(words, likely)))
    np.testing.assert_allclose(jax.grad(loss)(logits), 0, atol=1e-6)
    assert np.abs(jax.grad(loss)(logits + jnp.arange(8.0))).max() > 0.1


@pytest.mark.integration
def test_a_student_of_itself_and_of_the_text(teachers, tmp_path):
    """``distil.weight`` is the teachers' share of the loss; 1 means that only teachers count.

    The logged loss is that of the text, whatever the weight.
    """
    folder, names = teachers
    short = {**SHORT, "train.steps": 3, "checkpoint.every": 3, "train.log_every": 1}
    changes = {"train.text_on_device": True, "distil.teachers": tuple(names)}
    ends = {}
    for weight in (None, 0.5, 1.0):
        own = {} if weight is None else {**changes, "distil.weight": weight}
        outcome = run(folder, tmp_path / str(weight), **short | own)
        lines = (tmp_path / str(weight) / "metrics.jsonl").read_text().splitlines()
        losses = [r["loss"] for r in map(json.loads, lines) if r["kind"] == "train"]
        ends[weight] = losses, jax.tree.leaves(outcome.state.params)
    first = lambda weight: ends[weight][0][0]  # before any update
    np.testing.assert_allclose([first(0.5), first(1.0)], first(None), rtol=1e-6)
    for one, other in ((None, 0.5), (0.5, 1.0)):
        same = [np.array_equal(*pair) for pair in zip(ends[one][1], ends[other][1], strict=True)]
        assert not all(same)


@pytest.mark.slow
def test_gradient_is_the_weighted_sum_of_both(teachers):
    from txl_jax.data.on_device import device_text, training_position
    from txl_jax.training.plan import StepSetup, training_mesh
    from txl_jax.training.step import accumulate_gradient

    folder, names = teachers

    def gradient(**changes):
        corpus, exp = corpus_and_experiment(
            folder, **{"train.text_on_device": True, "train.micro_batches": 2, **changes}
        )
        setup = StepSetup.on(training_mesh(exp), exp)
        streams = training_streams(exp, corpus)
        soft = soft_targets(exp, corpus, str(folder), print)
        batch = device_text(streams, soft).batch(training_position(streams, 0, "reset"))
        state = setup.initial_state(exp)
        return accumulate_gradient(state, batch, exp, setup.model, jax.random.key(0))[0]

    plain = gradient()
    whole = gradient(**{"distil.teachers": tuple(names), "distil.weight": 1.0})
    part = gradient(**{"distil.teachers": tuple(names), "distil.weight": 0.25})
    one, other = (ravel_pytree(x)[0] for x in (plain, whole))
    assert np.linalg.norm(one - other) > 0.1 * np.linalg.norm(one)
    mixed = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, plain, whole)
    for want, got in zip(jax.tree.leaves(mixed), jax.tree.leaves(part), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-7)


@pytest.mark.integration
def test_a_resumed_run_needs_no_teacher(teachers, tmp_path):
    folder, names = teachers
    changes = {"train.text_on_device": True, "distil.teachers": (names[0],)}
    corpus, exp = corpus_and_experiment(folder, **changes)
    found: list[str] = []
    read: Any = lambda exp: soft_targets(exp, corpus, str(tmp_path), found.append)
    first, again = read(exp), read(exp)
    assert len(found) == 1
    np.testing.assert_array_equal(again.words, first.words)
    np.testing.assert_array_equal(again.probabilities, first.probabilities)
    assert (tmp_path / FILE).exists()


@pytest.mark.integration
def test_a_resumed_run_with_other_validate_settings_keeps_its_targets(
    teachers, tmp_path, monkeypatch
):
    folder, names = teachers
    changes = {"train.text_on_device": True, "distil.teachers": (names[0],)}
    corpus, exp = corpus_and_experiment(folder, **changes)
    at_first: Any = soft_targets(exp, corpus, str(tmp_path), print)
    monkeypatch.setattr("txl_jax.training.distil._load_teacher", None)  # no teacher can be loaded
    other = {"validate.max_segments": 2, "validate.mem_len": 4, "validate.batch_size": 2}
    _, exp = corpus_and_experiment(folder, **changes, **other)
    resumed: Any = soft_targets(exp, corpus, str(tmp_path), print)
    np.testing.assert_array_equal(resumed.words, at_first.words)
    np.testing.assert_array_equal(resumed.probabilities, at_first.probabilities)


@pytest.mark.slow
def test_a_run_stopped_while_teachers_read_is_saved_and_resumes_to_the_same_end(teachers, tmp_path):
    folder, names = teachers
    changes = {**SHORT, "train.text_on_device": True, "distil.teachers": (names[0],)}
    corpus, exp = corpus_and_experiment(folder, **changes)
    whole = train(exp, corpus, str(tmp_path / "whole"), PreemptionGuard())

    class StopInside(PreemptionGuard):
        def requested(self):
            return True

    stopped = train(exp, corpus, str(tmp_path / "cut"), StopInside())
    assert not stopped.finished
    assert int(stopped.state.step) == 0
    assert not (tmp_path / "cut" / FILE).exists()
    cut = train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard())
    for want, got in zip(*(jax.tree.leaves(x.state.params) for x in (whole, cut)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.integration
def test_unsuitable_teachers_are_refused(teachers, tmp_path):
    folder, names = teachers
    on = {"train.text_on_device": True}
    corpus, exp = corpus_and_experiment(folder, **on, **{"distil.teachers": ("runs/none",)})
    with pytest.raises(ConfigError, match=r"distil\.teachers: runs/none: there is no such folder"):
        soft_targets(exp, corpus, str(tmp_path), print)
    other = tmp_path / "other"
    other.mkdir()
    (other / "text.txt").write_text("xyz 123\n" * 400)
    changes = {**on, "distil.teachers": (names[0],), "data.path": str(other / "text.txt")}
    corpus, exp = corpus_and_experiment(other, **changes)
    with pytest.raises(ConfigError, match="the teacher has another vocabulary than"):
        soft_targets(exp, corpus, str(tmp_path), print)
    with pytest.raises(ConfigError, match=r"distil\.teachers.*needs train\.text_on_device"):
        corpus_and_experiment(folder, **{"distil.teachers": (names[0],)})


@pytest.mark.parametrize("kept", [0, 100, -1], ids=["empty", "cut", "cut at its end"])
def test_damaged_soft_targets_are_refused_in_one_line(tmp_path, kept):
    whole = io.BytesIO()
    np.savez(whole, words=np.zeros((9, 2), np.uint16), probabilities=np.zeros((9, 2), np.float16))
    (tmp_path / FILE).write_bytes(whole.getvalue()[:kept])
    changes = {"train.text_on_device": True, "distil.teachers": (str(tmp_path),)}
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    with pytest.raises(WorkdirError, match=r"soft_targets\.npz: is damaged \(.*\); remove this"):
        soft_targets(exp, corpus, str(tmp_path), print)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"same_length": "pytorch"}, "validate.mem_len: same_length='pytorch' allows only"),
        ({"same_length": "tf"}, "validate.context_len: same_length='tf' allows only"),
        (
            {"attention": "absolute_per_layer", "n_positions": 23},
            "validate.seg_len: a segment with its context has up to 24 tokens",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_the_lengths_of_validation_is_refused(
    tmp_path, monkeypatch, settings, rule
):
    changes: dict[str, Any] = {"distil.teachers": (str(tmp_path),), "train.text_on_device": True}
    changes |= {f"{part}.mem_len": 0 for part in ("train", "validate", "evaluate")}
    corpus, exp = corpus_and_experiment(tmp_path, **changes, **{"validate.context_len": 8})
    model = txl_jax.TransformerXL(dataclasses.replace(exp.model, **settings))
    teacher = types.SimpleNamespace(model=model, vocab=corpus.vocab, params=None)
    monkeypatch.setattr(distil, "load", lambda folder: teacher)
    with pytest.raises(ConfigError, match=f"the teacher cannot be read with this {rule}"):
        soft_targets(exp, corpus, str(tmp_path / "run"), print)
