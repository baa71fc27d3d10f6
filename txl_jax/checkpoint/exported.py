"""A trained model as three plain files, to pass on: no pickle, no folder of checkpoints.

model.safetensors   parameters, float32, by their path in the tree: "layer_0/attention/query"
config.json         as in a workdir: every setting, corpus, versions
vocab.json          as in a workdir
"""

import contextlib
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.provenance import provenance
from txl_jax.checkpoint.tensors import Tensors, read_safetensors
from txl_jax.checkpoint.trained_model import TrainedModel, param_shapes
from txl_jax.checkpoint.workdir import experiment_of, load_workdir, vocab_of
from txl_jax.checkpoint.workdir_files import CONFIG, MODEL, VOCAB
from txl_jax.config import ExperimentConfig, TransformerXLConfig, without_paths
from txl_jax.data.corpus import FOREIGN_VOCAB
from txl_jax.data.sources.text import OWN_SPLITS
from txl_jax.files import atomic_write, json_object, write_json
from txl_jax.model.transformer_xl import TransformerXL

FORMAT = 1


def export(workdir: str, folder: str, step: str = "best") -> int:
    """Writes the trained model of a workdir as the three files; the step it is of.

    Args:
      workdir: of a run.
      folder: new or empty.
      step: ``best`` by validation, ``latest``, or a number.

    Raises:
      ModelFormatError: something is in the folder.
      WorkdirError, CheckpointError: as :func:`txl_jax.load`.
    """
    refuse_used(folder)
    trained = load_workdir(workdir, step)
    save(trained, folder, read_json(workdir, CONFIG))
    return trained.step


def save(trained: TrainedModel, folder: str, record: dict[str, Any] | None = None) -> None:
    """Writes a trained model as the three files; ``txl_jax.load(folder)`` gives it back.

    Example:
      >>> import os, txl_jax
      >>> trained = txl_jax.load("runs/quickstart")
      >>> txl_jax.save(trained, "exported")
      >>> sorted(os.listdir("exported"))
      ['config.json', 'model.safetensors', 'vocab.json']

    Args:
      trained: as :func:`txl_jax.load` gives it, perhaps with parameters trained further.
      folder: new or empty.
      record: of its workdir, with corpus and versions; ``None``: settings and today's versions.

    Raises:
      ModelFormatError: something is in the folder.
    """
    from safetensors.numpy import save  # here, so that models run where it is not installed

    refuse_used(folder)
    tensors = flat_params(trained.params)
    os.makedirs(folder, exist_ok=True)
    metadata = {"format": "txl_jax", "version": str(FORMAT), "step": str(trained.step)}
    atomic_write(os.path.join(folder, MODEL), save(tensors, metadata))
    write_json(os.path.join(folder, VOCAB), trained.vocab.to_json())
    if record is None:
        record = {**trained.config.to_dict(), "provenance": provenance()}
    write_json(os.path.join(folder, CONFIG), _without_paths(record))


def load_exported(folder: str) -> TrainedModel:
    """The model that :func:`export` wrote, bit for bit; its step is 0.

    Raises:
      ModelFormatError: a file is missing, damaged or of a newer format, or the files do not belong
        together.
      DataError: what should be the vocabulary is none.
      WorkdirError: its settings cannot be used.
    """
    path = os.path.join(folder, MODEL)
    _refuse_newer(path)
    for name in (CONFIG, VOCAB):
        read_json(folder, name)  # for its errors
    exp, vocab = experiment_of(folder), vocab_of(folder)
    params = params_from_flat(read_safetensors(path), exp.model)
    return TrainedModel(TransformerXL(exp.model), params, vocab, exp, 0)


def _refuse_newer(path: str) -> None:
    """A file that is not there or damaged is told of when it is read."""
    from safetensors import SafetensorError, safe_open

    version = FORMAT
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, "numpy") as file:
        version = int((file.metadata() or {}).get("version", FORMAT))
    if version > FORMAT:
        raise ModelFormatError(
            f"{path}: has format {version}, newer than this program's {FORMAT}; update txl_jax"
        )


def flat_params(params: Any) -> dict[str, np.ndarray]:
    """Arrays by their paths in the tree, each in C order: safetensors writes memory as it lies."""
    flat = flatten_dict(jax.device_get(params), sep="/")
    return {name: np.ascontiguousarray(array) for name, array in sorted(flat.items())}


def params_from_flat(tensors: dict[str, np.ndarray], cfg: TransformerXLConfig) -> dict[str, Any]:
    """The tree of parameters from arrays by their paths, every shape checked."""
    left = Tensors(tensors)
    shapes = flatten_dict(param_shapes(cfg), sep="/")
    params = {name: left.take(name, leaf.shape) for name, leaf in shapes.items()}
    left.finish()
    return unflatten_dict(params, sep="/")


def _without_paths(record: dict[str, Any]) -> dict[str, Any]:
    """A workdir's record without the names of files and folders of the machine it was made on."""
    settings = without_paths(ExperimentConfig, record)
    data, corpus = record.get("data", {}), dict(record.get("corpus", {}))
    url = data.get("url")
    if url and not _is_public(url):
        settings["data"] |= {"url": None, "hash": None}
    if "label" in corpus and data.get("name") == "text":
        corpus["label"] = _label_without_path(corpus["label"], data)
    return {**settings, "corpus": corpus}


def _is_public(url: str) -> bool:
    """Whether an address has no user, password or query, which may be a token."""
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and "@" not in parts.netloc and not parts.query


def _label_without_path(label: str, data: Mapping[str, Any]) -> str:
    """The label of a user's own text with the last name of its path in place of the path.

    The label may have the path with another home folder than today's.
    """
    path, url = data.get("path"), data.get("url")
    if not path and url and _is_public(url):
        return label
    name = os.path.basename(os.path.normpath(path or ""))
    about = re.search(f"({re.escape(OWN_SPLITS)})?({re.escape(FOREIGN_VOCAB)})?$", label)
    assert about is not None  # each part may be missing
    return ("text" if name.startswith((".", "~")) or not name else name) + about[0]


def refuse_used(folder: str) -> None:
    """Raises ModelFormatError where there is something in the folder, or it cannot be written."""
    if os.path.isfile(folder) or (os.path.isdir(folder) and os.listdir(folder)):
        raise ModelFormatError(f"{folder}: there is something in it; name a new or an empty folder")
    there = os.path.abspath(folder)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise ModelFormatError(f"{folder}: nothing can be written in {there}; name another folder")


def read_json(folder: str, name: str) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFormatError where there is none."""
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            return json_object(file.read())
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelFormatError(f"{path}: {error}") from error
