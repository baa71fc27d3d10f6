"""PPO with a Transformer-XL memory, on the environments of gymnax, all on the device.

    pip install -e '.[agents]'
    python examples/ppo.py --workdir=runs/chain                      # MemoryChain-bsuite
    python examples/ppo.py --workdir=runs/blind --mem_len=0          # control: no memory
    python examples/ppo.py --workdir=runs/pole --env=CartPole-v1 --hide=1,3 --updates=30

An update acts for `steps` steps in every environment, with the projected memory (`agents.Actor`),
and learns on windows of `window` steps, each from the memory before it (`agents.StateBuffer`).
Episodes may end at any step. The same command resumes a stopped run and gives the parameters of a
run that was never stopped. The workdir gets checkpoints and the curve of returns, returns.png.

The algorithm is PPO (Schulman et al. 2017) with GAE (Schulman et al. 2016), on GTrXL (Parisotto et
al. 2019). The defaults are those of transformerXL_PPO_JAX for MemoryChain-bsuite. Environments are
named as in gymnax, or as in Craftax 1.6 if that is installed (a few updates were run on a CPU):

    python examples/ppo.py --workdir=runs/craftax --env=Craftax-Symbolic-v1 --environments=1024 \\
        --updates=7600 --anneal_updates=7600 --gamma=0.999
"""

import argparse
import dataclasses
import os
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import txl_jax
from txl_jax import agents
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.config import CheckpointConfig
from txl_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run, which are also the flags of the command."""

    env: str = "MemoryChain-bsuite"
    env_params: str = ""  # parameters of the environment, such as memory_length=20,...
    hide: str = ""  # indices of the observation's entries that the agent does not see, such as 1,3
    seed: int = 0
    updates: int = 15
    environments: int = 512
    steps: int = 128  # steps of an update, in each environment
    window: int = 64  # steps of a training window, which divides `steps`
    mem_len: int = 128  # with 0 there is no memory, and a step sees no earlier one
    epochs: int = 4
    minibatches: int = 8  # groups of environments in an epoch
    learning_rate: float = 2e-4
    anneal_updates: int = 152  # number of updates in which the learning rate falls to 0
    gamma: float = 0.99
    gae_lambda: float = 0.8
    clip: float = 0.2
    entropy: float = 0.002
    value: float = 0.5
    max_norm: float = 1.0
    width: int = 256
    heads: int = 8
    layers: int = 2
    gate_bias: float = 2.0

    def __post_init__(self):
        flag = lambda name: f"--{name}={getattr(self, name)}"
        counts = ("updates", "environments", "steps", "window", "epochs", "minibatches", "heads")
        for name in counts:
            if getattr(self, name) < 1:
                raise SystemExit(f"{flag(name)} must be at least 1")
        for name, of in (("window", "steps"), ("minibatches", "environments"), ("heads", "width")):
            if getattr(self, of) % getattr(self, name):
                raise SystemExit(f"{flag(name)} must divide {flag(of)}")
        if self.updates > self.anneal_updates:
            raise SystemExit(f"{flag('updates')} must be at most {flag('anneal_updates')}")


class World(NamedTuple):
    """The environments: states, observations, whether an episode begins, and returns so far."""

    state: Any
    observation: jax.Array  # [B,O]
    begins: jax.Array  # bool [B]
    returns: jax.Array  # [B], sum of the episode's rewards so far


class Step(NamedTuple):
    """A step of acting. ``scan`` stacks steps to [T,B]; learning swaps the axes to [B,T]."""

    observation: jax.Array
    begins: jax.Array
    action: jax.Array
    log_p: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array
    episode_return: jax.Array  # sum of rewards so far; where done, of the whole episode


class Choice:
    """The distribution of one of n actions, int32 [...], by its logits [...,n]."""

    def __init__(self, space):
        self.size = int(space.n)

    def sample(self, key, logits) -> jax.Array:
        """Draws actions."""
        return jax.random.categorical(key, logits)

    def log_p(self, logits, action) -> jax.Array:
        """Returns the log-probability of each action."""
        return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]

    def entropy(self, logits) -> jax.Array:
        """Returns the entropy of each distribution in nats."""
        log_p = jax.nn.log_softmax(logits)
        return -(jnp.exp(log_p) * log_p).sum(-1)

    def for_environment(self, action) -> jax.Array:
        """Returns the action in the form that the environment takes."""
        return action


class Gaussian:
    """The normal distribution of A numbers [...,A], by means and log standard deviations [...,2A].

    For the environment, each number is clipped to [-1, 1] and then scaled to the range of actions.
    """

    def __init__(self, space):
        self.size = 2 * space.shape[0]
        self._low, self._high = space.low, space.high

    def sample(self, key, x) -> jax.Array:
        """Draws actions."""
        mean, log_std = jnp.split(x, 2, axis=-1)
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)

    def log_p(self, x, action) -> jax.Array:
        """Returns the logarithm of the density at each action."""
        mean, log_std = jnp.split(x, 2, axis=-1)
        return jax.scipy.stats.norm.logpdf(action, mean, jnp.exp(log_std)).sum(-1)

    def entropy(self, x) -> jax.Array:
        """Returns the entropy of each distribution in nats."""
        return (jnp.split(x, 2, axis=-1)[1] + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)

    def for_environment(self, action) -> jax.Array:
        """Returns the action in the form that the environment takes."""
        share = (jnp.clip(action, -1.0, 1.0) + 1.0) / 2.0
        return self._low + share * (self._high - self._low)


class Policy(nn.Module):
    """The distribution of an action [...,A] and values [...] from the core's outputs [...,D]."""

    size: int  # A, numbers that determine the distribution
    width: int

    @nn.compact
    def __call__(self, x):
        """Runs two hidden layers for the distribution and two others for the values."""
        init = nn.initializers.orthogonal
        dense = lambda size, scale: nn.Dense(size, kernel_init=init(scale))
        hidden = lambda x: nn.relu(dense(self.width, 2**0.5)(x))
        return dense(self.size, 0.01)(hidden(hidden(x))), dense(1, 1.0)(hidden(hidden(x)))[..., 0]


