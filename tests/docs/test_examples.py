"""Models of the examples solve their tasks only with memory; PPO follows its formulas."""

import json
import runpy
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from places import ROOT

import txl_jax

AGENT = ROOT / "examples" / "agent.py"
PPO = ROOT / "examples" / "ppo.py"
MUSIC = ROOT / "examples" / "music.py"


@pytest.mark.slow
def test_the_agent_learns_what_only_memory_can_bring():
    train = runpy.run_path(str(AGENT))["train"]
    assert train(150, mem_len=16)[-1] > 0.95
    assert abs(train(150, mem_len=0)[-1] - 0.5) < 0.15


# --------------------------------------------------------------------------------------
# PPO.

SMALL = {
    "environments": 8,
    "steps": 12,
    "window": 4,
    "mem_len": 6,
    "minibatches": 2,
    "epochs": 2,
    "updates": 4,
    "width": 16,
    "heads": 2,
}


@pytest.fixture(scope="module")
def ppo():
    """The global variables of examples/ppo.py, by name."""
    pytest.importorskip("gymnax")
    return runpy.run_path(str(PPO), run_name="ppo")


@pytest.fixture(scope="module")
def acted(ppo):
    """Returns a small run, its first state, and two consecutive rollouts.

    A rollout is (world, last value, steps, buffer). The world is the environments' state after the
    rollout, and the buffer has the model's states up to then.
    """
    run = ppo["PPO"](ppo["Settings"](**SMALL))
    state, rollout = tiny_models.quick(run.init)(), tiny_models.quick(run.rollout)
    world, mems, found = state.opt_state["world"], state.mems, []
    for key in jax.random.split(jax.random.key(1)):
        world, last_value, steps, states = rollout(state.params, world, mems, key)
        buffer = ppo["agents"].StateBuffer.start(mems, run.c.steps)
        buffer = buffer.add(jnp.moveaxis(states, 0, 2), steps.begins.T)
        mems = buffer.memory(run.c.mem_len)
        found.append((world, last_value, steps, buffer))
    return run, state, found


@pytest.mark.slow
def test_episodes_end_inside_windows_and_their_returns_are_sums_of_rewards(acted):
    world, _, steps, _ = acted[-1][0]
    assert steps.done.any()
    assert not steps.done.all()
    np.testing.assert_array_equal(steps.begins[1:], steps.done[:-1])
    assert steps.begins[0].all()
    np.testing.assert_array_equal(world.begins, steps.done[-1])
    total = np.zeros(SMALL["environments"])
    for t in range(SMALL["steps"]):
        total = total * (1 - np.asarray(steps.begins[t])) + np.asarray(steps.reward[t])
        np.testing.assert_allclose(steps.episode_return[t], total)
    assert set(np.unique(steps.episode_return[steps.done])) <= {-1.0, 1.0}


@pytest.mark.integration
def test_advantages_are_the_sums_of_their_definition(acted):
    """A_t = sum over k of (gamma lambda)^k delta_(t+k), up to the end of the episode.

    delta_t is the reward at step t, plus gamma times the next value, minus the value.
    """
    run, _, [(_, last_value, steps, _), _] = acted
    c, n_steps = run.c, SMALL["steps"]
    got = run.advantages(steps, last_value)
    values = np.concatenate([steps.value, last_value[None]])
    for b in range(SMALL["environments"]):
        for t in range(n_steps):
            total = 0.0
            for k in range(n_steps - t):
                over = bool(steps.done[t + k, b])
                after = 0.0 if over else values[t + k + 1, b]
                delta = steps.reward[t + k, b] + c.gamma * after - values[t + k, b]
                total += (c.gamma * c.gae_lambda) ** k * delta
                if over:
                    break
            np.testing.assert_allclose(got[t, b], total, atol=1e-5)


