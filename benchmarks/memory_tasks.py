"""Trains agents with four memory modules of equal size on memory tasks, by memorax's PPO.

    python -m venv ENV; ENV/bin/pip install memorax==1.0.1 gymnax==1.0.1 xminigrid==0.9.3 .
    ENV/bin/python -m benchmarks.memory_tasks --out=DIR [--budget=SECONDS]
    ENV/bin/python -m benchmarks.memory_tasks --out=DIR --table       # table.md and curves.png
    ENV/bin/python -m benchmarks.memory_tasks --out=DIR --speed

With ``--speed`` it only times how fast wider modules act and learn. The memory modules
are those of memory_models.py. The tasks come from gymnax (bsuite, a bandit, and CartPole without
velocities) and from xminigrid (memory in a T-maze). An episode of CartPole lasts as long as the
agent succeeds. No task suite that runs here has endless tasks like those of Memory Gym.

A row is one training run, with a task, a memory module, a learning rate and a seed. Each point of
its curve is the mean return of the episodes that ended since the previous point. The score of a row
is the mean over the last fifth of the points. The program first runs every learning rate with the
first seed, and then the best rate with the other seeds. It writes each finished row to a JSON file
of its own, so the same command continues after an interruption. No new row starts after
``--budget`` seconds. All rows have the same PPO settings, the same output heads, and the same
encoder of observation, last action and last reward; only the memory module differs. In memorax,
policy and value have separate networks, each with a memory of its own.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from memorax.algorithms import PPO, PPOConfig
from memorax.networks import Network, heads

from benchmarks import memory_models
from benchmarks.interleaved import machine
from txl_jax.analysis.speed import ratio, summary, time_alternating, timed

MODELS = ("gru", "attention", "txl", "gtrxl")
RATES = (1e-4, 3e-4, 1e-3)
SEEDS = (0, 1, 2)


class Gymnax:
    """A task of gymnax; its parameters can be changed, and entries of its observation hidden."""

    def __init__(self, name: str, hide: tuple[int, ...] = (), **changed: Any):
        import gymnax

        self.env, params = gymnax.make(name)
        self.params = params.replace(**changed)
        self.hide, self.actions = hide, self.env.action_space(self.params)

    def reset(self, key):
        """Returns observation and state."""
        observation, state = self.env.reset(key, self.params)
        return self._seen(observation), state

    def step(self, key, state, action):
        """Returns observation, state, reward, and whether the episode ended."""
        observation, state, reward, *ends, _ = self.env.step(key, state, action, self.params)
        return self._seen(observation), state, reward, functools.reduce(jnp.logical_or, ends)

    def _seen(self, observation):
        flat = jnp.asarray(observation, jnp.float32).reshape(-1)
        return jnp.delete(flat, np.array(self.hide, int), assume_unique_indices=True)


class MiniGrid:
    """A task of xminigrid; the observation has one-hot kinds and colours of the cells in view."""

    def __init__(self, name: str):
        import xminigrid
        from gymnax.environments.spaces import Discrete
        from xminigrid.core.constants import NUM_COLORS, NUM_TILES
        from xminigrid.wrappers import GymAutoResetWrapper

        env, self.params = xminigrid.make(name)
        self.env, self.kinds = GymAutoResetWrapper(env), (NUM_TILES, NUM_COLORS)
        self.actions = Discrete(env.num_actions(self.params))

    def reset(self, key):
        """Returns observation and state, as :meth:`Gymnax.reset` does."""
        state = self.env.reset(self.params, key)
        return self._seen(state.observation), state

    def step(self, key, state, action):
        """Steps as :meth:`Gymnax.step` does; ``key`` is unused, because the state has a key."""
        state = self.env.step(self.params, state, action)
        return self._seen(state.observation), state, state.reward, state.last()

    def _seen(self, view):
        parts = (jax.nn.one_hot(view[..., n], kind) for n, kind in enumerate(self.kinds))
        return jnp.concatenate([part.reshape(-1) for part in parts])


TASKS: dict[str, Callable[[], Gymnax | MiniGrid]] = {
    "memory_chain": lambda: Gymnax("MemoryChain-bsuite", memory_length=30),
    "umbrella_chain": lambda: Gymnax("UmbrellaChain-bsuite", chain_length=30),
    "bandit": lambda: Gymnax("BernoulliBandit-misc"),
    "cartpole": lambda: Gymnax("CartPole-v1", hide=(1, 3)),
    "memory_s8": lambda: MiniGrid("MiniGrid-MemoryS8"),
    "memory_s16": lambda: MiniGrid("MiniGrid-MemoryS16"),
}


class Recorded:
    """A task with the interface of memorax's environments; reports the return of each episode."""

    def __init__(self, task: Gymnax | MiniGrid):
        self.task = task

    def reset(self, key, params=None):
        """Returns observation and state."""
        observation, state = self.task.reset(key)
        return observation, (state, jnp.zeros(()))

    def step(self, key, state, action, params=None):
        """Returns observation, state, reward, whether the episode ended, and a dict of information.

        ``returned`` in the dict is the return of an episode that ended, else NaN.
        """
        observation, own, reward, done = self.task.step(key, state[0], action)
        reward = jnp.asarray(reward, jnp.float32)
        total = state[1] + reward
        info = {"returned": jnp.where(done, total, jnp.nan)}
        return observation, (own, jnp.where(done, 0.0, total)), reward, done, info

    def action_space(self, params=None):
        """Returns the space of actions."""
        return self.task.actions


