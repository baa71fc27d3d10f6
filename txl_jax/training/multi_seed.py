"""Runs that differ by their seed alone, side by side in one program on one device.

A small model does not fill a GPU. Several seeds of it, mapped over a leading axis of the state and
of the batches (``jax.vmap``), share its kernels (how much that saves: *not run*), and their spread
is the error bar of any comparison. Each has a workdir of its own that looks as if it had been
trained alone, to rounding: initial weights, dropout, and drawn lengths or rolled streams are of
its own seed.

    runs/ptb/seed_0/   config.json  checkpoints/  metrics.jsonl ..     seed s
    runs/ptb/seed_1/                                                  seed s + 1
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.config import ConfigError, ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import prefetch, training_feed
from txl_jax.training.distil import soft_targets
from txl_jax.training.loop import Outcome, Run, opened
from txl_jax.training.parts import Parts, parts_of, text_on_device
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.state import TrainState
from txl_jax.training.step import dispatch


def each(exp: ExperimentConfig, workdir: str) -> list[tuple[ExperimentConfig, str]]:
    """Experiment and workdir of every run; the one given where it is one only."""
    n = exp.train.num_seeds
    if n == 1:
        return [(exp, workdir)]
    alone = dataclasses.replace(exp.train, num_seeds=1)
    seeds = range(exp.seed, exp.seed + n)
    return [
        (
            dataclasses.replace(exp, seed=seed, train=alone),
            os.path.join(workdir, f"seed_{seed}"),
        )
        for seed in seeds
    ]


def train_seeds(
    runs: list[tuple[ExperimentConfig, str]], corpus: Corpus, stop: PreemptionGuard
) -> list[Outcome]:
    """Trains all runs to their last step, from the newest checkpoint that all of them have.

    Raises:
      ConfigError: more than one device or process.
      CheckpointError: one of them cannot go on from where the others do.
      DataError, NonFiniteError, SkippedError: as :func:`~txl_jax.training.loop.train`.
    """
    first = runs[0][0]
    if jax.process_count() > 1:
        raise ConfigError(
            "config key train.num_seeds: is for one process; train the seeds one by one"
        )
    parts = parts_of(first, corpus)
    if parts.shardings.mesh.size > 1:
        raise ConfigError(
            "config key train.num_seeds: is for one device; give --config.mesh.data=1"
        )
    upto = _last_step_of_all([workdir for _, workdir in runs])
    with contextlib.ExitStack() as stack:
        there = [
            stack.enter_context(
                opened(exp, corpus, workdir, stop, parts, upto, label=f"seed {exp.seed}")
            )
            for exp, workdir in runs
        ]
        all_runs, states = [run for run, _ in there], [state for _, state in there]
        steps = {int(state.step) for state in states}
        if len(steps) > 1:
            raise CheckpointError(
                f"runs side by side must go on from one step, and theirs are {sorted(steps)}: a"
                " checkpoint is damaged; go on with each run alone, or start anew elsewhere"
            )
        if steps != {first.train.steps}:
            run, workdir = all_runs[0], runs[0][1]
            soft = soft_targets(run.exp, corpus, workdir, run.log.message, stop.requested)
            run.text = text_on_device(run.exp, run.streams, parts.shardings, soft)
        return _go(all_runs, states, parts)


def _go(runs: list[Run], states: list[TrainState], parts: Parts) -> list[Outcome]:
    """All steps that are left, as :meth:`Run.go` of one run."""
    t, step = runs[0].exp.train, int(states[0].step)
    for run, state in zip(runs, states, strict=True):
        run.log.goodput = runs[0].log.goodput  # one clock: all wait for one program
        run.begin(step, state)
    state = jax.jit(_stacked)(states)
    one = jax.jit(lambda tree, r: jax.tree.map(lambda x: x[r], tree))
    seeds = seeds_of(runs)
    if step < t.steps and not runs[0].stop.requested():
        shapes = jax.tree.map(_with_runs(len(runs)), runs[0].fed_shapes())
        text = runs[0].text
        of_all = _step_of_all(runs[0].exp, parts)
        program = runs[0].compiled(of_all, state, shapes, text, seeds)
        for batch in runs[0].log.goodput.waiting(_batches(runs, step)):
            if runs[0].stop.requested():
                break
            state, metrics = program(state, batch, text, seeds)
            step += t.steps_per_dispatch
            for r, run in enumerate(runs):
                run.dispatched(step, {name: value[r] for name, value in metrics.items()})
                if run.due(step):
                    run.keep(step, one(state, r))
    return [run.end(step, one(state, r)) for r, run in enumerate(runs)]


def seeds_of(runs: Any) -> jax.Array:
    """The seed of every run, uint32 [R]: seeds have 32 bits, and int32 has 31 for them."""
    return jnp.array([run.exp.seed for run in runs], jnp.uint32)


def _step_of_all(exp: ExperimentConfig, parts: Parts) -> Any:
    """A dispatch of every run, jitted; all but the text have runs in front."""
    of_one = dispatch(exp, parts.model, parts.optimizer)
    return jax.jit(jax.vmap(of_one, in_axes=(0, 0, None, 0)), donate_argnums=(0,))


def _batches(runs: list[Run], start: int) -> Iterator[Any]:
    """Batches, or places, of every dispatch that is left, stacked over runs and read ahead."""
    t = runs[0].exp.train
    about = (t.epoch_memory, t.steps_per_dispatch, None, t.reset_every, runs[0].of_step)
    with contextlib.ExitStack() as stack:
        feeds = []
        for run in runs:
            feed = training_feed(run.streams, start, t.steps, *about)
            stack.callback(feed.close)
            feeds.append(feed)
        ahead = prefetch(_stacked(batches) for batches in zip(*feeds, strict=True))
        stack.callback(ahead.close)
        yield from ahead


def _stacked(trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _with_runs(n: int) -> Any:
    return lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype)


def _last_step_of_all(workdirs: list[str]) -> int:
    """The newest step that every run has a checkpoint of; 0 where there is none."""
    steps = []
    for workdir in workdirs:
        with Checkpoints(workdir) as checkpoints:
            steps.append(set(checkpoints.steps()))
    return max(set.intersection(*steps), default=0)
