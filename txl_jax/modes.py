"""Runs each ``--mode`` of the command; the function of a mode returns an exit code."""

import dataclasses
import importlib
import itertools
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from absl import logging

from txl_jax import interrupts
from txl_jax.checkpoint.checkpoint_folder import CheckpointFolder
from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.trained_model import TrainedModel, with_settings
from txl_jax.checkpoint.workdir import read_experiment
from txl_jax.checkpoint.workdir_files import (
    CONFIG,
    MODE_FILES,
    check_file,
    check_outputs,
    register_outputs,
)
from txl_jax.command_line import command_for, command_with, typed_command
from txl_jax.config import ANALYSES, ExperimentConfig, differing_keys, override
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.data.sources.source import check_not_text
from txl_jax.data.vocab import encode_prompts
from txl_jax.evaluation.baselines import check_baselines
from txl_jax.evaluation.scoring_run import score_split, write_evaluation
from txl_jax.generation.generate import check_memory
from txl_jax.generation.prompts import prompt_key, read_prompts
from txl_jax.generation.write import set_stream_errors, write_continuations
from txl_jax.messages import argument, names_flags, shown_path
from txl_jax.model.precision import describe, resolved
from txl_jax.parallel import processes
from txl_jax.paths import path, read_text
from txl_jax.planning.compile_ahead import compile_ahead
from txl_jax.standard_streams import stderr, stdout
from txl_jax.training.events import Logger
from txl_jax.training.multi_seed import train_seeds
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.preparation import check_evaluation_memory, locked_workdirs, prepare
from txl_jax.training.run_log import closing, make_logger

ONE_MODEL = {
    "score": "txl_jax.evaluation.score",
    "interactive": "txl_jax.generation.interactive",
}
"""The modules of modes that use one model as analyses do."""

RESULTS = (
    *("report.html", "evaluation.json", "sample.txt", "loss.png", "metrics.jsonl", "config.json"),
    *("checkpoints", "tensorboard"),
)
"""The files in the workdir of a finished run that its last lines name."""


def module_of(mode: str) -> Any:
    """Returns the module of a mode, whose function ``run`` returns the last line to print."""
    row = ANALYSES.get(mode)
    return importlib.import_module(
        f"txl_jax.analysis.{row.module or mode}" if row else ONE_MODEL[mode]
    )


def train(exp: ExperimentConfig, workdir: str, closing_lines: bool = True) -> int:
    """Trains to the last step, evaluates the model, and continues the prompt.

    After an interruption, the command that resumes the run is printed. At the end,
    ``closing_lines`` name folder, files and commands.
    """
    return _exit_code_if_stopped(exp, workdir, closing_lines) or 0


def _exit_code_if_stopped(exp: ExperimentConfig, workdir: str, closing_lines: bool) -> int | None:
    """Does the work of :func:`train`; returns ``None`` if no signal stopped it."""
    with PreemptionGuard() as guard:
        run = complete_run(exp, workdir, guard)
    if guard.signal is None:
        _print("\n".join(run.lines))
        if closing_lines:
            _print(describe_results(run.folders), stderr())
        return None
    resume = f"to resume:\n  {typed_command()}"
    _print(f"stopped by {guard.signal.name}, {run.saved}; {resume}", stderr())
    return interrupts.EXIT_CODE if guard.signal == signal.SIGINT else 0


class CompleteRun(NamedTuple):
    """The folders and the finished models of all seeds, a line about each, and what was saved."""

    folders: list[str]
    models: list[TrainedModel]
    lines: list[str]
    saved: str


def complete_run(
    exp: ExperimentConfig, workdir: str, guard: PreemptionGuard, more_loggers: Sequence[Logger] = ()
) -> CompleteRun:
    """Checks and trains a run, evaluates it, and continues the prompt, until ``guard`` stops it."""
    # Made first, because a package that is not installed is an error before any work.
    loggers = [make_logger(exp.train.wandb, *more_loggers) for _ in range(exp.train.num_seeds)]
    runs, corpus = prepare(exp, workdir)
    if exp.train.num_seeds == 1:
        processes.on_process_zero(lambda: check_steps(*runs[0]))
    check_final_outputs(exp, corpus)
    models, lines = [], []
    auto_dtype = exp.model.dtype == "auto"
    with locked_workdirs(runs, corpus, auto_dtype), closing(loggers):
        outcomes = train_seeds(runs, corpus, guard, loggers)
        for (seed_exp, folder), outcome, logger in zip(runs, outcomes, loggers, strict=True):
            if outcome.finished:
                trained = with_settings(load(folder), _with_own_dtype(seed_exp, auto_dtype))
                label = f"seed {seed_exp.seed}: " if len(runs) > 1 else ""
                line = evaluate_and_generate(trained, corpus, folder, guard, logger)
                lines.append(label + line)
                models.append(trained)
    saved = "saved" if int(outcomes[0].state.step) else "before the first step, nothing to save"
    return CompleteRun([folder for _, folder in runs], models, lines, saved)


