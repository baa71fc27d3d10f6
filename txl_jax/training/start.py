"""Fine-tuning: a run that starts from the parameters of a trained model, ``train.start_from``.

    config.json, vocab.json   of that model ──▶ shape of the model, kind of token, vocabulary
    its parameters                          ──▶ state at step 0

What the parameters mean stays as it is there: the vocabulary, with which the new text is encoded,
and every setting of the model but :data:`OWN`, which say how it is trained and run. One that the
config leaves at its default is taken from there, another must be the same. A word that the
vocabulary lacks becomes its ``<unk>``; where it has none, that is an error, and so is a character
that it lacks. Bytes and subwords lack nothing.

Step, optimizer, memory and seed are the new run's. What was started from is written as
``start.json``. A run that is gone on with reads all this in its own workdir and does not look at
that folder again, which may be gone. So ``train.start_from`` decides the trained state and cannot
be changed on the way; the same text names it, wherever the folder is by then.
"""

import dataclasses
import hashlib
import os
from typing import Any

import jax

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.tensors import flat_params
from txl_jax.checkpoint.workdir import read_experiment, read_json, read_record, read_vocab
from txl_jax.checkpoint.workdir_files import CONFIG, VOCAB
from txl_jax.config import ConfigError, DataConfig, ExperimentConfig, TransformerXLConfig
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.data.errors import DataError
from txl_jax.data.symbols import UnknownSymbolError
from txl_jax.data.vocab import Vocab
from txl_jax.files import write_json
from txl_jax.model.layout import stack_layers
from txl_jax.parallel import processes
from txl_jax.parallel.shardings import Shardings
from txl_jax.training.state import TrainState

START = "start.json"
OWN = (
    "dropout",
    "dropout_input",
    "dropout_output",
    "dropout_qkv",
    "dropout_embedding",
    "dropout_mask",
    "dropatt",
    "dropout_latent",
    "sample_softmax",
    "init_std",
    "proj_init_std",
    "dtype",
    "scan_layers",
    "remat",
    "kernel",
)
"""Settings of the model that are the new run's own: they leave a parameter's meaning as it is."""


def experiment_and_vocab(
    exp: ExperimentConfig, workdir: str
) -> tuple[ExperimentConfig, Vocab | None]:
    """The experiment with the model and the kind of token it starts from, and the vocabulary.

    As it is, and ``None``, where it starts from nothing. Reads two small files.

    Raises:
      ConfigError: no model is in the folder, or one of another shape than the config names.
    """
    folder = exp.train.start_from
    if folder is None:
        return exp, None
    there, vocab = _described(workdir if _is_begun(workdir, folder) else folder, folder)
    exp = dataclasses.replace(exp, model=_model(exp, there.model), data=_data(exp, there, vocab))
    return exp, vocab


def corpus_of(exp: ExperimentConfig, vocab: Vocab | None) -> Corpus:
    """The corpus of an experiment, encoded with the vocabulary that it starts from, if any.

    Raises:
      DataError: as :func:`corpus_from_config`; a word or character that the vocabulary lacks.
    """
    try:
        return corpus_from_config(exp.data, vocab)
    except UnknownSymbolError as error:
        if vocab is None:
            raise
        raise DataError(
            f"{error.what}; a run with train.start_from keeps the vocabulary of the model that it"
            " starts from: take this out of the text, or start from a model of bytes or subwords,"
            " or one of words with <unk>"
        ) from error


def started(
    state: TrainState, exp: ExperimentConfig, vocab: Vocab, workdir: str, shardings: Shardings
) -> TrainState:
    """The state at step 0 with the parameters that the experiment starts from, if any.

    Args:
      state: with drawn parameters, in the run's own layout.
      exp: with the model's whole shape.
      vocab: of the corpus.
      workdir: where ``start.json`` is written.
      shardings: of the state.

    Raises:
      ConfigError: the folder's model is of another shape or vocabulary, or is not the one that
        ``start.json`` has of an earlier start of this run.
      CheckpointError: its checkpoint cannot be read.
    """
    folder = exp.train.start_from
    if folder is None:
        return state
    _, known = _described(folder, folder)
    if known != vocab:
        raise _refused(folder, "its vocabulary is not the one that the text is encoded with")
    params, record = _parameters(exp, folder)
    _write_record(workdir, folder, record)
    params = processes.placed(params, shardings.parameters(params))
    if exp.model.scan_layers:
        stacked = shardings.parameters(state.params)
        params = jax.jit(stack_layers, out_shardings=stacked)(params)
    return state.replace(params=params)


