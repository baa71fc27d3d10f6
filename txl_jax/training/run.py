"""A run from its settings to its results: train, evaluate, continue the prompt.

The command, the library, an ablation and a sweep all call :func:`train_and_evaluate` to train.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from txl_jax import records
from txl_jax.checkpoint.checkpoint_folder import CheckpointFolder
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.trained_model import TrainedModel, with_settings
from txl_jax.checkpoint.workdir import loaded_experiment, read_experiment
from txl_jax.checkpoint.workdir_files import CONFIG, no_run
from txl_jax.command_line import command_with
from txl_jax.config import ExperimentConfig, ProtocolConfig, differing_keys
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.evaluation.baselines import check_baselines
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.evaluation.results import Evaluation
from txl_jax.evaluation.split import score_split, write_evaluation
from txl_jax.generation.write import write_continuations
from txl_jax.messages import argument, names_flags, shown_path
from txl_jax.parallel import processes
from txl_jax.paths import names, path, read_text
from txl_jax.training.events import Logger, make_logger
from txl_jax.training.loop import train
from txl_jax.training.plan import check_evaluation_memory, locked_workdirs, plan_run
from txl_jax.training.preemption import PreemptionGuard


class Stopped(KeyboardInterrupt):
    """A signal stopped a run. The message says what is saved. No further run must be started."""

    def __init__(self, received: signal.Signals, saved: str):
        super().__init__(f"stopped by {received.name}{saved}")
        self.signal = received


class FinishedRun(NamedTuple):
    """The folder and the trained model of each seed, and a line with its held-out loss."""

    folders: list[str]
    models: list[TrainedModel]
    lines: list[str]


def train_and_evaluate(
    exp: ExperimentConfig, workdir: str, more_loggers: Sequence[Logger] = ()
) -> FinishedRun:
    """Trains to the last step, evaluates the model, and continues the prompt.

    A run that has begun in ``workdir`` resumes. ``more_loggers`` receive what each seed logs.

    Raises :class:`Stopped` after a signal, and the errors of
    :func:`~txl_jax.training.plan.plan_run` and :func:`~txl_jax.training.loop.train`.
    """
    # Loggers are made first: if a package is not installed, the error comes before any work.
    loggers = [make_logger(exp.train.wandb, *more_loggers) for _ in range(exp.train.num_seeds)]
    models, lines = [], []
    with PreemptionGuard() as guard, contextlib.ExitStack() as stack:
        plan = plan_run(exp, workdir)
        several = len(plan.runs) > 1
        if not several:
            processes.on_process_zero(lambda: check_steps(plan.runs[0].exp, workdir))
        stack.enter_context(locked_workdirs(plan))
        for logger in loggers:
            stack.callback(logger.close)
        outcomes = train(plan, guard, loggers)
        for run, outcome, logger in zip(plan.runs, outcomes, loggers, strict=True):
            if outcome.finished:
                settings = dataclasses.replace(run.exp, model=plan.evaluated)
                trained = with_settings(chosen_model(run.workdir, settings.average.use), settings)
                label = f"seed {run.exp.seed}: " if several else ""
                line = evaluate_and_generate(
                    trained, plan.corpus, run.workdir, guard, logger, plan.evaluators
                )
                lines.append(label + line)
                models.append(trained)
    if guard.signal is not None:
        begun = int(outcomes[0].state.step) > 0
        early = " before the first step, so there is nothing to save"
        raise Stopped(guard.signal, ", and the state is saved" if begun else early)
    return FinishedRun([run.workdir for run in plan.runs], models, lines)


def chosen_model(workdir: str, use: str) -> TrainedModel:
    """Loads the model of a workdir, with the weights named ``use`` if its checkpoint has them."""
    trained = load(workdir)
    return load(workdir, weights=use) if use in trained.others else trained


def validations(workdir: str) -> dict[int, dict[str, Any]]:
    """Returns the records of a run's validations by step."""
    file = path(workdir, "metrics.jsonl")
    found = records.read_counted(file)[0] if file.exists() else []
    return {record["step"]: record for record in found if record["kind"] == "valid"}


def is_trained(exp: ExperimentConfig, workdir: str) -> bool:
    """Whether the last step of a run was validated and has a checkpoint."""
    return exp.train.steps in validations(workdir).keys() & CheckpointFolder(workdir).steps()


