"""Trains several seeds in one program on one device.

A small model does not use a whole GPU. Runs that differ only in their seed can share kernels (the
speed-up is *not run*). Fused attention computes one seed after the other. ``jax.vmap`` maps the
step over a leading axis of states and batches. Each seed has its own workdir, and the result of a
run of its own up to rounding.

    runs/ptb/seed_0/   config.json  checkpoints/  metrics.jsonl ..     seed s
    runs/ptb/seed_1/                                                  seed s + 1
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.config import ConfigError, ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import prefetch
from txl_jax.messages import argument
from txl_jax.model.kernels.choice import compiler_options
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.training.events import Logger
from txl_jax.training.goodput import GoodputTimer
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.preparation import SeedRun
from txl_jax.training.setup import build_setup
from txl_jax.training.state import TrainState
from txl_jax.training.step import Metrics, dispatch
from txl_jax.training.trainer import Outcome, Program, Trainer, open_trainer, run_steps, train


def train_seeds(
    runs: Sequence[SeedRun],
    corpus: Corpus,
    guard: PreemptionGuard,
    loggers: Sequence[Logger] = (),
) -> list[Outcome]:
    """Trains all seeds to the last step, from the newest checkpoint that all seeds have.

    ``loggers`` has one for each seed, which is started, and not closed.

    A single seed is trained with :func:`~txl_jax.training.trainer.train`, which lists the errors.
    Several seeds raise ConfigError on more than one device, and CheckpointError if the seeds cannot
    resume from the same step.
    """
    exp, workdir = runs[0]
    if len(runs) == 1:
        return [train(exp, corpus, workdir, guard, *loggers)]
    if jax.process_count() > 1:
        raise _needs_one("process; train each seed in its own run")
    setup = build_setup(exp, corpus)
    check_one_device(setup.shardings.mesh)
    last_step = _last_common_step([workdir for _, workdir in runs])
    timer = GoodputTimer()  # shared, because all seeds wait for the same program
    with contextlib.ExitStack() as stack:
        opened = []
        for (exp, folder), own in zip(runs, loggers or [Logger()] * len(runs), strict=True):
            own_part = (last_step, f"seed {exp.seed}", timer, own)
            opening = open_trainer(exp, corpus, folder, guard, setup, *own_part)
            opened.append(stack.enter_context(opening))
        trainers, at, make_states = (list(x) for x in zip(*opened, strict=True))
        steps = set(at)
        if len(steps) > 1:
            raise CheckpointError(
                f"all seeds must resume from the same step, but their steps are {sorted(steps)}: a"
                " checkpoint is damaged; resume each seed alone, or train in another workdir"
            )
        step, state = steps.pop(), lambda: jax.jit(_stacked)([make() for make in make_states])
        program, feed = lambda: _program(trainers), lambda: _feed(trainers, step)
        select = jax.jit(lambda tree, seed: jax.tree.map(lambda x: x[seed], tree))
        return run_steps(trainers, state, step, program, feed, select)


def check_one_device(mesh: Mesh) -> None:
    """Raises ConfigError if a mesh, on which several seeds are to train, has several devices."""
    if mesh.size > 1:
        raise _needs_one(f"device; give {argument('config.mesh.data', 1)}")


def _needs_one(what: str) -> ConfigError:
    return ConfigError(f"config key train.num_seeds: several seeds need one {what}")


def seeds_step(
    exp: ExperimentConfig, model: TransformerXL, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns :func:`~txl_jax.training.step.dispatch` for all seeds, with ``jit``.

    All arguments except the text have a leading axis of seeds. The function donates the state.
    """
    mapped = jax.vmap(dispatch(exp, model, optimizer), in_axes=(0, 0, None, 0))
    return jax.jit(mapped, donate_argnums=(0,), compiler_options=compiler_options(model.mesh))


def _program(trainers: list[Trainer]) -> Program:
    first, seeds = trainers[0], seed_array([trainer.exp for trainer in trainers])
    with_seeds = lambda x: jax.ShapeDtypeStruct((len(trainers), *x.shape), x.dtype)
    state, shapes = jax.tree.map(with_seeds, (first.setup.abstract, first.input_shapes()))
    jitted = seeds_step(first.exp, first.setup.model, first.setup.optimizer)
    compiled = first.compile(jitted, state, shapes, first.text, seeds)
    return lambda state, inputs: compiled(state, inputs, first.text, seeds)


def seed_array(exps: Sequence[ExperimentConfig]) -> jax.Array:
    """Returns the seeds of the experiments as uint32 [R]; int32 cannot hold all 32-bit seeds."""
    return jnp.array([exp.seed for exp in exps], jnp.uint32)


def _feed(trainers: list[Trainer], step: int) -> Generator[Any, None, None]:
    """Yields the inputs of every dispatch from ``step`` on, stacked over seeds and prefetched."""
    with contextlib.ExitStack() as stack:
        close = lambda feed: stack.enter_context(contextlib.closing(feed))
        feeds = [close(trainer.feed(step, sharded=False)) for trainer in trainers]
        yield from close(prefetch(_stacked(inputs) for inputs in zip(*feeds, strict=True)))


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _last_common_step(workdirs: list[str]) -> int:
    """Returns the newest step for which every seed has a checkpoint, or 0 if there is none."""
    steps = []
    for workdir in workdirs:
        with Checkpoints(workdir) as checkpoints:
            steps.append(set(checkpoints.steps()))
    return max(set.intersection(*steps), default=0)