class Environments:
    """B environments of one kind, with flat observations and automatic resets."""

    def __init__(self, c: Settings):
        if c.env.startswith("Craftax"):
            from craftax.craftax_env import make_craftax_env_from_name

            self.env = make_craftax_env_from_name(c.env, auto_reset=True)
            params = self.env.default_params
        else:
            import gymnax

            self.env, params = gymnax.make(c.env)
        pairs = [pair.partition("=")[::2] for pair in filter(None, c.env_params.split(","))]
        known = [field.name for field in dataclasses.fields(params)]
        if unknown := [name for name, value in pairs if name not in known or not value]:
            names = ", ".join(known)
            raise SystemExit(f"--env_params={unknown[0]}: give NAME=VALUE; the names are {names}")
        changed = {name: type(getattr(params, name))(float(value)) for name, value in pairs}
        self._hidden = [int(number) for number in filter(None, c.hide.split(","))]
        self.params, self.rows = params.replace(**changed), c.environments
        space = self.env.action_space(self.params)
        self.actions = Choice(space) if hasattr(space, "n") else Gaussian(space)
        self._states = getattr(self.env.observation_space(self.params), "n", None)
        jax.eval_shape(self.reset, jax.random.key(0))  # checks --hide before anything is compiled

    def _seen(self, observations) -> jax.Array:
        if self._states is not None:  # an observation is the index of a state
            observations = jax.nn.one_hot(observations, self._states)
        flat = observations.reshape(self.rows, -1).astype(jnp.float32)
        entries = range(flat.shape[1])
        if not set(self._hidden) < set(entries):
            raise SystemExit(f"--hide: give numbers from 0 to {len(entries) - 1}, not all of them")
        return flat[:, [n for n in entries if n not in self._hidden]]

    def reset(self, key) -> World:
        """Starts an episode in every environment."""
        keys = jax.random.split(key, self.rows)
        observation, state = jax.vmap(self.env.reset, in_axes=(0, None))(keys, self.params)
        begins, returns = jnp.ones(self.rows, bool), jnp.zeros(self.rows)
        return World(state, self._seen(observation), begins, returns)

    def step(self, key, world: World, action) -> tuple[World, jax.Array, jax.Array]:
        """Returns the environments after a step, rewards and episode returns, [B] each.

        ``begins`` of the new world is true where the episode ended; there the return is that of the
        whole episode. A time limit counts as an end: nothing is bootstrapped from the last value.
        """
        keys = jax.random.split(key, self.rows)
        step = jax.vmap(self.env.step, in_axes=(0, 0, 0, None))
        # After the reward come the flags of an end: one (Craftax), or two (gymnax).
        action = self.actions.for_environment(action)
        observation, state, reward, *ends, _ = step(keys, world.state, action, self.params)
        done = jnp.any(jnp.stack(ends), axis=0)
        reward = reward.astype(jnp.float32)
        total = world.returns + reward
        after = World(state, self._seen(observation), done, jnp.where(done, 0.0, total))
        return after, reward, total


