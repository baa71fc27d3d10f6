"""What each ``--mode`` does, phase by phase: check, load, work, tell."""

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from absl import logging

from txl_jax.checkpoint.errors import CheckpointError, WorkdirError
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.lock import LockedError, training_lock
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir import (
    check_shared,
    init_workdir,
    with_vocab,
)
from txl_jax.checkpoint.workdir_files import (
    WRITTEN_IN,
    check_file,
    check_free,
    check_outputs,
    check_writable,
    register_outputs,
)
from txl_jax.config import ConfigError, ExperimentConfig, differing_keys, override
from txl_jax.convert import ModelFormatError
from txl_jax.data.corpus import Corpus, DataError, corpus_from_config
from txl_jax.data.prompt_ids import encode_prompts
from txl_jax.evaluation import baselines
from txl_jax.evaluation.errors import AnalysisError
from txl_jax.evaluation.report import report
from txl_jax.generation.prompts import prompts_of
from txl_jax.generation.write import set_errors, write_continuations
from txl_jax.model.kernels.choice import KernelError
from txl_jax.parallel import processes
from txl_jax.planning.compile_ahead import compile_ahead
from txl_jax.planning.topology import PlanningError
from txl_jax.training.loop import NonFiniteError
from txl_jax.training.loop import train as train_loop
from txl_jax.training.multi_seed import each, train_seeds
from txl_jax.training.parts import check_fit, check_scoring, check_size
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.training.skipping import SkippedError
from txl_jax.training.start import corpus_of, experiment_and_vocab

KNOWN_ERRORS = (
    AnalysisError,
    ConfigError,
    ModelFormatError,
    DataError,
    CheckpointError,
    KernelError,
    LockedError,
    NonFiniteError,
    processes.OtherProcessError,
    PlanningError,
    SkippedError,
    WorkdirError,
)

ANALYSES = {
    "context": "txl_jax.analysis.context",
    "attention": "txl_jax.analysis.attention_maps",
    "score": "txl_jax.evaluation.score",
    "interactive": "txl_jax.generation.interactive",
    "speed": "txl_jax.analysis.speed",
    "probe": "txl_jax.analysis.probe",
}
"""Modes that ask one trained model; ``run(trained, workdir)`` of the module gives the last line."""

COMPARISONS = {"recl": "txl_jax.analysis.recl_table", "report": "txl_jax.analysis.report_page"}
"""Modes that read several runs; ``run(exp, workdir)`` of the module gives the last line."""


def train(exp: ExperimentConfig, workdir: str, command: str) -> int:
    """Trains to the last step, then scores, compares and continues the prompt.

    Every check of what the run needs comes before the first step. ``command`` is what to type
    to go on after an interruption. Returns the exit code.
    """
    _set_up_output()
    with PreemptionGuard() as stop:
        for _, folder in each(exp, workdir):
            processes.on_process_zero(lambda: check_free(folder))  # noqa: B023  (called at once)
        processes.on_process_zero(lambda: check_writable(workdir))
        exp, vocab = experiment_and_vocab(exp, each(exp, workdir)[0][1])
        check_size(exp)  # before the text is prepared; check_fit() knows its vocabulary
        corpus = processes.process_zero_first(lambda: corpus_of(exp, vocab))
        exp = with_vocab(exp, corpus)
        baselines.check(exp.evaluate.baselines, corpus.vocab)
        encode_prompts(corpus.vocab, prompts_of(exp.generate))
        if exp.generate.length:
            processes.on_process_zero(lambda: check_file("generate.json", exp.generate.json))
        check_fit(exp, corpus)
        runs = each(exp, workdir)
        with contextlib.ExitStack() as locks:
            for one, folder in runs:
                processes.on_process_zero(lambda: check_outputs(folder, "evaluate", "generate"))  # noqa: B023
                locks.enter_context(locked(folder))
                processes.on_process_zero(lambda: init_workdir(folder, one, corpus))  # noqa: B023  (called at once)
                check_folders = lambda: check_writable(folder, WRITTEN_IN)  # noqa: B023  (as above)
                processes.on_process_zero(check_folders)
                check_shared(folder)
            if len(runs) > 1:
                outcomes = train_seeds(runs, corpus, stop)
            else:
                outcomes = [train_loop(exp, corpus, workdir, stop)]
            lines = []
            for (one, folder), outcome in zip(runs, outcomes, strict=True):
                if outcome.finished:
                    trained = _with_settings(load(folder), one)
                    label = f"seed {one.seed}: " if len(runs) > 1 else ""
                    lines.append(label + finish(trained, corpus, folder, stop))
    if stop.signal is None:
        _say("\n".join(lines))
        return 0
    what = "saved" if int(outcomes[0].state.step) else "before the first step, nothing to save"
    text = f"stopped by {stop.signal.name}, {what}; to go on:\n  {command}"
    _say(text, sys.stderr)
    return stop.exit_code


