"""Prepares a run: checks settings, text and devices, and locks the workdirs."""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh

from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.lock import training_lock
from txl_jax.checkpoint.trained_model import memory_shapes
from txl_jax.checkpoint.workdir import (
    check_shared,
    init_workdir,
    loaded_experiment,
    read_experiment,
    with_vocab,
)
from txl_jax.checkpoint.workdir_files import (
    CONFIG,
    WRITTEN_IN,
    check_free,
    check_outputs,
    check_writable,
)
from txl_jax.config import (
    ExperimentConfig,
    ProtocolConfig,
    TransformerXLConfig,
    with_absolute_paths,
)
from txl_jax.config.folders import data_folder
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import training_batch
from txl_jax.evaluation.evaluator import split_evaluator
from txl_jax.messages import argument
from txl_jax.model import self_check
from txl_jax.model.kernels.choice import check_platform
from txl_jax.model.precision import resolved
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import (
    EVALUATION,
    TRAINING_STATE,
    VALIDATION,
    Work,
    check_arrays,
)
from txl_jax.parallel.processes import on_process_zero, process_zero_first
from txl_jax.parallel.shardings import Shardings, scoring_mesh
from txl_jax.paths import names, path
from txl_jax.training.fine_tuning import load_encoded_corpus, resolve_experiment
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.setup import training_attention, training_mesh, training_streams
from txl_jax.training.state import abstract_state

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
    exp = resolved_for_run(exp, folders[0])
    check_training_memory(exp)
    corpus = process_zero_first(lambda: load_encoded_corpus(exp, vocab))
    exp = with_vocab(exp, corpus)
    check_attention(exp, corpus)
    return seed_runs(exp, workdir), corpus


def resolved_for_run(exp: ExperimentConfig, workdir: str) -> ExperimentConfig:
    """Returns the experiment with what ``auto`` means; a begun run keeps its dtype.

    So a run that resumes on other devices computes in the same dtype.
    """
    model = exp.model
    if model.dtype == "auto":
        begun = lambda: os.path.exists(os.path.join(workdir, CONFIG)) and read_experiment(workdir)
        dtype = on_process_zero(lambda: (found := begun()) and found.model.dtype)
        model = dataclasses.replace(model, dtype=dtype or "auto")
    return dataclasses.replace(exp, model=resolved(model, training_mesh(exp)))


def check_attention(exp: ExperimentConfig, corpus: Corpus) -> None:
    """Runs the self-checks of fused attention in training, validation and the final evaluation.

    Raises ConfigError or DataError if text and protocols do not fit, and KernelError if a kernel
    that the user named fails.
    """
    c, t, mesh = exp.model, exp.train, training_mesh(exp)
    trained = dataclasses.replace(c, scan_layers=False, remat="none")
    scored = scoring_mesh(exp.mesh, trained, exp.evaluate.batch_size)
    programs = ((c, exp.validate, mesh), (trained, exp.evaluate, scored))
    evaluators = [split_evaluator(model, p, corpus, on) for model, p, on in programs]
    streams = training_streams(exp, corpus)
    batch = training_batch(streams, 0, t.epoch_memory, t.reset_every, slice(0))
    sizes = t.batch_size // t.micro_batches, t.context_len + t.longest_seg_len, t.mem_len
    program = {"episodes": batch.reset.ndim == 2, "several_seeds": t.num_seeds > 1}
    self_check.check(c, mesh, *sizes, train=True, **program)
    for evaluator in evaluators:
        evaluator.check_attention()


def seed_runs(exp: ExperimentConfig, workdir: str) -> list[SeedRun]:
    """Returns each seed's experiment and workdir: the given pair if ``train.num_seeds`` is 1."""
    n = exp.train.num_seeds
    if n == 1:
        return [(exp, workdir)]
    single = dataclasses.replace(exp.train, num_seeds=1)
    folder = lambda seed: os.path.join(workdir, f"seed_{seed}")
    seeds = range(exp.seed, exp.seed + n)
    return [(dataclasses.replace(exp, seed=s, train=single), folder(s)) for s in seeds]


