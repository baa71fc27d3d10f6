"""Fine-tuning: a run that starts from the parameters of a trained model, ``train.start_from``.

    config.json, vocab.json   of that model ──▶ shape of the model, kind of token, vocabulary
    its parameters                          ──▶ state at step 0

The run keeps the vocabulary, which also encodes the new text, and every setting of the model except
dropout and :data:`OWN`. A setting that the config leaves at its default is taken from that model;
any other must be equal. A word that the vocabulary lacks becomes ``<unk>``; without an ``<unk>`` it
is an error, and so is an unknown character.

Step, optimizer, memory and seed are the new run's own. ``start.json`` records the model that the
run started from. A resumed run reads everything from its own workdir: the folder may be gone.
"""

import dataclasses
import os
from typing import Any

import jax

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.tensors import parameters_hash
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

RECORD = "start.json"
OWN = ("sample_softmax", "init_std", "proj_init_std", "dtype", "scan_layers", "remat", "kernel")
"""Settings of the model that, like every dropout, do not change the meaning of its parameters."""


def resolve_experiment(
    exp: ExperimentConfig, workdir: str
) -> tuple[ExperimentConfig, Vocab | None]:
    """The experiment with model and kind of token of the model it starts from; its vocabulary.

    The same experiment and ``None`` if it starts from no model. Raises ConfigError if the folder
    has no model, or one of another shape than the config names.
    """
    folder = exp.train.start_from
    if folder is None:
        return exp, None
    complete = all(os.path.exists(os.path.join(workdir, name)) for name in (CONFIG, VOCAB))
    started = complete and read_record(workdir)["train"].get("start_from") == folder
    trained, vocab = _read_settings(workdir if started else folder, folder)
    model, data = _merged_model(exp, trained.model), _merged_data(exp, trained, vocab)
    return dataclasses.replace(exp, model=model, data=data), vocab


def load_encoded_corpus(exp: ExperimentConfig, vocab: Vocab | None) -> Corpus:
    """The corpus of an experiment; raises DataError where the given vocabulary lacks a symbol."""
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


def load_initial_params(
    state: TrainState, exp: ExperimentConfig, vocab: Vocab, workdir: str, shardings: Shardings
) -> TrainState:
    """The state at step 0 with the parameters that the experiment starts from, if any.

    ``exp`` has the resolved model; ``vocab`` is the corpus's; ``workdir`` gets ``start.json``.
    Raises CheckpointError if the folder's checkpoint cannot be read, ConfigError if its model has
    another shape or vocabulary, or other parameters than when this run first started.
    """
    folder = exp.train.start_from
    if folder is None:
        return state
    if _read_settings(folder, folder)[1] != vocab:
        raise _error(folder, "its vocabulary is not the one that the text is encoded with")
    try:
        trained = load(folder)
    except ModelFormatError as error:
        raise _error(folder, str(error)) from error
    if _merged_model(exp, trained.config.model) != exp.model:
        raise _error(folder, "its model is of another shape than this run's")
    record = {
        "start_from": folder,
        "folder": os.path.abspath(folder),
        "name": trained.config.name,
        "step": trained.step,
        "parameters_sha256": parameters_hash(trained.params),
    }
    processes.on_process_zero(lambda: _write_record(workdir, record))
    params = processes.placed(trained.params, shardings.parameters(trained.params))
    if exp.model.scan_layers:
        stacked = shardings.parameters(state.params)
        params = jax.jit(stack_layers, out_shardings=stacked)(params)
    return state.replace(params=params)


def _read_settings(folder: str, named: str) -> tuple[ExperimentConfig, Vocab]:
    """Settings and vocabulary of a model; ``named`` is the folder in the config, for errors."""
    for name in (CONFIG, VOCAB):
        if not os.path.exists(os.path.join(folder, name)):
            what = "the workdir of a run, or a folder that `python -m txl_jax.convert` wrote"
            raise _error(named, f"there is no {name} in it; name {what}")
    return read_experiment(folder), read_vocab(folder)


def _merged_model(exp: ExperimentConfig, theirs: TransformerXLConfig) -> TransformerXLConfig:
    """The trained model's shape, with the experiment's dropout and :data:`OWN` settings."""
    default, ours = dataclasses.asdict(TransformerXLConfig()), dataclasses.asdict(exp.model)
    fixed = lambda key: not key.startswith("drop") and key not in OWN
    taken = {key: value for key, value in dataclasses.asdict(theirs).items() if fixed(key)}
    different = {k: v for k, v in taken.items() if ours[k] not in (default[k], v)}
    if different:
        typed = lambda value: ",".join(map(str, value)) if isinstance(value, tuple) else value
        named = ", ".join(f"{k} {v!r}, not {ours[k]!r}" for k, v in different.items())
        flags = " ".join(f"--config.model.{k}={typed(v)}" for k, v in different.items())
        rule = f"its model has {named}; give {flags}, or leave them out of the config"
        raise _error(exp.train.start_from, rule)
    return dataclasses.replace(exp.model, **taken)


def _merged_data(exp: ExperimentConfig, trained: ExperimentConfig, vocab: Vocab) -> DataConfig:
    """The experiment's text, with the vocabulary's kind of token if the config names none."""
    d = exp.data
    if d.vocab is not None or d.name not in ("text", "stdlib", "ptb"):
        return d
    if vocab.kind not in ("byte", "char", "word", "subword"):
        return d  # only one corpus has such tokens, and it has no setting for them
    size = trained.data.vocab_size if vocab.kind == "subword" else d.vocab_size
    return dataclasses.replace(d, vocab=vocab.kind, vocab_size=size)


def _write_record(workdir: str, record: dict[str, Any]) -> None:
    """Writes ``start.json``; a run that started before must start with the same parameters."""
    path, key = os.path.join(workdir, RECORD), "parameters_sha256"
    if os.path.exists(path) and read_json(path).get(key) != record[key]:
        rule = f"its parameters are not those that this run began with ({path})"
        raise _error(record["start_from"], f"{rule}; name another --workdir")
    write_json(path, record)


def _error(folder: str | None, reason: str) -> ConfigError:
    return ConfigError(f"config key train.start_from = {folder!r}: {reason}")