class Encoder(nn.Module):
    """Encodes the input of a memory: observation, last action and last reward of the episode."""

    actions: int
    width: int

    @nn.compact
    def __call__(self, observation, action, reward, done, **_):
        """Returns the encoded steps [B,T,D]; an array has B environments, and D is ``width``.

        At the first step of an episode, where ``done`` is true, the last action is encoded as
        "none" and the last reward as 0.
        """
        begins = done.astype(bool)
        action = jax.nn.one_hot(jnp.where(begins, self.actions, action), self.actions + 1)
        reward = jnp.where(begins[..., None], 0.0, reward)
        x = jnp.concatenate([observation, action, reward], axis=-1)
        return nn.Dense(self.width)(nn.gelu(nn.Dense(self.width)(x)))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Settings that all rows have in common; they are also flags of the command."""

    steps: int = 524288  # environment steps of a row, summed over the environments
    environments: int = 128
    rollout: int = 64  # steps per update in each environment; length of a training window
    mem_len: int = 64
    points: int = 16  # number of points of a curve
    value_clipping: int = 1  # 1: PPO clips the change of a value in an update; 0: no clipping


class Agent:
    """An agent with a memory module for a task; one compiled program trains all rates and seeds."""

    def __init__(self, task: str, model: str, sizes: Sizes):
        env = Recorded(TASKS[task]())
        actions = int(env.action_space().n)
        memory = memory_models.torso(model, sizes.rollout, sizes.mem_len)
        self.parameters = memory_models.parameters(memory, memory_models.WIDTH)
        network = functools.partial(Network, Encoder(actions, memory_models.WIDTH), memory)
        adam = optax.inject_hyperparams(optax.adam, static_args=("eps",))
        optimizer = optax.chain(
            optax.clip_by_global_norm(0.5), adam(learning_rate=jnp.float32(0), eps=1e-5)
        )
        settings = PPOConfig(
            name=f"{task} {model}", num_envs=sizes.environments, num_eval_envs=1,
            num_steps=sizes.rollout, gamma=0.99, gae_lambda=0.95, num_minibatches=8,
            update_epochs=4, normalize_advantage=True, clip_coef=0.2, ent_coef=0.01,
            vf_coef=0.5, clip_vloss=bool(sizes.value_clipping),
        )  # fmt: skip
        actor, critic = network(heads.Categorical(actions)), network(heads.VNetwork())
        self.ppo = PPO(settings, env, None, actor, critic, optimizer, optimizer)
        self.sizes = sizes
        self._compiled: Any = None

    def _compile(self, key, state):
        """Returns the program that trains up to a curve's next point, and its environment steps."""
        unit = self.sizes.environments * self.sizes.rollout
        count = max(self.sizes.steps // self.sizes.points // unit, 1) * unit
        self._compiled = self.ppo.train.lower(self.ppo, key, state, count).compile(), count
        return self._compiled

    def run(self, rate: float, seed: int) -> dict[str, Any]:
        """Trains with a learning rate and a seed; returns the curve, the parameters and the times.

        ``parameters`` is the number of the memory module's parameters. ``seconds`` is wall-clock
        time and ``cpu`` processor time, both without compilation.
        """
        s, curve = self.sizes, []
        key, state = self.ppo.init(jax.random.key(seed))
        state = state.replace(
            actor_optimizer_state=_with_rate(state.actor_optimizer_state, rate),
            critic_optimizer_state=_with_rate(state.critic_optimizer_state, rate),
        )
        train, count = self._compiled or self._compile(key, state)
        start, cpu = time.perf_counter(), time.process_time()
        for point in range(1, s.points + 1):
            key, state, transitions = train(key, state)
            returned = np.asarray(transitions.info["returned"])
            ended = returned[~np.isnan(returned)]
            curve.append([point * count, float(ended.mean()) if ended.size else None])
        seconds = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        return {"curve": curve, "parameters": self.parameters, **seconds}


def _with_rate(optimizer_state, rate: float):
    """Returns the optimizer's state with the learning rate ``rate``."""
    clip, adam = optimizer_state
    changed = {**adam.hyperparams, "learning_rate": jnp.float32(rate)}
    return clip, adam._replace(hyperparams=changed)


class Rows:
    """Reads and writes the rows of a folder, which has one file for each row.

    ``rates`` and ``seeds`` are the learning rates and seeds that the command tries.
    """

    def __init__(self, folder: str, sizes: Sizes, rates=RATES, seeds=SEEDS):
        self.folder, self.sizes = pathlib.Path(folder), sizes
        self.rates, self.seeds = rates, seeds
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, task: str, model: str, rate: float, seed: int) -> pathlib.Path:
        """Returns the file of a row."""
        return self.folder / f"{task}-{model}-{rate:g}-{seed}.json"

    def read(self, *row: Any) -> dict[str, Any] | None:
        """Returns a row, or ``None`` if it has no file yet."""
        path = self.path(*row)
        if not path.is_file():
            return None
        found = json.loads(path.read_text())
        made_with = {"value_clipping": 1, **found["sizes"]}  # missing in older files
        if made_with != dataclasses.asdict(self.sizes):
            raise SystemExit(f"{path} has other sizes, {found['sizes']}: use another --out")
        return found

    def write(self, found: dict[str, Any], *row: Any) -> None:
        """Writes a row to its file atomically."""
        about = dict(zip(("task", "model", "rate", "seed"), row, strict=True))
        text = json.dumps({**about, "sizes": dataclasses.asdict(self.sizes), **found})
        temporary = self.path(*row).with_suffix(f".{os.getpid()}")
        temporary.write_text(text + "\n")
        temporary.replace(self.path(*row))

    def best_rate(self, task: str, model: str) -> float | None:
        """Returns the learning rate that has the best score with the first seed.

        Returns ``None`` if a learning rate has not run with this seed yet.
        """
        grid = [self.read(task, model, rate, self.seeds[0]) for rate in self.rates]
        if not all(grid):
            return None
        return self.rates[int(np.argmax([score(row) for row in grid]))]

    def of_best_rate(self, task: str, model: str) -> list[dict[str, Any]]:
        """Returns the finished rows of the best rate, at most one for each seed."""
        rate = self.best_rate(task, model)
        found = [rate and self.read(task, model, rate, seed) for seed in self.seeds]
        return [row for row in found if row]