def check_steps(exp: ExperimentConfig, workdir: str) -> None:
    """Raises WorkdirError, with a command to continue, if a finished run would get more steps.

    The learning rate of each step depends on the total number of steps, so a longer run would have
    other learning rates from the start. Only process 0 runs this check, so the check must not wait
    for other processes.
    """
    if not path(workdir, CONFIG).exists():
        return
    before = read_experiment(workdir)
    old, steps = before.train.steps, exp.train.steps
    if steps <= old or old not in CheckpointFolder(workdir).steps():
        return
    if differing_keys(before.to_dict(), exp.to_dict()) != [f"train.steps: {old} -> {steps}"]:
        return
    given = {
        "workdir": shown_path(f"{workdir}-{steps}"),
        "config.train.start_from": shown_path(workdir),
        "config.train.steps": str(steps - old),
    }
    if exp.optimizer.warmup_steps > steps - old:
        given["config.optimizer.warmup_steps"] = str((steps - old) // 10)
    how = ", ".join(itertools.starmap(argument, given.items()))
    if names_flags():
        how = command_with({f"--{name}": value for name, value in given.items()})
    raise WorkdirError(
        f"{argument('workdir', workdir)}: the run in this folder has ended after {old:,} steps, and"
        f" a run of {steps:,} steps has other learning rates from its first step. To train the"
        f" model for {steps - old:,} more steps in another folder: {how}"
    )


def evaluate_and_generate(
    trained: TrainedModel,
    corpus: Corpus,
    workdir: str,
    guard: PreemptionGuard,
    logger: Logger,
    evaluators: Mapping[ProtocolConfig, Evaluator] | None = None,
) -> str:
    """Scores a model, continues its prompt, and returns a line with the held-out loss.

    The line is "" if a signal interrupted the scoring. Process 0 sends the scores and the text to
    ``logger``. ``evaluators`` come from the run's plan.
    """
    result = score_split(trained, corpus, guard.requested, evaluators)
    if result is None:
        return ""
    write_evaluation(result, workdir)
    if processes.is_process_zero():
        unit, split = result.unit, trained.config.evaluate.split
        scores = {f"{split}/loss": result.loss, f"{split}/{unit}": result.value}
        for other in result.results[1:]:
            scores[f"{split}/{other.name.replace(' ', '_')}/{unit}"] = other.value
        logger.metrics(trained.step, {k: v for k, v in scores.items() if math.isfinite(v)})
        if trained.config.generate.length:
            write_continuations(trained, workdir, guard.requested)
            if guard.signal is None:
                sample = read_text(os.path.join(workdir, "sample.txt"), "surrogateescape")
                logger.text(trained.step, "sample", sample)
    return f"held-out {headline(result)}"


def score_own_text(trained: TrainedModel, of_run: ExperimentConfig) -> Evaluation:
    """Returns the scores of a trained model on a split of the text that its settings name.

    First checks that the model's memory of earlier tokens fits the devices. ``of_run`` has the
    settings of the training run. If the memory is longer than in training, validation and
    evaluation there, a note on standard error says so.
    """
    exp = trained.config
    check_evaluation_memory(exp)
    known = max(of_run.train.mem_len, of_run.validate.mem_len, of_run.evaluate.mem_len)
    if exp.evaluate.mem_len > known:
        note = (
            f"note: evaluate.mem_len = {exp.evaluate.mem_len} is longer than {known}, the longest"
            " memory in the settings of this run; the score may become worse, and"
            f" {argument('mode', 'context')} shows the loss at every length"
        )
        processes.print_once(note, sys.stderr)
    corpus = processes.process_zero_first(lambda: corpus_from_config(exp.data, trained.vocab))
    check_baselines(exp.evaluate.baselines, corpus.vocab)
    result = score_split(trained, corpus)
    assert result is not None
    return result


def headline(result: Evaluation) -> str:
    """Returns the first score of an evaluation and its protocol, as text."""
    return f"{result.unit} {result.value:.4f} ({result.protocol})"


def stored_experiment(workdir: str, start_from: str | None = None) -> ExperimentConfig:
    """Returns the experiment of the run in a workdir, which covers all seeds of the run.

    If the workdir has no run, returns the experiment of the folder ``start_from``, whose model a
    new run starts from. Raises WorkdirError if neither has a run, if the workdir has the folder of
    only one seed, if a seed between others is missing, or if the settings cannot be used.
    """
    if path(workdir, CONFIG).exists():
        return loaded_experiment(workdir)
    found = [re.fullmatch(r"seed_(\d+)", name) for name in names(workdir)]
    seeds = sorted(int(match[1]) for match in found if match)
    if not seeds and start_from and path(start_from, CONFIG).exists():
        return loaded_experiment(start_from)
    if not seeds:
        raise no_run(workdir)
    first = os.path.join(workdir, f"seed_{seeds[0]}")
    if len(seeds) == 1:  # for example in a sweep
        why = "the only run in this folder is a seed"
        named = argument("workdir", shown_path(first))
        raise WorkdirError(f"{argument('workdir', workdir)}: {why}; give {named}")
    if gaps := set(range(seeds[0], seeds[-1])).difference(seeds):
        fix = "resume each seed in its own folder, or give the config of all seeds again"
        why = f"seed_{min(gaps)} is missing between the other seeds"
        raise WorkdirError(f"{argument('workdir', workdir)}: {why}; {fix}")
    exp = loaded_experiment(first)
    return dataclasses.replace(exp, train=dataclasses.replace(exp.train, num_seeds=len(seeds)))
