"""Before the first step: settings are resolved, text is encoded, workdirs are locked."""

import contextlib
from collections.abc import Iterator, Sequence

from txl_jax.checkpoint.lock import training_lock
from txl_jax.checkpoint.workdir import check_shared, init_workdir, with_vocab
from txl_jax.checkpoint.workdir_files import (
    WRITTEN_IN,
    check_free,
    check_outputs,
    check_writable,
)
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.parallel.processes import on_process_zero, process_zero_first
from txl_jax.training.fine_tuning import load_encoded_corpus, resolve_experiment
from txl_jax.training.multi_seed import SeedRun, seed_runs
from txl_jax.training.setup import check_corpus, check_training_memory


def prepare(exp: ExperimentConfig, workdir: str) -> tuple[list[SeedRun], Corpus]:
    """The run of every seed with its complete settings, and the encoded corpus.

    Raises:
      ConfigError, DataError: settings, text and devices do not fit together.
      WorkdirError: a workdir cannot be used.
    """
    folders = [folder for _, folder in seed_runs(exp, workdir)]

    def check_folders() -> None:
        for folder in folders:
            check_free(folder)
        check_writable(workdir)

    on_process_zero(check_folders)
    exp, vocab = resolve_experiment(exp, folders[0])
    check_training_memory(exp)  # before the text is prepared, and below with its vocabulary
    corpus = process_zero_first(lambda: load_encoded_corpus(exp, vocab))
    exp = with_vocab(exp, corpus)
    check_corpus(exp, corpus)
    return seed_runs(exp, workdir), corpus


@contextlib.contextmanager
def locked_workdirs(runs: Sequence[SeedRun], corpus: Corpus) -> Iterator[None]:
    """Holds the lock of every workdir, with its settings and vocabulary written in it.

    Raises:
      LockedError: another process trains in one of them.
      WorkdirError: one cannot be used.
    """
    with contextlib.ExitStack() as locks:
        for exp, workdir in runs:

            def init(exp: ExperimentConfig = exp, workdir: str = workdir) -> None:
                check_outputs(workdir, "evaluate", "generate")
                locks.enter_context(training_lock(workdir))
                init_workdir(workdir, exp, corpus)
                check_writable(workdir, WRITTEN_IN)

            on_process_zero(init)
            check_shared(workdir)
        yield