def score(row: Any, share: float = 0.2) -> float:
    """Returns the mean return over the last ``share`` of a curve's points.

    Returns -inf if no episode ended at these points.
    """
    count = max(int(len(row["curve"]) * share), 1)
    last = [y for _, y in row["curve"][-count:] if y is not None]
    return statistics.fmean(last) if last else -np.inf


def missing(rows: Rows, tasks: list[str], models: list[str]) -> Iterator[tuple[Any, ...]]:
    """Yields the rows still to run, each as (task, memory, learning rate, seed).

    Of each task come first all rates with the first seed, then the best rate with the other seeds.
    """
    first, *others = rows.seeds
    for task in tasks:
        for model, rate in itertools.product(models, rows.rates):
            if not rows.read(task, model, rate, first):
                yield task, model, rate, first
        for model, seed in itertools.product(models, others):
            best = rows.best_rate(task, model)
            if best and not rows.read(task, model, best, seed):
                yield task, model, best, seed


def train_rows(rows: Rows, tasks: list[str], models: list[str], budget: float) -> None:
    """Runs the missing rows; starts no row after ``budget`` seconds."""
    start, agents = time.monotonic(), functools.lru_cache(maxsize=1)(Agent)
    for task, model, rate, seed in missing(rows, tasks, models):
        if time.monotonic() - start > budget:
            print("the budget is used up; the same command goes on from here")
            return
        found = {**agents(task, model, rows.sizes).run(rate, seed), "machine": machine()}
        rows.write(found, task, model, rate, seed)
        print(f"{task} {model} rate {rate:g} seed {seed}: {score(found):.3f},"
              f" {found['seconds']:.0f} s", flush=True)  # fmt: skip


