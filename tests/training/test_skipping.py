"""A skipped update changes no parameter and no moment of the optimizer.

This also holds with micro-batches, and if one call of the compiled program does several steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from run_records import StopAt, assert_same_run, records
from tiny_runs import arrays, corpus_and_experiment, train

import txl_jax
from txl_jax.data.feed import training_batch
from txl_jax.training import skipping
from txl_jax.training import step as step_module
from txl_jax.training.optimizer import RecentNorm, make_optimizer, recent_norm
from txl_jax.training.plan import StepSetup, training_mesh, training_streams
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.skipping import (
    NonFiniteError,
    SkippedError,
    non_finite_leaf,
    skip_bad_update,
    skip_reason,
)
from txl_jax.training.step import train_step

SKIP = {"train.non_finite": "skip"}
ON_A_MESH = {"mesh.fsdp": 2, "mesh.tensor": 2, "train.micro_batches": 2}
CUTS = [{}, pytest.param(ON_A_MESH, marks=pytest.mark.slow)]
_prepared: dict = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


def prepared(folder, **changes):
    """Returns (from a cache) experiment, model, optimizer, first state, compiled step, batches."""
    key = str(sorted(changes.items()))
    if key not in _prepared:
        _prepared[key] = _prepare(folder, **changes)
    *made, batches = _prepared[key]
    return *made, list(batches)


def _prepare(folder, **changes):
    corpus, exp = corpus_and_experiment(folder, **{"model.n_layer": 1, **changes})
    setup = StepSetup.on(training_mesh(exp), exp)
    state, gives_away = setup.initial_state(exp), setup.update()
    step = lambda state, batch: gives_away(jax.tree.map(jnp.copy, state), batch)  # state is reused
    streams = training_streams(exp, corpus)
    batches = [training_batch(streams, s, exp.train.epoch_memory) for s in range(4)]
    return exp, setup.model, setup.optimizer, state, step, batches


def spoilt(batch):
    """A batch whose loss and gradient are NaN."""
    return batch.replace(weights=np.asarray(batch.weights) * np.nan)


def moments(opt_state):
    """Returns the optimizer's arrays by name, and, apart from them, its schedule's step count."""
    found = arrays(opt_state)
    (count,) = [key for key in found if key.endswith("[2].count")]
    return found, int(found.pop(count))


def assert_equal_arrays(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        np.testing.assert_array_equal(value, b[key], err_msg=key)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_skipped_update_leaves_all_but_step_schedule_and_memory(folder, cut):
    _, _, _, state, step, batches = prepared(folder, **SKIP, **cut)
    before, metrics = step(state, batches[0])
    assert metrics["skipped"] == 0
    after, metrics = step(before, spoilt(batches[1]))
    assert metrics["skipped"] == 1
    assert not np.isfinite(metrics["grad_norm"])
    assert int(after.step) == 2
    assert_equal_arrays(arrays(after.params), arrays(before.params))
    (kept, count), (had, _) = moments(after.opt_state), moments(before.opt_state)
    assert_equal_arrays(kept, had)
    assert count == 2  # the schedule counts the skipped step too, so its rate is the logged one
    good, _ = step(before, batches[1])
    assert_equal_arrays(arrays(after.mems), arrays(good.mems))
    again, metrics = step(after, batches[2])
    assert metrics["skipped"] == 0
    assert all(np.all(np.isfinite(v)) for v in arrays(again).values())


def test_a_dispatch_of_several_steps_skips_only_the_bad_one(folder):
    _, _, _, state, one, batches = prepared(folder, **SKIP)
    batches[1] = spoilt(batches[1])
    several = {"train.steps_per_dispatch": 4, "train.log_every": 4, "train.eval_every": 4}
    _, _, _, same, four, _ = prepared(folder, **SKIP, **several)
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    together, metrics = four(same, stacked)
    assert metrics["skipped"].tolist() == [0, 1, 0, 0]
    for batch in batches:
        state, _ = one(state, batch)
    for key, value in arrays(together).items():
        np.testing.assert_allclose(value, arrays(state)[key], rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.integration
def test_memory_that_is_not_finite_is_emptied_for_its_stream_alone(folder):
    _, _, _, state, step, batches = prepared(folder, **SKIP)
    state, _ = step(state, batches[0])
    hidden = np.array(state.mems.hidden)
    hidden[0, 2, 3] = np.inf
    after, metrics = step(state.replace(mems=state.mems.replace(hidden=hidden)), batches[1])
    assert metrics["skipped"] == 1
    assert after.mems.filled.tolist() == [16, 16, 16, 16]  # as long as a segment: all states new

    step = prepared(folder, **SKIP, **{"train.mem_len": 32})[4]
    _, _, _, state, _, _ = prepared(folder, **SKIP, **{"train.mem_len": 32})
    state, _ = step(state, batches[0])
    hidden = np.array(state.mems.hidden)
    hidden[0, 2, -3] = np.nan
    after, metrics = step(state.replace(mems=state.mems.replace(hidden=hidden)), batches[1])
    assert metrics["skipped"] == 1
    assert after.mems.filled.tolist() == [32, 32, 0, 32]
    assert not np.any(after.mems.hidden[:, 2])
    assert np.all(np.isfinite(after.mems.hidden))
    _, metrics = step(after, batches[2])
    assert metrics["skipped"] == 0  # otherwise the NaN would stay in memory for ever


def test_settings_that_skip_nothing_have_nothing_of_it(folder):
    exp, _, optimizer, state, step, batches = prepared(folder)
    _, metrics = step(state, batches[0])
    assert "skipped" not in metrics
    assert arrays(state.opt_state).keys() == arrays(optimizer.init(state.params)).keys()
    assert exp.train.non_finite == "stop"


def test_the_recent_norm_is_a_mean_that_forgets():
    watching = recent_norm()
    norms = np.abs(np.random.default_rng(0).normal(3, 1, 250)).astype(np.float32)
    update = jax.jit(watching.update)
    state = watching.init({"w": jnp.zeros(2)})
    expected: float = 0.0
    for n, norm in enumerate(norms, start=1):
        gradient = {"w": jnp.array([norm * 0.6, norm * 0.8])}
        passed, state = update(gradient, state)
        np.testing.assert_array_equal(passed["w"], gradient["w"])
        expected = float(np.mean(norms[:n])) if n <= 100 else 0.99 * expected + 0.01 * float(norm)
        assert float(state.mean) == pytest.approx(expected, rel=1e-5)
        assert int(state.seen) == n


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_spike_is_skipped_once_the_mean_is_one(folder, cut):
    _, _, _, state, step, batches = prepared(folder, **{"train.skip_spikes": 3.0}, **cut)
    plain, metrics = step(state, batches[0])
    norm = float(metrics["grad_norm"])
    for mean, count, skipped in (
        (norm / 2.9, 20, False),
        (norm / 3.1, 20, True),
        (norm / 3.1, 19, False),
    ):
        recent = RecentNorm(jnp.float32(mean), jnp.int32(count))
        before = state.replace(opt_state=(recent, *state.opt_state[1:]))
        after, metrics = step(before, batches[0])
        assert bool(metrics["skipped"]) == skipped
        assert int(after.opt_state[0].seen) == count + (not skipped)
        want = before if skipped else plain
        assert_equal_arrays(arrays(after.params), arrays(want.params))


def test_a_norm_that_is_not_finite_is_no_spike(folder):
    """``train.skip_spikes`` does not skip an update whose gradient norm is not finite.

    Such a norm stops the run, unless ``train.non_finite`` is ``skip``.
    """
    _, _, _, state, step, batches = prepared(folder, **{"train.skip_spikes": 3.0})
    recent = RecentNorm(jnp.float32(1e-9), jnp.int32(50))
    state = state.replace(opt_state=(recent, *state.opt_state[1:]))
    assert step(state, batches[0])[1]["skipped"] == 1
    assert step(state, spoilt(batches[0]))[1]["skipped"] == 0
    settings = txl_jax.ExperimentConfig.from_dict({"train": {"skip_spikes": 3.0}}).train
    for nll_sum, norm in ((1.0, np.inf), (np.inf, 1.0), (1.0, np.nan)):
        _, found = skip_bad_update(state, state, jnp.float32(nll_sum), jnp.float32(norm), settings)
        assert not found["skipped"]
    _, found = skip_bad_update(state, state, jnp.float32(1.0), jnp.float32(1.0), settings)
    assert found["skipped"]


def overflowing(state, what):
    """A state whose next update makes ``what`` not finite, whatever finite gradient it gets.

    Adam divides ``mu`` by the root of ``nu``, so a huge mean over a small square overflows.
    """
    clip, adam, rate = state.opt_state
    if what == "parameters":
        adam = adam._replace(mu=jax.tree.map(lambda m: jnp.full_like(m, 1e38), adam.mu))
    else:  # the mean of squares is infinite, and every later update would be 0
        adam = adam._replace(nu=jax.tree.map(lambda v: jnp.full_like(v, jnp.inf), adam.nu))
    return state.replace(opt_state=(clip, adam, rate))


@pytest.mark.parametrize("what", ["parameters", "optimizer state"])
def test_an_update_that_overflows_is_skipped_although_loss_and_gradient_are_finite(folder, what):
    _, _, _, state, step, batches = prepared(folder, **SKIP)
    before = overflowing(state, what)
    after, metrics = step(before, batches[0])
    assert np.isfinite(metrics["nll_sum"])
    assert np.isfinite(metrics["grad_norm"])
    assert metrics["skipped"] == 1
    assert metrics["update_finite"] == 0
    assert_equal_arrays(arrays(after.params), arrays(before.params))
    assert_equal_arrays(moments(after.opt_state)[0], moments(before.opt_state)[0])
    one = {name: float(value) for name, value in metrics.items()}
    assert skip_reason(one) == "the update is not finite, although loss and gradient are"
    assert step(state, batches[0])[1]["update_finite"] == 1


def test_the_first_array_that_is_not_finite_is_named():
    good = {"a": jnp.ones(3), "n": jnp.int32(3), "z": {"b": jnp.zeros((2, 2)), "c": jnp.ones(())}}
    assert non_finite_leaf(good) is None
    for value in (np.nan, np.inf, -np.inf):
        bad = {**good, "z": {"b": good["z"]["b"].at[1, 0].set(value), "c": jnp.float32(value)}}
        assert non_finite_leaf(bad) == "z/b"


# --------------------------------------------------------------------------------------
# Runs.


@pytest.fixture
def spoil(monkeypatch):
    """A function that multiplies the gradients of given steps (the first is 1) by NaN or ``by``."""
    gradient_of = step_module.accumulate_gradient

    def spoil(*steps, by=jnp.nan):
        def bad(state, *arguments):
            gradient, *rest = gradient_of(state, *arguments)
            spoilt = jnp.isin(state.step + 1, jnp.array(steps))
            return jax.tree.map(lambda g: jnp.where(spoilt, by * g, g), gradient), *rest

        monkeypatch.setattr(step_module, "accumulate_gradient", bad)

    return spoil


@pytest.mark.slow
def test_skipped_updates_are_printed_and_counted_and_the_run_continues(tmp_path, spoil, capsys):
    corpus, exp = corpus_and_experiment(tmp_path, **SKIP, **{"train.log_every": 3})
    spoil(2, 7, 8, 9)
    outcome = train(exp, corpus, str(tmp_path / "run"), PreemptionGuard())
    assert outcome.finished
    found = [r for r in records(tmp_path / "run") if r["kind"] == "train"]
    assert [r.get("skipped", 0) for r in found] == [1, 0, 3, 0]
    assert [r["loss"] is None for r in found] == [False, False, True, False]
    assert found[2]["grad_norm"] is None
    log = capsys.readouterr().err
    assert "step  2/12  skipped: gradient norm is nan\n" in log
    assert "  skipped 3  " in next(line for line in log.splitlines() if "step  9/12  bpc" in line)
    assert all(np.all(np.isfinite(v)) for v in arrays(outcome.state).values())


@pytest.mark.parametrize("changes", [SKIP, {"train.skip_spikes": 3.0}], ids=str)
@pytest.mark.slow
def test_a_run_that_skips_is_resumed_bit_identically(tmp_path, spoil, monkeypatch, changes):
    monkeypatch.setattr(skipping, "SPIKE_WARMUP", 2)
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    spoil(4, 5, 8, 10, by=jnp.nan if changes is SKIP else 50.0)
    train(exp, corpus, str(tmp_path / "whole"), PreemptionGuard())
    assert sum(r.get("skipped", 0) for r in records(tmp_path / "whole")) == 4
    for n in (3, 5, 7):
        train(exp, corpus, str(tmp_path / "cut"), StopAt(n))
    assert train(exp, corpus, str(tmp_path / "cut"), PreemptionGuard()).finished
    assert_same_run(tmp_path, tmp_path / "whole", tmp_path / "cut", **changes)


@pytest.mark.slow
def test_too_many_in_a_row_stop_the_run_also_over_a_resume(tmp_path, spoil):
    changes = {**SKIP, "train.max_skipped": 4, "checkpoint.every": 2}
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    spoil(2, 3, 4, 6, 7, 8, 9)
    cut = tmp_path / "cut"
    assert not train(exp, corpus, str(cut), StopAt(8)).finished
    text = (
        "4 updates in a row were skipped, the last at step 9: gradient norm is nan; training"
        " stopped, and checkpoint 8 is kept. Try a lower optimizer.learning_rate, more"
        " optimizer.warmup_steps, or model.dtype float32, or raise train.max_skipped"
    )
    for workdir in (tmp_path / "whole", cut):
        with pytest.raises(SkippedError) as caught:
            train(exp, corpus, str(workdir), PreemptionGuard())
        assert str(caught.value) == text


def test_a_state_that_is_not_finite_is_never_saved(tmp_path, monkeypatch):
    """At step 4, which should be saved, the update is infinite; loss and gradient are finite."""

    def overflowing_at_4(exp):
        optimizer = make_optimizer(exp)

        def update(gradient, state, params=None):
            updates, state = optimizer.update(gradient, state, params)
            bad = jnp.where(state[-1].count == 4, jnp.inf, 0.0)
            return {**updates, "embedding": updates["embedding"] + bad}, state

        return optax.GradientTransformation(optimizer.init, update)

    monkeypatch.setattr("txl_jax.training.plan.make_optimizer", overflowing_at_4)
    changes = {"model.n_layer": 1, "checkpoint.every": 2, "train.eval_every": 0}
    corpus, exp = corpus_and_experiment(tmp_path, **changes)
    with pytest.raises(NonFiniteError) as caught:
        train(exp, corpus, str(tmp_path / "run"), PreemptionGuard())
    text = str(caught.value)
    assert text.startswith(
        "params/embedding is not finite after step 4; training stopped, and checkpoint 2 is"
    )
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["2"]


@pytest.mark.slow
def test_a_run_that_stopped_at_a_nan_may_be_resumed_to_skip_it(tmp_path, spoil):
    corpus, exp = corpus_and_experiment(tmp_path, **{"checkpoint.every": 2})
    spoil(5)
    with pytest.raises(NonFiniteError, match=r"norm is nan at step 5; .* 4 is kept"):
        train(exp, corpus, str(tmp_path / "run"), PreemptionGuard())
    corpus, exp = corpus_and_experiment(tmp_path, **SKIP)
    assert train(exp, corpus, str(tmp_path / "run"), PreemptionGuard()).finished


def test_the_plain_step_and_the_skipping_one_make_the_same_updates(folder):
    _, model, optimizer, state, step, batches = prepared(folder, **SKIP)
    _, plain_exp = corpus_and_experiment(folder, **{"model.n_layer": 1})
    plain = jax.jit(lambda s, b: train_step(s, b, plain_exp, model, optimizer))
    same = state
    for batch in batches:
        state, _ = step(state, batch)
        same, _ = plain(same, batch)
    for key, value in arrays(state).items():
        np.testing.assert_allclose(value, arrays(same)[key], rtol=0, atol=1e-6, err_msg=key)
