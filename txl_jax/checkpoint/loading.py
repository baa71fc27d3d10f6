"""Loads a trained model from a workdir, an exported folder, or the Hugging Face Hub."""

import dataclasses
import os
import re
from typing import Any

import jax
from flax.traverse_util import unflatten_dict

from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import ModelFormatError, WorkdirError
from txl_jax.checkpoint.tensors import (
    flat_params,
    params_from_flat,
    read_safetensors,
    safetensors_header,
)
from txl_jax.checkpoint.trained_model import TrainedModel, param_shapes
from txl_jax.checkpoint.workdir import loaded_experiment, read_vocab
from txl_jax.checkpoint.workdir_files import CONFIG, FORMAT, MODEL, VOCAB, is_exported, no_run
from txl_jax.config import ExperimentConfig
from txl_jax.config.folders import expanded_paths, expanded_text
from txl_jax.library_errors import import_optional
from txl_jax.messages import argument, one_line
from txl_jax.model.layout import unstack_layers
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.paths import is_remote, local_file, path

_REPOSITORY = re.compile(r"(hub:)?([\w.-]+/[\w.-]+)(@([\w./-]+))?")  # [hub:]owner/name[@revision]


def load(source: str, step: str = "best", weights: str | None = None) -> TrainedModel:
    """Loads a trained model; arguments and errors are those of ``txl_jax.load`` (library.py)."""
    source = expanded_paths(source, "source", remote=True)
    if is_exported(source):
        return _only(load_exported(source), source, step, weights)
    match = None if is_remote(source) or os.path.isdir(source) else _REPOSITORY.fullmatch(source)
    if match and (match[1] or not source.startswith(("runs/", "./", "../"))):
        return _only(load_exported(_download(match[2], match[4])), source, step, weights)
    return load_workdir(source, step, weights)  # raises an error that names the missing file


def load_workdir(workdir: str, step: str = "best", weights: str | None = None) -> TrainedModel:
    """Loads the trained model of a workdir; arguments and errors are those of :func:`load`."""
    if not path(workdir, CONFIG).exists():
        raise no_run(workdir)
    exp, vocab = _for_inference(loaded_experiment(workdir)), read_vocab(workdir)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), param_shapes(exp.model)
    )
    with Checkpoints(workdir) as checkpoints:
        chosen = checkpoints.choose(step)
        params, name, others = checkpoints.restore_params(chosen, abstract, weights)
    return TrainedModel(TransformerXL(exp.model), params, vocab, exp, chosen, name, others, workdir)


def load_exported(folder: str | os.PathLike[str]) -> TrainedModel:
    """Loads the model that ``save`` wrote, bit for bit; errors are those of ``txl_jax.load``."""
    folder = expanded_text(folder, "folder")
    model = os.path.join(folder, MODEL)
    with local_file(model) as file:
        try:
            step = _checked_step(file)
            exp, vocab = _for_inference(loaded_experiment(folder)), read_vocab(folder)
            stored = unstack_layers(unflatten_dict(read_safetensors(file), sep="/"))
            params = params_from_flat(flat_params(stored), param_shapes(exp.model))
        except ModelFormatError as error:
            text = str(error).replace(file, model)
            text = text if text.startswith(model) else f"{model}: {text}"
            raise ModelFormatError(text) from error
    return TrainedModel(TransformerXL(exp.model), params, vocab, exp, step)


def _only(trained: TrainedModel, source: str, step: str, weights: str | None) -> TrainedModel:
    """Returns an exported model; raises WorkdirError if ``step`` or ``weights`` ask for another."""
    known = {"step": (step, ("best", "latest", str(trained.step))), "weights": (weights, (None,))}
    for name, (value, allowed) in known.items():
        if value not in allowed:
            only = f"step {trained.step} and one set of parameters only"
            raise WorkdirError(
                f"{argument(name, value)}: {source} is an exported model, with {only}"
            )
    return trained


def _for_inference(exp: ExperimentConfig) -> ExperimentConfig:
    """Returns a run's settings; settings for training only, such as stacked layers, are reset."""
    model = dataclasses.replace(exp.model, scan_layers=False, remat="none", kernel="auto")
    return dataclasses.replace(exp, model=model)


def _checked_step(file_path: str) -> int:
    """Returns a model file's step, 0 if damaged; raises ModelFormatError for another format."""
    names, metadata = safetensors_header(file_path)
    version = metadata.get("version", "0")
    if names and version != str(FORMAT):
        raise ModelFormatError(
            f"{file_path}: has format {version}, and this version of txl_jax reads format {FORMAT}"
            " only; export the model again with this version"
        )
    return int(metadata.get("step", 0))


def _download(repository: str, revision: str | None) -> str:
    """Downloads a model from the Hub and returns its folder, or raises WorkdirError."""
    hub, files = import_hub(), [MODEL, CONFIG, VOCAB]
    try:
        return hub.snapshot_download(repository, revision=revision, allow_patterns=files)
    except Exception as error:
        fault = "is no folder here, and cannot be downloaded from the Hugging Face Hub"
        raise WorkdirError(f"{repository}: {fault} ({one_line(error)})") from error


def import_hub() -> Any:
    """Returns the package ``huggingface_hub``; raises WorkdirError if it is not installed."""
    missing = WorkdirError("the Hugging Face Hub needs a package; run pip install 'txl_jax[hub]'")
    return import_optional("huggingface_hub", missing)