class PPO:
    """The functions of a run: acting, advantages, loss and update."""

    def __init__(self, c: Settings):
        self.c, self.world = c, Environments(c)
        self.core = txl_jax.TransformerXL(
            txl_jax.TransformerXLConfig(
                n_layer=c.layers, d_model=c.width, n_head=c.heads, d_head=c.width // c.heads,
                d_inner=c.width, pre_lnorm=True, untie_r=True, attention_bias=True,
                activation="gelu", gate="gru", gate_bias=c.gate_bias, init_std=c.width**-0.5,
                same_length="tf",  # so that acting equals learning
            )
        )  # fmt: skip
        self.encoder, self.policy = nn.Dense(c.width), Policy(self.world.actions.size, c.width)
        per_update = c.epochs * c.minibatches
        rate = lambda count: c.learning_rate * (1 - (count // per_update) / c.anneal_updates)
        adam = optax.adam(rate, eps=1e-5)
        self.optimizer = optax.chain(optax.clip_by_global_norm(c.max_norm), adam)

    def init(self) -> TrainState:
        """Returns the first state; its ``opt_state`` has the environments and the returns too."""
        c, keys = self.c, jax.random.split(jax.random.key(self.c.seed), 4)
        world, mems = self.world.reset(keys[0]), self.core.init_mems(c.environments, c.mem_len)
        x = jnp.zeros((c.environments, 1, c.width))
        params = {
            "encoder": self.encoder.init(keys[1], world.observation)["params"],
            "core": self.core.init(keys[2], x, mems, method="core")["params"],
            "policy": self.policy.init(keys[3], x)["params"],
        }
        returns, optimizer = jnp.full(c.updates, jnp.nan), self.optimizer.init(params)
        others = {"optimizer": optimizer, "world": world, "returns": returns}
        return TrainState(jnp.zeros((), jnp.int32), params, others, mems)

    def rollout(self, params, world: World, mems, key):
        """Acts; returns the environments, the values [B] after the last step, steps, and states.

        The states [T,L,B,D] are those that memory keeps of the steps.
        """

        def act(actor, world: World):
            x = self.encoder.apply({"params": params["encoder"]}, world.observation)
            outputs, actor, states = actor.step(x, world.begins)
            return actor, states, *self.policy.apply({"params": params["policy"]}, outputs)

        def step(carry, key):
            actor, world = carry
            keys = jax.random.split(key)
            actor, states, distribution, value = act(actor, world)
            action = actions.sample(keys[0], distribution)
            log_p = actions.log_p(distribution, action)
            after, reward, total = self.world.step(keys[1], world, action)
            seen = world.observation, world.begins
            step = Step(*seen, action, log_p, value, reward, after.begins, total)
            return (actor, after), (step, states)

        actions = self.world.actions
        actor = agents.Actor.start(self.core, {"params": params["core"]}, mems)
        keys = jax.random.split(key, self.c.steps)
        (actor, world), (steps, states) = jax.lax.scan(step, (actor, world), keys)
        return world, act(actor, world)[-1], steps, states

    def advantages(self, steps: Step, last_value) -> jax.Array:
        """Returns generalised advantage estimates [T,B] of steps [T,B]."""
        c = self.c

        def back(carry, now):
            advantage, next_value = carry
            value, reward, goes_on = now
            delta = reward + c.gamma * next_value * goes_on - value
            advantage = delta + c.gamma * c.gae_lambda * goes_on * advantage
            return (advantage, value), advantage

        over_time = steps.value, steps.reward, 1.0 - steps.done
        first = jnp.zeros_like(last_value), last_value
        return jax.lax.scan(back, first, over_time, reverse=True)[1]

    def loss(self, params, mems, window: Step, advantage) -> jax.Array:
        """Returns PPO's loss on windows [R,W], given the memory before them."""
        c, actions = self.c, self.world.actions
        x = self.encoder.apply({"params": params["encoder"]}, window.observation)
        core = {"params": params["core"]}
        outputs, _ = self.core.apply(core, x, mems, method="core", reset=window.begins)
        distribution, value = self.policy.apply({"params": params["policy"]}, outputs)
        ratio = jnp.exp(actions.log_p(distribution, window.action) - window.log_p)
        target = advantage + window.value
        scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        of_policy = -jnp.minimum(ratio * scaled, jnp.clip(ratio, 1 - c.clip, 1 + c.clip) * scaled)
        near = window.value + jnp.clip(value - window.value, -c.clip, c.clip)
        of_value = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2)
        entropy = actions.entropy(distribution)
        return jnp.mean(of_policy + c.value * of_value - c.entropy * entropy)

    def update(self, state: TrainState) -> TrainState:
        """Acts, then learns ``epochs`` times from all environments, a minibatch at a time."""
        c, others = self.c, state.opt_state
        key = jax.random.fold_in(jax.random.key(c.seed), state.step)
        act_key, learn_key = jax.random.split(key)
        acted = self.rollout(state.params, others["world"], state.mems, act_key)
        world, last_value, steps, states = acted
        advantage = self.advantages(steps, last_value).T  # [B,T]
        steps = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), steps)
        buffer = agents.StateBuffer.start(state.mems, c.steps)
        buffer = buffer.add(jnp.moveaxis(states, 0, 2), steps.begins)
        starts = jnp.arange(0, c.steps, c.window)

        def learn(carry, rows):
            params, optimizer = carry
            before, row = jnp.tile(starts, len(rows)), jnp.repeat(rows, len(starts))
            mems = buffer.memory(c.mem_len, before=c.mem_len + before, rows=row)
            cut = lambda x: x[rows].reshape(-1, c.window, *x.shape[2:])  # [R,T,..] to [R T/W,W,..]
            windows = jax.tree.map(cut, steps)
            gradient = jax.grad(self.loss)(params, mems, windows, cut(advantage))
            change, optimizer = self.optimizer.update(gradient, optimizer)
            return (optax.apply_updates(params, change), optimizer), None

        shuffled = lambda key: jax.random.permutation(key, c.environments)
        rows = jax.vmap(shuffled)(jax.random.split(learn_key, c.epochs))
        rows = rows.reshape(c.epochs * c.minibatches, -1)
        (params, optimizer), _ = jax.lax.scan(learn, (state.params, others["optimizer"]), rows)
        mean = (steps.episode_return * steps.done).sum() / steps.done.sum()  # nan without an end
        returns = others["returns"].at[state.step].set(mean)
        others = {"optimizer": optimizer, "world": world, "returns": returns}
        return TrainState(state.step + 1, params, others, buffer.memory(c.mem_len))