def _with_own_dtype(exp: ExperimentConfig, auto: bool) -> ExperimentConfig:
    """Returns the experiment with the dtype ``auto`` again if that means its dtype here."""
    own = dataclasses.replace(exp.model, dtype="auto")
    same = auto and resolved(own, None).dtype == exp.model.dtype
    return dataclasses.replace(exp, model=own) if same else exp


def check_steps(exp: ExperimentConfig, workdir: str) -> None:
    """Raises WorkdirError if a finished run would get more steps; it has the command to continue.

    The learning rate of each step depends on the number of steps, so a longer run is another run.
    Only process 0 runs this check, so it must not wait for other processes.
    """
    if not path(workdir, CONFIG).exists():
        return
    before = read_experiment(workdir)
    old, steps = before.train.steps, exp.train.steps
    finished = old in CheckpointFolder(workdir).steps()
    more = differing_keys(before.to_dict(), exp.to_dict()) == [f"train.steps: {old} -> {steps}"]
    if steps <= old or not finished or not more:
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
        f"{argument('workdir', workdir)}: its run has ended after its {old:,} steps, and the"
        f" learning rates of a run of {steps:,} steps are others. To continue from its model for"
        f" {steps - old:,} more steps in another folder: {how}"
    )


def describe_results(folders: Sequence[str]) -> str:
    """Returns three lines: the folders of the results, the files there, and commands to go on."""
    paths = [path(folders[0], name) for name in RESULTS]
    files = [f"{found.name}{'/' * found.is_dir()}" for found in paths if found.exists()]
    others = "or --mode=report, evaluate, interactive"
    next_command = f"{command_for('generate', folders[0])}  ({others})"
    shown = "  ".join(map(shown_path, folders))
    return f"folder  {shown}\nfiles   {'  '.join(files)}\nnext    {next_command}"


def check_final_outputs(exp: ExperimentConfig, corpus: Corpus) -> None:
    """Raises an error if the evaluation or the generation after training would fail."""
    check_baselines(exp.evaluate.baselines, corpus.vocab)
    prompts = read_prompts(exp.generate)
    encode_prompts(corpus.vocab, prompts, prompt_key(exp.generate))
    if exp.generate.length:
        check_memory(exp.model, exp.generate, len(prompts))
        processes.on_process_zero(lambda: check_file("generate.json", exp.generate.json))
        check_not_text("generate.json", exp.generate.json, exp.data)


def evaluate_and_generate(
    trained: TrainedModel,
    corpus: Corpus,
    workdir: str,
    guard: PreemptionGuard,
    logger: Logger,
) -> str:
    """Evaluates, generates, and returns a line with the held-out loss; "" if it was interrupted.

    Process 0 sends the scores and the text to ``logger``.
    """
    result = score_split(trained, corpus, guard.requested)
    if result is None:
        return ""
    write_evaluation(result, workdir)
    if processes.is_process_zero():
        scores = final_scores(result, trained.config.evaluate.split)
        logger.metrics(trained.step, scores)
        if trained.config.generate.length:
            write_continuations(trained, workdir, guard.requested)
            if guard.signal is None:
                sample = read_text(os.path.join(workdir, "sample.txt"), "surrogateescape")
                logger.text(trained.step, "sample", sample)
    return f"held-out {_headline(result)}"


def final_scores(result: Mapping[str, Any], split: str) -> dict[str, float]:
    """Returns the scores of an evaluation with the names that loggers receive."""
    unit, rows = result["unit"], result["results"]
    scores = {f"{split}/loss": rows[0]["loss"], f"{split}/{unit}": rows[0][unit]}
    scores |= {f"{split}/{row['name'].replace(' ', '_')}/{unit}": row[unit] for row in rows[1:]}
    return {name: value for name, value in scores.items() if math.isfinite(value)}


def use_model(
    mode: str, exp: ExperimentConfig | None, overrides: Mapping[str, str], workdir: str, step: str
) -> int:
    """Evaluates or analyses the model of a workdir, or generates text with the model.

    The settings are those of ``exp``, or without it those of the workdir with ``overrides``.
    """
    weights = exp.average.use if exp else overrides.get("average.use", "best")
    trained = load(workdir, step, None if weights == "best" else weights)
    of_run = trained.config
    trained = with_settings(trained, exp or override(of_run, overrides))
    _, *warnings = describe(trained.config.model, None)
    _print("\n".join(warnings), stderr())
    if mode in MODE_FILES:
        processes.on_process_zero(lambda: check_outputs(workdir, mode))
    if mode == "generate":
        return generate(trained, workdir)
    if mode == "evaluate":
        return evaluate(trained, workdir, of_run)
    if processes.is_process_zero():
        _print(module_of(mode).run(trained, workdir))
    return 0


