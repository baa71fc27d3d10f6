"""Runs agents of memorax, a library of reinforcement learning, with ``SequenceModel``.

    python memorax_runs.py ppo FOLDER       5 updates, a checkpoint, 5 updates more
    python memorax_runs.py resume FOLDER    5 updates from that checkpoint
    python memorax_runs.py learn FOLDER     PPO on a memory task, and its mean returns
    python memorax_runs.py r2d2 FOLDER      some updates of R2D2

The Python environment must have memorax. Each command writes its results as MODE.json or MODE.npz,
where MODE is its first argument.
"""

import json
import pathlib
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from gymnax.environments.spaces import Discrete
from memorax.algorithms import PPO, R2D2, PPOConfig, R2D2Config
from memorax.buffers import make_prioritised_episode_buffer
from memorax.networks import FeatureExtractor, Network, heads

import txl_jax
from txl_jax import agents

ENVIRONMENTS, STEPS, WIDTH, DELAY = 16, 16, 32, 6


class Recall:
    """A memory task: the first observation, 1 or -1, tells which action is right DELAY steps later.

    This last action has the reward 1 if it is right, else -1. All other rewards are 0.
    """

    def reset(self, key, params=None):
        """Returns the first observation, and the state: the time 0, and the right action."""
        cue = jax.random.bernoulli(key).astype(jnp.int32)
        return jnp.array([2.0 * cue - 1.0, 0.0]), (jnp.int32(0), cue)

    def step(self, key, state, action, params=None):
        """Returns observation, state, reward, done and information, as in gymnax."""
        time, cue = state[0] + 1, state[1]
        done = time > DELAY
        reward = jnp.where(done, jnp.where(action == cue, 1.0, -1.0), 0.0)
        observation = jnp.array([0.0, (time == DELAY).astype(jnp.float32)])
        started = self.reset(key)
        now = observation, (time, cue)
        observation, state = jax.tree.map(lambda a, b: jnp.where(done, a, b), started, now)
        return observation, state, reward, done, {}

    def action_space(self, params=None):
        """Returns the space of two actions."""
        return Discrete(2)


def network(head: nn.Module) -> Network:
    """A network of an encoder, a GTrXL whose memory is shorter than a rollout, and ``head``."""
    cfg = txl_jax.TransformerXLConfig(
        n_layer=2, d_model=WIDTH, n_head=4, d_head=8, d_inner=32, same_length="tf",
        pre_lnorm=True, untie_r=True, gate="gru", gate_bias=1.0, init_std=0.2,
    )  # fmt: skip
    encoder = FeatureExtractor(observation_extractor=nn.Dense(WIDTH))
    return Network(encoder, agents.SequenceModel(cfg, mem_len=12), head)


def ppo(epochs: int, minibatches: int) -> PPO:
    """A PPO agent with separate networks for actor and critic."""
    settings = PPOConfig(
        name="ppo", num_envs=ENVIRONMENTS, num_eval_envs=64, num_steps=STEPS, gamma=0.95,
        gae_lambda=0.95, num_minibatches=minibatches, update_epochs=epochs,
        normalize_advantage=True, clip_coef=0.2, clip_vloss=True, ent_coef=0.01, vf_coef=0.5,
    )  # fmt: skip
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
    actor, critic = network(heads.Categorical(2)), network(heads.VNetwork())
    return PPO(settings, Recall(), None, actor, critic, optimizer, optimizer)


def parameters(state: Any) -> dict[str, Any]:
    """The parameters and the recurrent states (carries) of actor and critic, by path."""
    kept = state.actor_params, state.critic_params, state.actor_carry, state.critic_carry
    return {jax.tree_util.keystr(k): np.asarray(x) for k, x in jax.tree.leaves_with_path(kept)}


