"""Trains several seeds in one program on one device.

A small model does not use a whole GPU. Runs that differ only in their seed can share kernels (the
speed-up is *not run*). Fused attention computes one seed after the other. ``jax.vmap`` maps the
step over a leading axis of states and batches. Each seed has its own workdir. A seed has the same
result as in a run of this seed alone, up to rounding.

    runs/ptb/seed_0/   config.json  checkpoints/  metrics.jsonl ..     seed s
    runs/ptb/seed_1/                                                  seed s + 1
"""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.checkpoint.checkpoint_folder import CheckpointFolder
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.config import ExperimentConfig
from txl_jax.data.feed import prefetch
from txl_jax.messages import shown_path
from txl_jax.training.distil import copy_soft_targets
from txl_jax.training.events import Logger
from txl_jax.training.goodput import GoodputTimer
from txl_jax.training.plan import Plan
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.state import TrainState
from txl_jax.training.trainer import Program, Trainer


@contextlib.contextmanager
def open_trainers(
    plan: Plan, guard: PreemptionGuard, loggers: Sequence[Logger] = ()
) -> Iterator["Trainer | StackedSeeds"]:
    """Yields the trainer of one seed, or :class:`StackedSeeds` for the trainers of several seeds.

    All seeds start at the newest step of which each has a checkpoint. Raises CheckpointError if the
    seeds cannot resume from the same step.
    """
    last_step = common_step(plan) if len(plan.runs) > 1 else None
    timer = GoodputTimer()  # shared, because all seeds wait for the same program
    with contextlib.ExitStack() as stack:
        trainers = []
        for run, logger in zip(plan.runs, loggers or [Logger()] * len(plan.runs), strict=True):
            checkpoints = stack.enter_context(Checkpoints(run.workdir, run.exp.checkpoint))
            trainer = Trainer(plan, run, checkpoints, guard, logger, last_step, timer)
            trainers.append(stack.enter_context(contextlib.closing(trainer)))
            trainer.log_start()
        steps = {trainer.step for trainer in trainers}
        if len(steps) > 1:
            raise CheckpointError(
                f"all seeds must resume from the same step, but their steps are {sorted(steps)}: a"
                " checkpoint is damaged; resume each seed alone, or train in another workdir"
            )
        if len(trainers) > 1:
            for trainer in trainers:
                trainer.remove_later_checkpoints()
        yield StackedSeeds(trainers) if len(trainers) > 1 else trainers[0]


class StackedSeeds:
    """Has the methods of :class:`Trainer` that the training loop calls, for several seeds at once.

    The arrays of states, inputs and metrics get a leading axis of seeds.
    """

    def __init__(self, trainers: list[Trainer]):
        self.trainers, self.step, self._first = trainers, trainers[0].step, trainers[0]
        self._select = jax.jit(lambda tree, seed: jax.tree.map(lambda x: x[seed], tree))

    def load_text(self) -> None:
        """Loads the text once for all seeds, and copies soft targets into every seed's folder."""
        self._first.load_text()
        for trainer in self.trainers[1:]:
            trainer.text = self._first.text
            copy_soft_targets(self._first.log.workdir, trainer.log.workdir)

    def make_state(self) -> TrainState:
        """Returns the restored or initial states of all seeds, stacked.

        One array after the other is stacked and freed, so at most one is in memory twice.
        """
        states = [trainer.make_state() for trainer in self.trainers]
        structure, leaves = jax.tree.structure(states[0]), [jax.tree.leaves(s) for s in states]
        del states  # an array is freed once it is stacked
        count = range(len(leaves[0]))
        return jax.tree.unflatten(structure, [jnp.stack([x.pop(0) for x in leaves]) for _ in count])

    def program(self) -> Program:
        """Compiles one dispatch of all seeds."""
        first, seeds = self._first, seed_array([trainer.exp for trainer in self.trainers])
        with_seeds = lambda x: jax.ShapeDtypeStruct((len(self.trainers), *x.shape), x.dtype)
        state, shapes = jax.tree.map(with_seeds, (first.setup.abstract, first.input_shapes()))
        compiled = first.compile(state, shapes, first.text, seeds)
        return lambda state, inputs: compiled(state, inputs, first.text, seeds)

    def feed(self, step: int) -> Generator[Any, None, None]:
        """Yields the inputs of each dispatch from ``step`` on, prepared in advance by a thread."""
        feeds = [trainer.feed(step, sharded=False) for trainer in self.trainers]
        stacked = lambda *leaves: jnp.stack(leaves)
        return prefetch(jax.tree.map(stacked, *inputs) for inputs in zip(*feeds, strict=True))

    def part(self, tree: Any, seed: int) -> Any:
        """Returns a seed's part of a state or of metrics."""
        return self._select(tree, seed)


def common_step(plan: Plan) -> int:
    """Returns the newest step of which every seed has a checkpoint.

    Returns 0 if there is no such step because the run stopped before each seed had its first
    checkpoint. Otherwise, raises CheckpointError if there is none.
    """
    steps = {run.workdir: CheckpointFolder(run.workdir).steps() for run in plan.runs}
    if common := set.intersection(*map(set, steps.values())):
        return max(common)
    exp = plan.runs[0].exp
    first = min(exp.checkpoint.every, exp.train.eval_every or exp.train.steps)
    if max(sum(steps.values(), [0])) <= first:
        return 0  # stopped between the first saves of two seeds
    told = "; ".join(
        f"{shown_path(w)}: {', '.join(map(str, s)) or 'none'}" for w, s in steps.items()
    )
    raise CheckpointError(
        f"no step has a checkpoint of all seeds ({told}), and to begin again would discard their"
        " records; resume each seed alone in its folder, or train in another workdir"
    )


def seed_array(exps: Sequence[ExperimentConfig]) -> jax.Array:
    """Returns the seed of each experiment, uint32 [R]; int32 cannot hold all 32-bit seeds."""
    return jnp.array([exp.seed for exp in exps], jnp.uint32)