@contextlib.contextmanager
def locked(workdir: str) -> Iterator[None]:
    """The workdir's lock, held by process 0 for all."""
    with contextlib.ExitStack() as held:

        def take() -> None:
            held.enter_context(training_lock(workdir))

        processes.on_process_zero(take)
        yield


def finish(trained: TrainedModel, corpus: Corpus, workdir: str, stop: PreemptionGuard) -> str:
    """The report, the sample, and the line with the held-out number; or less, if told to stop."""
    result = report(trained, corpus, workdir, stop.requested)
    if result is None:
        return ""
    if trained.config.generate.length:
        write_sample(trained, workdir, stop.requested)
    return f"held-out {_headline(result)}"


def with_trained(
    mode: str, exp: ExperimentConfig | None, overrides: Mapping[str, str], workdir: str, step: str
) -> int:
    """``evaluate``, ``generate`` or an analysis with the model of a workdir.

    The workdir's own config holds, and ``overrides`` on it; a config that is given as well
    replaces all but the model and the text.
    """
    _set_up_output()
    named = exp.average.use if exp else overrides.get("average.use", "best")
    trained = load(workdir, step, None if named == "best" else named)
    if exp is None:
        exp = override(trained.config, overrides)
    trained = _with_settings(trained, exp)
    exp = trained.config
    if mode == "generate":
        processes.on_process_zero(lambda: check_outputs(workdir, "generate"))
        processes.on_process_zero(lambda: check_file("generate.json", exp.generate.json))
        write_sample(trained, workdir)
        return 0
    if mode in ANALYSES:
        if (
            processes.is_process_zero()
        ):  # on its first device, where its own copy of the parameters lies
            _say(importlib.import_module(ANALYSES[mode]).run(trained, workdir))
        return 0
    check_scoring(exp)
    processes.on_process_zero(lambda: check_outputs(workdir, "evaluate"))
    corpus = processes.process_zero_first(lambda: corpus_from_config(exp.data, trained.vocab))
    baselines.check(exp.evaluate.baselines, corpus.vocab)
    result = report(trained, corpus, workdir)
    assert result is not None
    _say(f"{exp.evaluate.split} {_headline(result)}")
    return 0


def compare(
    mode: str, exp: ExperimentConfig | None, overrides: Mapping[str, str], workdir: str
) -> int:
    """A mode of several runs, which its section of the config names; writes in ``workdir``."""
    _set_up_output()
    exp = exp or override(ExperimentConfig(), overrides)
    if processes.is_process_zero():
        _say(importlib.import_module(COMPARISONS[mode]).run(exp, workdir))
    return 0


def ablation(config: str, overrides: Mapping[str, str], workdir: str, command: str) -> int:
    """Every row of a table: trained where it is not yet, evaluated, compared."""
    from txl_jax.analysis import ablation as table

    _set_up_output()
    processes.on_process_zero(lambda: check_outputs(workdir, "ablation"))
    processes.on_process_zero(lambda: register_outputs(workdir, "ablation"))
    row_by_row = lambda exp, folder: train(exp, folder, command)
    return table.run(config, overrides, workdir, row_by_row)


def compile_programs(exp: ExperimentConfig, topology: str | None) -> int:
    """What training and scoring need of the devices; nothing is run (planning/compile_ahead.py)."""
    _set_up_output()
    return compile_ahead(exp, topology)


def write_sample(
    trained: TrainedModel, workdir: str, stop: Callable[[], bool] = lambda: False
) -> None:
    """Continues the prompts of the config: process 0 does, on its first device."""
    if processes.is_process_zero():  # where its own copy of the parameters lies
        write_continuations(trained, workdir, stop)


def _set_up_output() -> None:
    """Logs errors only; a character that standard output cannot show is escaped, no error."""
    logging.set_verbosity(logging.ERROR)
    set_errors(sys.stdout, "backslashreplace")


def _say(text: str, file: TextIO | None = None) -> None:
    if text and processes.is_process_zero():
        print(text, file=file or sys.stdout, flush=True)


def _headline(result: dict[str, Any]) -> str:
    unit, first = result["unit"], result["results"][0]
    return f"{unit} {first[unit]:.4f} ({first['protocol']})"


def _with_settings(trained: TrainedModel, exp: ExperimentConfig) -> TrainedModel:
    """The trained model, its layers one by one as it was loaded, with a config's other settings."""
    model = _same_model(exp, trained)
    return dataclasses.replace(trained, config=dataclasses.replace(exp, model=model))


def _same_model(exp: ExperimentConfig, trained: TrainedModel):
    """The trained model's shape, once the config is known not to name another."""
    run = {key: getattr(trained.config.model, key) for key in ("scan_layers", "remat")}
    model = dataclasses.replace(exp.model, **run)
    if model.vocab_size is None:
        model = dataclasses.replace(model, vocab_size=trained.config.model.vocab_size)
    asked = {"model": dataclasses.asdict(model)}
    different = differing_keys({"model": dataclasses.asdict(trained.config.model)}, asked)
    if different:
        raise WorkdirError(f"the workdir's model is of another shape: {'; '.join(different)}")
    return model
