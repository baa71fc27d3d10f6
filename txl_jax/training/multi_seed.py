"""Several seeds in one program on one device.

A small model does not fill a GPU. Runs that differ only in their seed can share its kernels
(how much this saves: *not run*): ``jax.vmap`` maps the step over a leading axis of states and
batches. The spread of the results is the error bar of any comparison. Each seed has its own
workdir, which looks as if the seed had been trained alone, to rounding: initial weights, dropout,
and drawn lengths or shuffled streams depend on that seed only.

    runs/ptb/seed_0/   config.json  checkpoints/  metrics.jsonl ..     seed s
    runs/ptb/seed_1/                                                  seed s + 1
"""

import contextlib
import dataclasses
import os
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.config import ConfigError, ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import prefetch
from txl_jax.training.goodput import GoodputTimer
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.setup import build_setup
from txl_jax.training.step import dispatch
from txl_jax.training.trainer import Outcome, Program, Trainer, open_trainer, run_steps, train

SeedRun = tuple[ExperimentConfig, str]
"""The experiment of one seed, and its workdir."""


def seed_runs(exp: ExperimentConfig, workdir: str) -> list[SeedRun]:
    """Experiment and workdir of every seed; those given, if ``train.num_seeds`` is 1."""
    n = exp.train.num_seeds
    if n == 1:
        return [(exp, workdir)]
    single = dataclasses.replace(exp.train, num_seeds=1)
    folder = lambda seed: os.path.join(workdir, f"seed_{seed}")
    seeds = range(exp.seed, exp.seed + n)
    return [(dataclasses.replace(exp, seed=s, train=single), folder(s)) for s in seeds]


def train_seeds(runs: Sequence[SeedRun], corpus: Corpus, guard: PreemptionGuard) -> list[Outcome]:
    """Trains every seed to its last step, from the newest checkpoint that all of them have.

    A single one is trained as :func:`~txl_jax.training.trainer.train` does.

    Raises:
      ConfigError: several seeds, and more than one device or process.
      CheckpointError: the seeds cannot resume from the same step.
      DataError, NonFiniteError, SkippedError: as :func:`~txl_jax.training.trainer.train`.
    """
    exp, workdir = runs[0]
    if len(runs) == 1:
        return [train(exp, corpus, workdir, guard)]
    error = lambda rule: ConfigError(f"config key train.num_seeds: is for one {rule}")
    if jax.process_count() > 1:
        raise error("process; train the seeds one by one")
    setup = build_setup(exp, corpus)
    if setup.shardings.mesh.size > 1:
        raise error("device; give --config.mesh.data=1")
    last_step = _last_common_step([workdir for _, workdir in runs])
    timer = GoodputTimer()  # one for all: every seed waits for the same program
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"last_step": last_step, "goodput": timer}
        opened = [
            stack.enter_context(
                open_trainer(exp, corpus, folder, guard, setup, label=f"seed {exp.seed}", **options)
            )
            for exp, folder in runs
        ]
        trainers, states = (list(x) for x in zip(*opened, strict=True))
        steps = {int(state.step) for state in states}
        if len(steps) > 1:
            raise CheckpointError(
                f"all seeds must resume from one step, and theirs are {sorted(steps)}: a"
                " checkpoint is damaged; resume each seed alone, or train in another --workdir"
            )
        return _fit(trainers, jax.jit(_stacked)(states), steps.pop())


def _fit(trainers: list[Trainer], state: Any, step: int) -> list[Outcome]:
    """:meth:`Trainer.fit` of all seeds, from their stacked state."""
    first, program = trainers[0], None
    if step < first.exp.train.steps:
        first.load_text()
        for trainer in trainers:
            trainer.text = first.text
        if not first.guard.requested():
            program = _program(trainers, state)
    select = jax.jit(lambda tree, seed: jax.tree.map(lambda x: x[seed], tree))
    return run_steps(trainers, state, step, program, _feed(trainers, step), select)


def _program(trainers: list[Trainer], state: Any) -> Program:
    """The compiled dispatch of all seeds; all inputs but the text have a leading axis of seeds."""
    first, seeds = trainers[0], seed_array([trainer.exp for trainer in trainers])
    with_seeds = lambda x: jax.ShapeDtypeStruct((len(trainers), *x.shape), x.dtype)
    shapes = jax.tree.map(with_seeds, first.input_shapes())
    step = dispatch(first.exp, first.setup.model, first.setup.optimizer)
    jitted = jax.jit(jax.vmap(step, in_axes=(0, 0, None, 0)), donate_argnums=(0,))
    compiled = first.compile(jitted, state, shapes, first.text, seeds)
    return lambda state, inputs: compiled(state, inputs, first.text, seeds)


def seed_array(exps: Sequence[ExperimentConfig]) -> jax.Array:
    """The seed of every experiment, uint32 [R]: seeds have 32 bits, int32 has 31 for them."""
    return jnp.array([exp.seed for exp in exps], jnp.uint32)


def _feed(trainers: list[Trainer], step: int) -> Generator[Any, None, None]:
    """Inputs of every dispatch from a step to the last one, stacked over seeds and read ahead."""
    with contextlib.ExitStack() as stack:
        feeds = [
            stack.enter_context(contextlib.closing(trainer.feed(step, None)))
            for trainer in trainers
        ]
        ahead = prefetch(_stacked(inputs) for inputs in zip(*feeds, strict=True))
        yield from stack.enter_context(contextlib.closing(ahead))


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _last_common_step(workdirs: list[str]) -> int:
    """The newest step that every seed has a checkpoint of; 0 where there is none."""
    steps = []
    for workdir in workdirs:
        with Checkpoints(workdir) as checkpoints:
            steps.append(set(checkpoints.steps()))
    return max(set.intersection(*steps), default=0)