def table(rows: Rows) -> str:
    """Returns a table in Markdown, with a line for each task and memory.

    A pair of task and memory is left out until all its learning rates have run.
    """
    lines = ["| task | memory | rate | score: mean (each seed) | whole curve | steps"]
    lines[0] += " | CPU seconds | parameters |"
    lines.append("|---" * 8 + "|")
    for task, model in itertools.product(TASKS, MODELS):
        found = rows.of_best_rate(task, model)
        if found:
            scores = [score(row) for row in found]
            each, took = ", ".join(f"{x:.2f}" for x in scores), [row["cpu"] for row in found]
            first, mean = found[0], f"{statistics.fmean(scores):.2f} ({each})"
            whole = statistics.fmean(score(row, 1) for row in found)
            lines.append(
                f"| {task} | {model} | {first['rate']:g} | {mean} | {whole:.2f}"
                f" | {first['curve'][-1][0]:,} | {statistics.fmean(took):.0f}"
                f" | {first['parameters']:,} |"
            )
    return "\n".join(lines) + "\n"


def draw(rows: Rows) -> None:
    """Draws the curves of all tasks to curves.png.

    The thin lines are single seeds; the thick line of a memory is the mean over its seeds.
    """
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if any(rows.of_best_rate(task, model) for model in MODELS)]
    columns = -(-len(tasks) // 2)
    figure = Figure(figsize=(4 * columns, 7), layout="constrained")
    panels = [*figure.subplots(2, columns, squeeze=False).flat]
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    for axes, task in zip(panels, tasks, strict=False):
        axes.set(title=task, xlabel="environment steps", ylabel="mean return of an episode")
        for n, model in enumerate(MODELS):
            curves = [np.array(row["curve"], float) for row in rows.of_best_rate(task, model)]
            for curve in curves:
                axes.plot(*curve.T, color=f"C{n}", alpha=0.3, linewidth=0.8)
            if curves:
                mean = np.mean([curve[:, 1] for curve in curves], axis=0)
                axes.plot(curves[0][:, 0], mean, color=f"C{n}", label=model)
                axes.legend()
    figure.savefig(rows.folder / "curves.png", dpi=120)


def speed(rounds: int, rows: int = 64, mem_len: int = 128, width: int = 256, steps: int = 64):
    """Times acting and learning of four memory modules in turn; returns the report.

    Each module has two layers. The large attention has 0.95 times as many parameters as GTrXL, and
    the other attention has 0.74 times as many.
    """
    memories = {
        "attention": memory_models.attention(width, steps, mem_len, expansion=4),
        "large attention": memory_models.attention(width, steps, mem_len, expansion=6),
        "txl": memory_models.txl(width, mem_len, 4 * width, gated=False),
        "gtrxl": memory_models.txl(width, mem_len, width, gated=True),
    }
    x = jax.random.normal(jax.random.key(0), (rows, steps, width))
    begins = jax.random.bernoulli(jax.random.key(1), 0.02, (rows, steps)).astype(jnp.int32)

    def programs(memory: Any):
        carry = memory.initialize_carry(jax.random.key(0), (rows, width))
        apply = lambda v, x, mask, carry: memory.apply(v, x, mask=mask, initial_carry=carry)
        variables = jax.jit(memory.init)(
            jax.random.key(0), x[:, :1], mask=begins[:, :1], initial_carry=carry
        )

        def act(variables, carry):
            step = lambda carry, now: apply(variables, now[0][:, None], now[1][:, None], carry)
            carry, y = jax.lax.scan(step, carry, (x.swapaxes(0, 1), begins.T))
            return carry, y[:, :, 0].swapaxes(0, 1)

        def learn(variables, carry):
            loss = lambda v: jnp.mean(apply(v, x, begins, carry)[1] ** 2)
            return jax.grad(loss)(variables)

        act, learn = jax.jit(act), jax.jit(learn)
        full = carry
        for _ in range(3):  # fills all memory slots
            full, _ = act(variables, full)
        window = jax.jit(apply)(variables, x, begins, full)[1]
        difference = float(jnp.abs(act(variables, full)[1] - window).max())
        run = lambda program: lambda: timed(lambda: program(variables, full))
        return {"act": run(act), "learn": run(learn), "difference": difference}

    compiled = {name: programs(memory) for name, memory in memories.items()}
    differences = {name: found["difference"] for name, found in compiled.items()}
    print("acting minus learning, largest entry:", differences, flush=True)
    report: dict[str, Any] = {"differences": differences, "machine": machine(), "parameters": {
        name: memory_models.parameters(memory, width) for name, memory in memories.items()
    }}  # fmt: skip
    for what in ("act", "learn"):
        seconds = time_alternating({n: p[what] for n, p in compiled.items()}, rounds)
        report[what] = {name: summary(found) for name, found in seconds.items()}
        pairs = (("attention", "txl"), ("attention", "gtrxl"), ("large attention", "gtrxl"))
        for other, name in pairs:
            times = report[what][f"{other} / {name}"] = ratio(seconds[other], seconds[name])
            print(f"{what}: {name} {1e3 * report[what][name]['median']:.0f} ms,"
                  f" {times['median']:.2f} times as fast as {other}", flush=True)  # fmt: skip
    return report


def main(argv: list[str] | None = None) -> None:
    """Runs rows, draws the table, or measures the speed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", required=True, help="folder of the rows, the table and the picture")
    add("--budget", type=float, default=float("inf"), help="seconds after which no row starts")
    add("--tasks", default=",".join(TASKS))
    add("--models", default=",".join(MODELS))
    add("--rates", default=",".join(map(str, RATES)), help="the grid of learning rates")
    add("--seeds", default=",".join(map(str, SEEDS)), help="the first one is that of the grid")
    add("--table", action="store_true", help="only table.md and curves.png, from the rows")
    add("--speed", action="store_true", help="only speed.json")
    add("--rounds", type=int, default=10, help="of --speed")
    for field in dataclasses.fields(Sizes):
        add(f"--{field.name}", type=int, default=field.default)
    flags = parser.parse_args(argv)
    sizes = Sizes(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(Sizes)})
    rates, seeds = map(float, flags.rates.split(",")), map(int, flags.seeds.split(","))
    rows = Rows(flags.out, sizes, tuple(rates), tuple(seeds))
    if flags.speed:
        text = json.dumps(speed(flags.rounds), indent=1) + "\n"
        (rows.folder / "speed.json").write_text(text)
        return
    if not flags.table:
        train_rows(rows, flags.tasks.split(","), flags.models.split(","), flags.budget)
    text = table(rows)
    (rows.folder / "table.md").write_text(text)
    draw(rows)
    print(text)


if __name__ == "__main__":
    main()