def longer_memory(exp: ExperimentConfig, of_run: ExperimentConfig) -> list[str]:
    """Returns a line if an evaluation has a longer memory than any that the run was scored with."""
    known = max(of_run.train.mem_len, of_run.validate.mem_len, of_run.evaluate.mem_len)
    if exp.evaluate.mem_len <= known:
        return []
    return [
        f"note: memory {exp.evaluate.mem_len:,} is longer than {known:,}, the longest of this run;"
        " the score may become worse, and --mode=context shows the loss at every length"
    ]


def generate(trained: TrainedModel, workdir: str) -> int:
    """Continues the prompts that the config names, on the first device of process 0."""
    exp = trained.config
    processes.on_process_zero(lambda: check_file("generate.json", exp.generate.json))
    check_not_text("generate.json", exp.generate.json, exp.data)
    if processes.is_process_zero():
        write_continuations(trained, workdir)
    return 0


def evaluate(trained: TrainedModel, workdir: str, of_run: ExperimentConfig) -> int:
    """Scores a split of the text that the settings name, by default the text of training."""
    result = score_own_text(trained, of_run)
    write_evaluation(result, workdir)
    _print(f"{trained.config.evaluate.split} {_headline(result)}")
    return 0


def score_own_text(trained: TrainedModel, of_run: ExperimentConfig) -> dict[str, Any]:
    """Checks the text and the memory, and returns the result of :func:`score_split`.

    A memory longer than any of the settings ``of_run`` is noted on standard error.
    """
    exp = trained.config
    check_evaluation_memory(exp)
    _print("\n".join(longer_memory(exp, of_run)), stderr())
    corpus = processes.process_zero_first(lambda: corpus_from_config(exp.data, trained.vocab))
    check_baselines(exp.evaluate.baselines, corpus.vocab)
    result = score_split(trained, corpus)
    assert result is not None
    return result


def compare(
    mode: str, exp: ExperimentConfig | None, overrides: Mapping[str, str], workdir: str
) -> int:
    """Compares the runs that the config names for the mode; writes the results to ``workdir``."""
    exp = exp or override(ExperimentConfig(), overrides)
    if processes.is_process_zero():
        _print(module_of(mode).run(exp, workdir))
    return 0


def ablate(config: str, overrides: Mapping[str, str], workdir: str) -> int:
    """Trains the rows of a table that are not trained yet, then evaluates and compares all rows."""
    from txl_jax.analysis import ablation

    processes.on_process_zero(lambda: register_outputs(workdir, "ablation"))

    def train_row(exp: ExperimentConfig, folder: str) -> int:
        code = _exit_code_if_stopped(exp, folder, closing_lines=False)
        if code is not None:
            raise SystemExit(code)  # also with 0: no other row is trained after a signal
        return 0

    return ablation.run(config, overrides, workdir, train_row)


def sweep(exp: ExperimentConfig, workdir: str) -> int:
    """Trains the unfinished runs of a grid, and prints the table and what follows from the best."""
    from txl_jax.analysis import sweep

    def train_run(one: ExperimentConfig, folder: str) -> None:
        _print(f"run {shown_path(folder)}", stderr())
        if (code := _exit_code_if_stopped(one, folder, closing_lines=False)) is not None:
            raise SystemExit(code)

    found = sweep.run(exp, workdir, train_run)
    best = found.rows[0]
    flags = {f"--config.{key}": str(value) for key, value in best.settings.items()}
    flags |= {"--mode": "train", "--workdir": shown_path(f"{workdir}-best")}
    _print(f"{found}\nbest    {shown_path(best.workdirs[0])}")
    _print(f"further {command_with(flags)} --config.train.steps={2 * exp.train.steps}", stderr())
    return 1 if found.failed else 0


def compile_programs(exp: ExperimentConfig, topology: str | None) -> int:
    """Compiles training and scoring without running them; prints their costs on the devices."""
    return compile_ahead(exp, topology)


def set_up_output() -> None:
    """Makes the log show errors only, and output escape characters that it cannot encode."""
    logging.set_verbosity(logging.ERROR)
    set_stream_errors(sys.stdout, "backslashreplace")


def _print(text: str, file: TextIO | None = None) -> None:
    if text and processes.is_process_zero():
        print(text, file=file or stdout(), flush=True)


def _headline(result: Mapping[str, Any]) -> str:
    unit, first = result["unit"], result["results"][0]
    return f"{unit} {first[unit]:.4f} ({first['protocol']})"
