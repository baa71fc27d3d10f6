"""Prepares a run: checks settings, text and devices, and locks the workdirs."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence

from txl_jax.checkpoint.lock import training_lock
from txl_jax.checkpoint.workdir import check_shared, init_workdir, with_vocab
from txl_jax.checkpoint.workdir_files import WRITTEN_IN, check_free, check_outputs, check_writable
from txl_jax.config import ExperimentConfig, with_absolute_paths
from txl_jax.config.folders import data_folder
from txl_jax.data.corpus import Corpus
from txl_jax.evaluation.evaluator import split_evaluator
from txl_jax.model import footprint
from txl_jax.model.kernels.choice import check_platform
from txl_jax.parallel.device_memory import check_memory, shares_of
from txl_jax.parallel.processes import on_process_zero, process_zero_first
from txl_jax.parallel.shardings import make_mesh
from txl_jax.training.fine_tuning import load_encoded_corpus, resolve_experiment
from txl_jax.training.setup import training_attention, training_mesh, training_streams

SeedRun = tuple[ExperimentConfig, str]
"""The experiment of one seed, and its workdir."""


def prepare(exp: ExperimentConfig, workdir: str) -> tuple[list[SeedRun], Corpus]:
    """Returns the run of every seed with complete settings and paths, and the encoded corpus.

    Raises ConfigError or DataError if settings, text and devices are incompatible, and WorkdirError
    if a workdir cannot be used.
    """
    exp = with_absolute_paths(exp)
    data_folder(exp.data.cache_dir)  # raises an error for an unusable path
    folders = [folder for _, folder in seed_runs(exp, workdir)]
    for folder in folders:
        on_process_zero(functools.partial(check_free, folder))
    on_process_zero(lambda: check_writable(workdir))
    exp, vocab = resolve_experiment(exp, folders[0])
    check_training_memory(exp)  # before reading the text; repeated below with the vocabulary
    corpus = process_zero_first(lambda: load_encoded_corpus(exp, vocab))
    exp = with_vocab(exp, corpus)
    check_training_memory(exp)
    training_streams(exp, corpus)
    for protocol in (exp.validate, exp.evaluate):
        split_evaluator(exp.model, protocol, corpus, training_mesh(exp))
    return seed_runs(exp, workdir), corpus


def seed_runs(exp: ExperimentConfig, workdir: str) -> list[SeedRun]:
    """Returns each seed's experiment and workdir: the given pair if ``train.num_seeds`` is 1."""
    n = exp.train.num_seeds
    if n == 1:
        return [(exp, workdir)]
    single = dataclasses.replace(exp.train, num_seeds=1)
    folder = lambda seed: os.path.join(workdir, f"seed_{seed}")
    seeds = range(exp.seed, exp.seed + n)
    return [(dataclasses.replace(exp, seed=s, train=single), folder(s)) for s in seeds]


def check_training_memory(exp: ExperimentConfig) -> None:
    """Raises ConfigError if training, evaluation or generation exceeds the memory of the devices.

    While the vocabulary is unknown, parameters that depend on its size are not counted.
    """
    mesh = training_mesh(exp)
    shares = shares_of(mesh)
    check_platform(exp.model.kernel, mesh)
    check_memory("training", footprint.of_training(exp, shares), exp, mesh)
    check_memory("validation", footprint.of_validating(exp, shares), exp, mesh)
    check_evaluation_memory(exp)
    if exp.generate.length:
        check_memory("generation", footprint.of_generating(exp.model, exp.generate), exp)


def check_evaluation_memory(exp: ExperimentConfig, name: str = "evaluation") -> None:
    """Raises ConfigError, which names ``name``, if evaluation exceeds the memory of the devices."""
    unstacked = dataclasses.replace(exp.model, scan_layers=False)  # the layout of loaded models
    mesh = make_mesh(exp.mesh, exp.model, exp.train.batch_size)
    needs = footprint.of_scoring(unstacked, exp.evaluate, "evaluate", shares_of(mesh))
    check_memory(name, needs, exp, mesh)


@contextlib.contextmanager
def locked_workdirs(runs: Sequence[SeedRun], corpus: Corpus) -> Iterator[None]:
    """Holds the lock of every workdir, and writes settings and vocabulary into each of them.

    Raises LockedError if another process trains in a workdir, and WorkdirError if a workdir cannot
    be used.
    """
    with contextlib.ExitStack() as locks:

        def init(exp: ExperimentConfig, workdir: str) -> None:
            check_outputs(workdir, "evaluate", "generate")
            locks.enter_context(training_lock(workdir))
            attention = training_attention(exp, training_mesh(exp)).describe()
            init_workdir(workdir, exp, corpus, attention)
            check_writable(workdir, WRITTEN_IN)

        for exp, workdir in runs:
            on_process_zero(functools.partial(init, exp, workdir))
            check_shared(workdir)
        yield