def stored_experiment(workdir: str) -> ExperimentConfig:
    """Returns the experiment of a run that has begun in a workdir, of all its seeds.

    Raises WorkdirError if there is no run, or if its settings cannot be used.
    """
    if path(workdir, CONFIG).exists():
        return loaded_experiment(workdir)
    found = [re.fullmatch(r"seed_(\d+)", name) for name in names(workdir)]
    seeds = sorted(int(match[1]) for match in found if match)
    if not seeds:
        raise WorkdirError(
            f"{argument('workdir', workdir)}: there is no run in it; start one with"
            f" {argument('config', 'NAME')}"
        )
    first = loaded_experiment(os.path.join(workdir, f"seed_{seeds[0]}"))
    return dataclasses.replace(first, train=dataclasses.replace(first.train, num_seeds=len(seeds)))


def check_training_memory(exp: ExperimentConfig) -> None:
    """Raises ConfigError if parameters, optimizer state, gradient or memory exceed the devices'.

    These arrays are only a part, so that no text is read for what can never run. The update's
    compiled program is compared before the state is made. An unknown vocabulary counts as the
    fewest words that the model can have.
    """
    mesh, model = training_mesh(exp), _one_layer_traced(exp.model)
    check_platform(exp.model.kernel, mesh)
    sized = dataclasses.replace(exp, model=model)
    state = abstract_state(
        sized, TransformerXL(model, mesh), make_optimizer(sized), Shardings(mesh)
    )
    check_arrays(TRAINING_STATE, (state, state.params), mesh, copies=exp.train.num_seeds)
    _check_protocol_memory(model, exp.validate, VALIDATION, mesh)
    check_evaluation_memory(exp)


def check_evaluation_memory(exp: ExperimentConfig, work: Work = EVALUATION) -> None:
    """Raises ConfigError if the memory of the streams of evaluation exceeds that of the devices."""
    mesh = scoring_mesh(exp.mesh, exp.model, exp.evaluate.batch_size)
    _check_protocol_memory(_one_layer_traced(exp.model), exp.evaluate, work, mesh)


def _check_protocol_memory(
    model: TransformerXLConfig, protocol: ProtocolConfig, work: Work, mesh: Mesh
) -> None:
    rows_of_each = -(-protocol.batch_size // Shardings(mesh).row_devices)
    check_arrays(work, memory_shapes(model, rows_of_each, protocol.mem_len), mesh)


def _one_layer_traced(c: TransformerXLConfig) -> TransformerXLConfig:
    """Returns a model of the same size, whose shapes are found quickly."""
    words = c.vocab_size or (c.cutoffs or (0,))[-1] + max(1, c.sample_softmax)
    return dataclasses.replace(c, scan_layers=True, vocab_size=words)


@contextlib.contextmanager
def locked_workdirs(
    runs: Sequence[SeedRun], corpus: Corpus, auto_dtype: bool = False
) -> Iterator[None]:
    """Holds the lock of every workdir, and writes settings and vocabulary into each of them.

    ``auto_dtype``: the user left ``model.dtype`` to the devices, see :func:`init_workdir`.

    Raises LockedError if another process trains in a workdir, and WorkdirError if a workdir cannot
    be used.
    """
    with contextlib.ExitStack() as locks:

        def init(exp: ExperimentConfig, workdir: str) -> None:
            check_outputs(workdir, "evaluate", "generate")
            locks.enter_context(training_lock(workdir))
            attention = training_attention(exp, training_mesh(exp)).describe()
            init_workdir(workdir, exp, corpus, attention, auto_dtype)
            check_writable(workdir, WRITTEN_IN)

        for exp, workdir in runs:
            on_process_zero(functools.partial(init, exp, workdir))
            check_shared(workdir)
        yield
