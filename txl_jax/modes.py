"""Runs each ``--mode`` of the command; the function of a mode returns an exit code."""

import contextlib
import functools
import importlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

from absl import logging

from txl_jax import interrupts
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.trained_model import TrainedModel, with_settings
from txl_jax.checkpoint.workdir_files import MODE_FILES, check_file, check_outputs
from txl_jax.command_line import command_for, command_with, typed_command
from txl_jax.config import ANALYSES, ConfigError, ExperimentConfig, override
from txl_jax.evaluation.split import write_evaluation
from txl_jax.generation.write import set_stream_errors, write_continuations
from txl_jax.messages import shown_path
from txl_jax.model.precision import describe
from txl_jax.parallel import processes
from txl_jax.paths import path
from txl_jax.training.fine_tuning import resolve_experiment
from txl_jax.training.run import Stopped, headline, score_own_text, train_and_evaluate

P = ParamSpec("P")

ONE_MODEL = {
    "export": "txl_jax.checkpoint.export",
    "score": "txl_jax.evaluation.any_text",
    "interactive": "txl_jax.generation.interactive",
}
"""The modules of the modes that use one model but are not analyses."""

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


def _resumable(mode: Callable[P, int]) -> Callable[P, int]:
    """Wraps a mode. If a signal stops it, prints the command to resume and returns an exit code."""

    @functools.wraps(mode)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return mode(*args, **kwargs)
        except Stopped as stopped:
            processes.print_once(f"{stopped}; to resume:\n  {typed_command()}", sys.stderr)
            return interrupts.EXIT_CODE if stopped.signal == signal.SIGINT else 0

    return run


@_resumable
def train(exp: ExperimentConfig, workdir: str) -> int:
    """Trains, evaluates and continues the prompt. Then prints folder, files and next commands."""
    run = train_and_evaluate(exp, workdir)
    processes.print_once("\n".join(run.lines))
    processes.print_once(describe_results(run.folders), sys.stderr)
    return 0


def describe_results(folders: Sequence[str]) -> str:
    """Returns three lines: the folders of the results, their files, and commands to use next."""
    paths = [path(folders[0], name) for name in RESULTS]
    files = [f"{found.name}{'/' * found.is_dir()}" for found in paths if found.exists()]
    others = "or --mode=report, evaluate, interactive"
    next_command = f"{command_for('generate', folders[0])}  ({others})"
    shown = "  ".join(map(shown_path, folders))
    return f"folder  {shown}\nfiles   {'  '.join(files)}\nnext    {next_command}"


def use_model(
    mode: str, exp: ExperimentConfig | None, overrides: Mapping[str, str], workdir: str, step: str
) -> int:
    """Evaluates or analyses the model of a workdir, or generates text with the model.

    The settings are those of ``exp``. If ``exp`` is ``None``, they are those of the workdir with
    ``overrides``. If ``exp`` has ``train.start_from``, it can leave out the settings of the model.
    """
    with contextlib.suppress(ConfigError):  # train.start_from can be gone: the workdir has a model
        exp = exp and resolve_experiment(exp, workdir)[0]
    weights = exp.average.use if exp else overrides.get("average.use", "best")
    trained = load(workdir, step, None if weights == "best" else weights)
    of_run = trained.config
    trained = with_settings(trained, exp or override(of_run, overrides))
    _, *warnings = describe(trained.config.model, None)
    processes.print_once("\n".join(warnings), sys.stderr)
    if mode in MODE_FILES:
        processes.on_process_zero(lambda: check_outputs(workdir, mode))
    if mode == "generate":
        c = trained.config
        processes.on_process_zero(lambda: check_file("generate.json", c.generate.json, c.data))
        if processes.is_process_zero():
            write_continuations(trained, workdir)
        return 0
    if mode == "evaluate":
        return evaluate(trained, workdir, of_run)
    if processes.is_process_zero():
        processes.print_once(module_of(mode).run(trained, workdir))
    return 0


def evaluate(trained: TrainedModel, workdir: str, of_run: ExperimentConfig) -> int:
    """Scores a split of the text that the settings name, by default the text of training."""
    result = score_own_text(trained, of_run)
    write_evaluation(result, workdir)
    processes.print_once(f"{trained.config.evaluate.split} {headline(result)}")
    return 0


def compare(
    mode: str, exp: ExperimentConfig | None, overrides: Mapping[str, str], workdir: str
) -> int:
    """Compares the runs that the config names for the mode. Writes the results to ``workdir``."""
    exp = exp or override(ExperimentConfig(), overrides)
    if processes.is_process_zero():
        processes.print_once(module_of(mode).run(exp, workdir))
    return 0


@_resumable
def ablate(config: str, overrides: Mapping[str, str], workdir: str) -> int:
    """Trains the rows of a table that are not trained yet, then evaluates and compares all rows."""
    from txl_jax.analysis import ablation

    ablation.run(config, overrides, workdir)
    return 0


@_resumable
def sweep(exp: ExperimentConfig, workdir: str) -> int:
    """Trains the unfinished runs of a grid. Prints a table and how to train the best run longer."""
    from txl_jax.analysis import sweep

    found = sweep.run(exp, workdir)
    best = found.rows[0]
    flags = {f"--config.{key}": str(value) for key, value in best.settings.items()}
    flags |= {"--mode": "train", "--workdir": shown_path(f"{workdir}-best")}
    longer = 2 * int(best.settings.get("train.steps", exp.train.steps))
    flags |= {"--config.train.steps": str(longer)}
    processes.print_once(f"{found}\nbest    {shown_path(best.workdirs[0])}")
    processes.print_once(f"further {command_with(flags)}", sys.stderr)
    return 1 if found.failed else 0


def set_up_output() -> None:
    """Makes the log show only errors, and makes output escape characters that it cannot encode."""
    logging.set_verbosity(logging.ERROR)
    set_stream_errors(sys.stdout, "backslashreplace")