@pytest.mark.integration
def test_before_the_first_update_all_importance_ratios_are_1(acted, ppo):
    """On windows, the model computes the log-probabilities and values that it had while acting."""
    run, state, found = acted

    @tiny_models.quick
    def learn(mems, observation, begins):
        apply = lambda part, x: part[0].apply({"params": state.params[part[1]]}, x)
        x = apply((run.encoder, "encoder"), observation)
        core = {"params": state.params["core"]}
        outputs, _ = run.core.apply(core, x, mems, method="core", reset=begins)
        return apply((run.policy, "policy"), outputs)

    for _, _, steps, buffer in found:
        steps = jax.tree.map(lambda x: np.asarray(x).swapaxes(0, 1), steps)
        for start in range(0, run.c.steps, run.c.window):
            now = jax.tree.map(lambda x, at=start: x[:, at : at + run.c.window], steps)
            mems = buffer.memory(run.c.mem_len, before=run.c.mem_len + start)
            logits, value = learn(mems, now.observation, now.begins)
            log_p = run.world.actions.log_p(logits, now.action)
            np.testing.assert_allclose(log_p, now.log_p, atol=1e-5)
            np.testing.assert_allclose(value, now.value, atol=1e-5)


def test_continuous_actions_are_normal_and_scaled_to_the_environments_range(ppo):
    """Log-densities and entropies equal their formulas, computed in float64."""
    low, high = np.array([-2.0, 0.0]), np.array([2.0, 6.0])
    actions = ppo["Gaussian"](types.SimpleNamespace(shape=(2,), low=low, high=high))
    assert actions.size == 4
    x = np.array([[0.1, -0.2, -1.0, 0.5], [0.0, 0.3, 0.2, -0.4]])
    mean, std = x[:, :2], np.exp(x[:, 2:])
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = np.array(jax.vmap(lambda key: actions.sample(key, x))(keys))
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.1)
    np.testing.assert_allclose(drawn.std(0), std, rtol=0.05)
    density = np.exp(-0.5 * ((drawn - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    want = np.log(density).sum(-1)
    np.testing.assert_allclose(actions.log_p(x, drawn), want, atol=1e-4)
    np.testing.assert_allclose(actions.entropy(x), -want.mean(0), atol=0.1)
    given = actions.for_environment(np.array([[-1.0, 0.0], [7.0, 0.5]]))
    np.testing.assert_allclose(given, [[-2.0, 3.0], [2.0, 4.5]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "size"), [("Craftax-Classic-Symbolic-v1", 1345), ("Craftax-Symbolic-v1", 8268)]
)
def test_craftax_can_be_trained_in(ppo, env, size):
    pytest.importorskip("craftax.craftax_env", exc_type=ImportError)
    run = ppo["PPO"](ppo["Settings"](**{**SMALL, "env": env}))
    before = jax.jit(run.init)()
    update = jax.jit(run.update)
    after = update(update(before))
    assert after.opt_state["world"].observation.shape == (SMALL["environments"], size)
    changed = lambda new, old: np.isfinite(new).all() and np.any(new != old)
    assert all(jax.tree.leaves(jax.tree.map(changed, after.params, before.params)))
    assert (np.asarray(after.mems.filled) == SMALL["mem_len"]).all()


@pytest.mark.slow
def test_every_environment_of_gymnax_can_be_trained_in(ppo):
    """The environments of MNIST are left out, because they download images."""
    names = [name for name in pytest.importorskip("gymnax").registered_envs if "MNIST" not in name]
    assert len(names) > 20
    for name in names:
        run = ppo["PPO"](ppo["Settings"](**SMALL, env=name))
        state = tiny_models.quick(run.init)()
        after = tiny_models.quick(run.update)(state)
        changed = jax.tree.map(lambda a, b: np.abs(a - b).max(), after.params, state.params)
        assert all(np.isfinite(x) for x in jax.tree.leaves(changed)), name
        assert all(x > 0 for x in jax.tree.leaves(changed["policy"])), name


@pytest.mark.slow
def test_a_resumed_run_of_ppo_ends_as_one_that_was_not_stopped(ppo, tmp_path, capsys):
    c = ppo["Settings"](**SMALL)
    whole = ppo["train"](c, str(tmp_path / "whole"))
    ppo["train"](c, str(tmp_path / "stopped"), until=2)
    capsys.readouterr()
    resumed = ppo["train"](c, str(tmp_path / "stopped"))
    assert "update 3" in (out := capsys.readouterr().out)
    assert "update 2," not in out
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert (tmp_path / "stopped" / "returns.png").stat().st_size > 5000


@pytest.mark.slow
def test_ppo_learns_what_only_memory_can_bring(ppo, tmp_path):
    changes = {"environments": 64, "steps": 32, "window": 4, "mem_len": 8, "updates": 40}
    settings = {**SMALL, **changes, "width": 32, "learning_rate": 2e-3, "epochs": 4}
    returns = {}
    for mem_len in (8, 0):
        c = ppo["Settings"](**{**settings, "mem_len": mem_len})
        state = ppo["train"](c, str(tmp_path / str(mem_len)))
        returns[mem_len] = np.asarray(state.opt_state["returns"])[-5:].mean()
    assert returns[8] > 0.95
    assert abs(returns[0]) < 0.2


@pytest.mark.parametrize("changes", [{"window": 5}, {"minibatches": 3}, {"heads": 3}])
def test_sizes_that_do_not_divide_are_refused(ppo, changes):
    with pytest.raises(SystemExit, match="must divide"):
        ppo["Settings"](**{**SMALL, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"window": 0}, "--window=0 must be at least 1"),
        ({"updates": 0}, "--updates=0 must be at least 1"),
        (
            {"env_params": "memory=3"},
            "--env_params=memory: give NAME=VALUE; the names are .*memory_length",
        ),
        ({"env_params": "memory_length"}, "--env_params=memory_length: give NAME=VALUE"),
        ({"hide": "1,7"}, "--hide: give numbers from 0 to 2, not all"),
        ({"hide": "-1"}, "--hide: give numbers from 0 to 2, not all"),
        ({"hide": "0,1,2"}, "--hide: give numbers from 0 to 2, not all"),
    ],
)
def test_flags_that_would_have_no_effect_or_end_in_a_traceback_are_refused(ppo, changes, told):
    with pytest.raises(SystemExit, match=told):
        ppo["PPO"](ppo["Settings"](**{**SMALL, **changes}))


# --------------------------------------------------------------------------------------
# Music.


@pytest.fixture(scope="module")
def music():
    """The global variables of examples/music.py, by name."""
    pytest.importorskip("pretty_midi")
    return runpy.run_path(str(MUSIC), run_name="music")


def test_a_song_repeats_its_tune_and_comes_back_from_a_midi_file(music, tmp_path):
    ids = music["to_ids"](music["compose"](np.random.default_rng(0)))
    first, again, other, last = ids.reshape(4, -1)
    assert first.tolist() == again.tolist() == last.tolist() != other.tolist()
    assert ids.min() >= 1
    assert ids.max() <= 30
    assert music["REPEATED"].reshape(4, -1).all(axis=1).tolist() == [False, True, False, True]
    assert music["repeats"](ids)[music["REPEATED"]].all()
    assert music["repeats"](ids)[~music["REPEATED"]].mean() < 0.3
    music["to_midi"](ids).write(str(tmp_path / "song.mid"))
    assert music["to_ids"](music["read_midi"](tmp_path / "song.mid")).tolist() == ids.tolist()


def test_the_songs_of_a_split_are_documents_that_end_with_the_separator(music, tmp_path):
    music["write_songs"](tmp_path, {"train": 3, "valid": 2, "test": 2})
    corpus = txl_jax.load_corpus("tokens", tmp_path, document_separator="end")
    assert [len(song) for song in corpus.train] == [130] * 3
    assert corpus.vocab.symbols[:4] == ["end", "C3.", "C3", "D3."]
    song = np.asarray(corpus.train[1])
    assert (song[[0, -1]] == 0).all()
    np.testing.assert_array_equal(song[1:33], song[33:65])


@pytest.mark.slow
def test_repeats_of_songs_are_learnt_with_memory_only(music, tmp_path, monkeypatch):
    command = ["music.py", f"--workdir={tmp_path}", "--seeds=1", "--steps=400"]
    monkeypatch.setattr(sys, "argv", command)
    music["main"]()
    losses = json.loads((tmp_path / "losses.json").read_text())
    remembered, guessed = (losses[f"memory {m}"]["repeated"][0] for m in (112, 0))
    assert remembered < guessed - 0.5
    assert abs(losses["memory 112"]["new"][0] - losses["memory 0"]["new"][0]) < 0.3
    assert len(music["to_ids"](music["read_midi"](tmp_path / "sample.mid"))) > 1
    assert (tmp_path / "sample.png").stat().st_size > 5000