def _is_begun(workdir: str, folder: str) -> bool:
    """Whether the workdir is whole and of a run that started from this folder."""
    path, vocab = (os.path.join(workdir, name) for name in (CONFIG, VOCAB))
    if not os.path.exists(path) or not os.path.exists(vocab):
        return False
    return read_record(workdir)["train"].get("start_from") == folder


def _described(folder: str, named: str) -> tuple[ExperimentConfig, Vocab]:
    """Settings and vocabulary of a model, without its parameters; ``named``: by the config."""
    for name in (CONFIG, VOCAB):
        if not os.path.exists(os.path.join(folder, name)):
            raise _refused(
                named,
                f"there is no {name} in it; name the workdir of a run, or a folder that `python -m"
                " txl_jax.convert` wrote",
            )
    return read_experiment(folder), read_vocab(folder)


def _model(exp: ExperimentConfig, there: TransformerXLConfig) -> TransformerXLConfig:
    """The model of the folder, with the experiment's own settings of how it is run."""
    default, taken, different = TransformerXLConfig(), {}, []
    for key in (field.name for field in dataclasses.fields(there) if field.name not in OWN):
        ours, theirs = getattr(exp.model, key), getattr(there, key)
        if ours not in (getattr(default, key), theirs):
            different.append((key, ours, theirs))
        taken[key] = theirs
    if different:
        named = ", ".join(f"{key} {theirs!r}, not {ours!r}" for key, ours, theirs in different)
        flags = " ".join(f"--config.model.{key}={_flag(theirs)}" for key, _, theirs in different)
        raise _refused(
            exp.train.start_from,
            f"its model has {named}; give {flags}, or leave them out of the config",
        )
    return dataclasses.replace(exp.model, **taken)


def _flag(value: Any) -> str:
    """A setting as it is typed."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _data(exp: ExperimentConfig, there: ExperimentConfig, vocab: Vocab) -> DataConfig:
    """The text of the experiment, read as the vocabulary's kind of token where it names none."""
    d = exp.data
    if d.vocab is not None or d.name not in ("text", "stdlib", "ptb"):
        return d
    if vocab.kind not in ("byte", "char", "word", "subword"):
        return d  # one corpus has such tokens, and it needs no word for it
    size = there.data.vocab_size if vocab.kind == "subword" else d.vocab_size
    return dataclasses.replace(d, vocab=vocab.kind, vocab_size=size)


def _parameters(exp: ExperimentConfig, folder: str) -> tuple[Any, dict[str, Any]]:
    """Parameters, layers one by one, of the best checkpoint or the exported file; their record."""
    try:
        trained = load(folder)
    except ModelFormatError as error:
        raise _refused(folder, str(error)) from error
    if _model(exp, trained.config.model) != exp.model:
        raise _refused(folder, "its model is of another shape than this run's")
    digest = hashlib.sha256()
    for name, array in flat_params(trained.params).items():
        digest.update(name.encode() + str(array.shape).encode() + array.tobytes())
    record = {
        "start_from": folder,
        "folder": os.path.abspath(folder),
        "name": trained.config.name,
        "step": trained.step,
        "parameters_sha256": digest.hexdigest(),
    }
    return trained.params, record


def _write_record(workdir: str, folder: str, record: dict[str, Any]) -> None:
    """Writes ``start.json``; a run that began before must begin with the same parameters."""
    path, key = os.path.join(workdir, START), "parameters_sha256"

    def write() -> None:
        if os.path.exists(path) and read_json(path).get(key) != record[key]:
            raise _refused(
                folder,
                f"its parameters are not those that this run began with ({path}); name another"
                " --workdir",
            )
        write_json(path, record)

    processes.on_process_zero(write)


def _refused(folder: str | None, why: str) -> ConfigError:
    return ConfigError(f"config key train.start_from = {folder!r}: {why}")