def draw(returns, c: Settings, path: str) -> None:
    """Draws the mean return of the episodes that ended in each update."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(title=f"{c.env}, memory {c.mem_len}")
    axes.plot((np.arange(len(returns)) + 1) * c.environments * c.steps, returns, marker=".")
    axes.set(xlabel="environment steps", ylabel="mean return of an episode")
    figure.savefig(path, dpi=120)


def train(c: Settings, workdir: str, until: int | None = None) -> TrainState:
    """Runs or resumes all updates, or those before ``until``, and returns the last state."""
    ppo, config = PPO(c), {"ppo": dataclasses.asdict(c)}
    state, update = jax.jit(ppo.init)(), jax.jit(ppo.update)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    with Checkpoints(workdir, CheckpointConfig(keep_best=0)) as checkpoints:
        if found := checkpoints.restore(jax.tree.map(shape, state), config):
            state = found[0]
        while int(state.step) < min(c.updates, until or c.updates):
            state = update(state)
            n, returns = int(state.step), np.asarray(state.opt_state["returns"])
            mean = returns[n - 1]  # nan if no episode ended
            steps = n * c.environments * c.steps
            print(f"update {n}, {steps:,} steps: mean return {mean:.3f}", flush=True)
            checkpoints.save(n, state, {"config": config}, None)
            draw(returns[:n], c, os.path.join(workdir, "returns.png"))
    return state


def main() -> None:
    """Reads the flags and trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workdir", required=True, help="folder for checkpoints and the curve")
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    flags = vars(parser.parse_args())
    workdir = flags.pop("workdir")
    train(Settings(**flags), workdir)


if __name__ == "__main__":
    main()
