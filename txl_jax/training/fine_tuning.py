"""Fine-tuning: a run that starts from the parameters of a trained model, ``train.start_from``.

    config.json, vocab.json   of the trained model ──▶ model shape, kind of token, vocabulary
    its parameters                                 ──▶ state at step 0

The trained model's vocabulary encodes the new text. The new run keeps the settings of the trained
model, except dropout and the settings in :data:`OWN`. For each kept setting, the config must have
the default or the trained model's value. The new run has its own step, optimizer state, memory and
seed. ``start.json`` records the trained model. A resumed run reads only its own workdir.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import optax

from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.tensors import parameters_hash
from txl_jax.checkpoint.workdir import read_experiment, read_vocab
from txl_jax.checkpoint.workdir_files import CONFIG, VOCAB
from txl_jax.config import ConfigError, DataConfig, ExperimentConfig, TransformerXLConfig
from txl_jax.config.folders import same_files
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.data.errors import DataError
from txl_jax.data.symbols import UnknownSymbolError
from txl_jax.data.vocab import Vocab
from txl_jax.files import write_json
from txl_jax.messages import argument, shown_path
from txl_jax.model.layout import stack_layers
from txl_jax.parallel import processes
from txl_jax.parallel.shardings import Shardings
from txl_jax.paths import absolute, path
from txl_jax.training.state import TrainState

RECORD = "start.json"
OWN = (
    *("sample_softmax", "init_std", "proj_init_std", "dtype", "matmul_precision"),
    *("scan_layers", "remat", "kernel"),
)
"""Model settings that a new run can choose. Like dropout, they do not change the parameters."""


def resolve_experiment(
    exp: ExperimentConfig, workdir: str
) -> tuple[ExperimentConfig, Vocab | None]:
    """Returns the experiment with the settings of a trained model, and that model's vocabulary.

    The trained model is in the folder ``train.start_from``. Without this setting, returns the
    unchanged experiment and ``None``. Raises ConfigError if the folder has no model, or if the
    config gives the model another shape.
    """
    folder = exp.train.start_from
    if folder is None:
        return exp, None
    source = folder
    if _has_settings(workdir) and same_files(read_experiment(workdir).train.start_from, folder):
        source = workdir  # a resumed run reads only its own workdir
    elif not _has_settings(folder):
        what = "the workdir of a run, or a folder that `python -m txl_jax.convert` wrote"
        raise _error(folder, f"this folder has no {CONFIG} and {VOCAB}; name {what}")
    trained, vocab = read_experiment(source), read_vocab(source)
    model, data = _merged_model(exp, trained.model), _merged_data(exp, trained, vocab)
    return dataclasses.replace(exp, model=model, data=data), vocab


def load_encoded_corpus(exp: ExperimentConfig, vocab: Vocab | None) -> Corpus:
    """Loads an experiment's corpus, encoded with ``vocab`` unless it is ``None``.

    Raises DataError if this vocabulary lacks a symbol of the text.
    """
    try:
        return corpus_from_config(exp.data, vocab)
    except UnknownSymbolError as error:
        if vocab is None:
            raise
        raise DataError(
            f"{error.what}; a run with train.start_from keeps the vocabulary of the trained model:"
            " remove this symbol from the text, or start from a model of bytes or subwords, or a"
            " model of words with <unk>"
        ) from error


def load_initial_params(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    exp: ExperimentConfig,
    workdir: str,
    shardings: Shardings,
) -> TrainState:
    """Returns the state at step 0 with the parameters of ``train.start_from``, which must be set.

    The optimizer state is initialised from these parameters, because some optimizers keep a copy of
    them. ``exp`` comes from :func:`resolve_experiment`. Writes ``start.json`` into ``workdir``.
    Raises CheckpointError or ModelFormatError if the parameters cannot be read, and ConfigError if
    the folder now has a model of another shape.
    """
    folder = exp.train.start_from
    assert folder is not None
    trained = load(folder)
    if _merged_model(exp, trained.config.model) != exp.model:
        fix = "the folder has changed since this run began; name another workdir"
        raise _error(folder, f"this model has another shape than the model of the run: {fix}")
    record = {
        "start_from": folder,
        "folder": absolute(folder),
        "name": trained.config.name,
        "step": trained.step,
        "parameters_sha256": parameters_hash(trained.params),
    }
    processes.on_process_zero(lambda: write_json(os.path.join(workdir, RECORD), record))
    params = processes.placed(trained.params, shardings.parameters(trained.params))
    if exp.model.scan_layers:
        stacked = shardings.parameters(state.params)
        params = jax.jit(stack_layers, out_shardings=stacked)(params)
    spread = shardings.parameters(state.opt_state)
    # The old optimizer state is dropped first, to free memory for the new one. The new one is made
    # from a copy of the parameters: an update donates both, so they must not share an array.
    state = state.replace(params=params, opt_state=None)
    start = lambda params: optimizer.init(jax.tree.map(jnp.copy, params))
    return state.replace(opt_state=jax.jit(start, out_shardings=spread)(params))


def _has_settings(folder: str) -> bool:
    return all(path(folder, name).exists() for name in (CONFIG, VOCAB))


def _merged_model(exp: ExperimentConfig, theirs: TransformerXLConfig) -> TransformerXLConfig:
    """Returns the trained model's settings, with dropout and :data:`OWN` from the experiment."""
    default, ours = dataclasses.asdict(TransformerXLConfig()), dataclasses.asdict(exp.model)
    fixed = lambda key: not key.startswith("drop") and key not in OWN
    taken = {key: value for key, value in dataclasses.asdict(theirs).items() if fixed(key)}
    different = {k: v for k, v in taken.items() if ours[k] not in (default[k], v)}
    if different:
        typed = lambda value: ",".join(map(str, value)) if isinstance(value, tuple) else value
        named = ", ".join(f"{k} {v!r}, not {ours[k]!r}" for k, v in different.items())
        flags = " ".join(argument(f"config.model.{k}", typed(v)) for k, v in different.items())
        rule = f"the trained model has {named}; give {flags}, or leave these settings out"
        raise _error(str(exp.train.start_from), rule)
    return dataclasses.replace(exp.model, **taken)


def _merged_data(exp: ExperimentConfig, trained: ExperimentConfig, vocab: Vocab) -> DataConfig:
    """Returns the data settings, with the vocabulary's kind of token if the config names none."""
    d = exp.data
    if d.vocab or d.tokenizer or d.name not in ("text", "stdlib", "ptb"):
        return d
    if vocab.kind == "tokenizer" and d.name == "text":
        return dataclasses.replace(d, tokenizer=trained.data.tokenizer)
    if vocab.kind not in ("byte", "char", "word", "subword"):
        return d  # a corpus with other kinds of token has no setting for them
    size = trained.data.vocab_size if vocab.kind == "subword" else d.vocab_size
    return dataclasses.replace(d, vocab=vocab.kind, vocab_size=size)


def _error(folder: str, reason: str) -> ConfigError:
    return ConfigError(f"config key train.start_from = {shown_path(folder)!r}: {reason}")
