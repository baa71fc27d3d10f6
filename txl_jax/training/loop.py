"""The training loop, for one seed or for several seeds in one program."""

import contextlib
import functools
from collections.abc import Sequence

from txl_jax.parallel.device_memory import TRAINING, TRAINING_STATE, explained
from txl_jax.training.events import Logger
from txl_jax.training.multi_seed import open_trainers
from txl_jax.training.plan import Plan
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.profile import traced_steps
from txl_jax.training.trainer import Outcome


def train(plan: Plan, guard: PreemptionGuard, loggers: Sequence[Logger] = ()) -> list[Outcome]:
    """Trains to the last step or until the guard asks to stop; returns the outcome of each seed.

    Training starts from the newest checkpoint of the workdir, or from the newest that all seeds
    have. A resumed run and an uninterrupted run end with the same bits: the whole state is
    restored, and the data and the dropout are functions of the step. ``loggers`` has a logger for
    each seed, which is started but not closed here.

    Raises:
      ConfigError: the program does not fit the memory.
      ModelFormatError: the exported model of ``train.start_from`` cannot be read.
      CheckpointError: a checkpoint has another config, or cannot be written, or seeds cannot resume
        from the same step.
      NonFiniteError: a loss, a gradient or a state is not finite. This state is not saved.
      SkippedError: too many updates in a row were skipped. This state is not saved.
    """
    # Checkpoints are restored first, so that an unusable one ends the run within seconds.
    with open_trainers(plan, guard, loggers) as seeds:
        t, trainers, step = plan.setup.exp.train, seeds.trainers, seeds.step
        log = trainers[0].log

        # The program is compiled before the state is made, because it might not fit the memory.
        program = None
        with explained(TRAINING_STATE):
            if step < t.steps:
                seeds.load_text()
                program = None if guard.requested() else seeds.program()
            state = seeds.make_state()

        # If the run was stopped during a validation, that validation is run again.
        for i, trainer in enumerate(trainers):
            if not trainer.validated:
                trainer.validated = trainer.validate(step, seeds.part(state, i), replace=True)

        # The host only dispatches updates. It reads their metrics one dispatch late, and the inputs
        # are on the device before they are needed, so the device never waits for the host.
        feed = contextlib.closing(seeds.feed(step))
        tracing = traced_steps(t.profiled_steps, log.workdir, log.message)
        with feed as inputs_of_dispatches, tracing as trace:
            trace(step, state)
            for inputs in log.goodput.waiting(inputs_of_dispatches):
                if program is None or guard.requested():
                    break
                with explained(TRAINING):
                    state, metrics = program(state, inputs)
                step += t.steps_per_dispatch
                trace(step, state)
                for i, trainer in enumerate(trainers):
                    own_state = functools.partial(seeds.part, state, i)  # run only if needed
                    trainer.step_done(step, seeds.part(metrics, i), own_state)

        # The last save is complete when training returns, also after a signal.
        return [trainer.finish(step, seeds.part(state, i)) for i, trainer in enumerate(trainers)]