def saved(folder: pathlib.Path) -> None:
    """Runs 10 updates of PPO, and saves a checkpoint after 5 updates.

    Each rollout has a single update. The KL divergence before this update thus compares the policy
    as it acted with the same policy as learning computes it.
    """
    agent, divergence = ppo(epochs=1, minibatches=1), []
    key, state = agent.init(jax.random.key(0))
    with ocp.StandardCheckpointer() as checkpointer:
        for update in range(10):
            if update == 5:
                tree = {"key": jax.random.key_data(key), "state": state}
                checkpointer.save(folder / "checkpoint", tree)
            key, state, transitions = agent.train(key, state, ENVIRONMENTS * STEPS)
            losses = transitions.info
            divergence.append(
                [float(losses[f"losses/{x}"].max()) for x in ("approx_kl", "entropy")]
            )
    (folder / "ppo.json").write_text(json.dumps(divergence))
    np.savez(folder / "ppo.npz", **parameters(state))


def resume(folder: pathlib.Path) -> None:
    """Runs the last five updates of :func:`saved` again, from its checkpoint."""
    agent = ppo(epochs=1, minibatches=1)
    key, state = agent.init(jax.random.key(1))
    with ocp.StandardCheckpointer() as checkpointer:
        tree = {"key": jax.random.key_data(key), "state": state}
        found = checkpointer.restore(folder / "checkpoint", jax.tree.map(np.asarray, tree))
    key, state = jax.random.wrap_key_data(found["key"]), found["state"]
    for _ in range(5):
        key, state, _ = agent.train(key, state, ENVIRONMENTS * STEPS)
    np.savez(folder / "resume.npz", **parameters(state))


def learn(folder: pathlib.Path) -> None:
    """Trains PPO; writes the mean return of its last episodes, and of new ones by ``evaluate``."""
    agent = ppo(epochs=4, minibatches=4)
    key, state = agent.init(jax.random.key(0))
    key, state, transitions = agent.train(key, state, 60 * ENVIRONMENTS * STEPS)
    mean = lambda x: float(x.reward.sum() / x.done.sum())
    last = jax.tree.map(lambda x: x[-4 * STEPS :], (transitions.reward, transitions.done))
    _, tested = agent.evaluate(key, state, 4 * (DELAY + 1))
    found = {"trained": float(last[0].sum() / last[1].sum()), "tested": mean(tested)}
    (folder / "learn.json").write_text(json.dumps(found))


def r2d2(folder: pathlib.Path) -> None:
    """Writes the losses of R2D2, and the number of episodes in its evaluation.

    R2D2 computes the first carry of a stored sequence by burn-in.
    """
    buffer = make_prioritised_episode_buffer(
        max_length=4096, min_length=256, sample_batch_size=16, sample_sequence_length=20,
        add_batch_size=ENVIRONMENTS, add_sequences=True,
    )  # fmt: skip
    settings = R2D2Config(
        name="r2d2", learning_rate=1e-3, num_envs=ENVIRONMENTS, num_eval_envs=64,
        buffer_size=4096, gamma=0.95, tau=1.0, target_network_frequency=320, batch_size=16,
        start_e=1.0, end_e=0.05, exploration_fraction=0.5, learning_starts=512,
        train_frequency=64, burn_in_length=5, sequence_length=20, n_step=3,
    )  # fmt: skip
    constant = optax.constant_schedule(0.5)
    q_network = network(heads.DiscreteQNetwork(2))
    agent = R2D2(settings, Recall(), None, q_network, optax.adam(1e-3), buffer, constant, constant)
    key, state = agent.init(jax.random.key(0))
    key, state = agent.warmup(key, state, 512)
    key, state, transitions = agent.train(key, state, 6400)
    losses = np.asarray(transitions.info["losses/loss"]).tolist()
    _, tested = agent.evaluate(key, state, 2 * (DELAY + 1))
    found = {"losses": losses, "episodes": int(tested.done.sum())}
    (folder / "r2d2.json").write_text(json.dumps(found))


if __name__ == "__main__":
    {"ppo": saved, "resume": resume, "learn": learn, "r2d2": r2d2}[sys.argv[1]](
        pathlib.Path(sys.argv[2]).absolute()
    )
