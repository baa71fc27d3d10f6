"""Exports a trained model as three plain files (docs/converting.md), and uploads them."""

import os
import tempfile
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from txl_jax.checkpoint.errors import ModelFormatError, WorkdirError
from txl_jax.checkpoint.loading import import_hub, load
from txl_jax.checkpoint.provenance import provenance
from txl_jax.checkpoint.tensors import flat_params
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir import read_record, write_record
from txl_jax.checkpoint.workdir_files import CONFIG, FORMAT, MODEL
from txl_jax.config.changes import without_paths
from txl_jax.config.folders import expanded_paths, expanded_text
from txl_jax.data.corpus import FOREIGN_VOCAB
from txl_jax.data.sources.text import HELD_OUT, OWN_SPLITS
from txl_jax.data.sources.tokens import NO_TEST
from txl_jax.files import atomic_write
from txl_jax.messages import one_line, short_repr
from txl_jax.paths import is_remote, make_folder, names, path

_NOTES = (OWN_SPLITS, *HELD_OUT.values(), NO_TEST, FOREIGN_VOCAB)
"""The parts of a corpus's label that can be published, because they have no path."""


def export(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], step: str = "best"
) -> int:
    """Loads the model of ``source``, saves it as :func:`save` does, and returns its step."""
    found: str = expanded_paths(os.fspath(source), "source", remote=True)
    folder = expanded_text(folder, "folder")
    require_empty_folder(folder)
    trained = load(found, step)
    save(trained, folder, read_record(found) if path(found, CONFIG).exists() else None)
    return trained.step


def save(
    trained: TrainedModel, folder: str | os.PathLike[str], record: Mapping[str, Any] | None = None
) -> None:
    """Writes a trained model as three files, which ``txl_jax.load(folder)`` reads.

    Example:
      >>> import os, txl_jax
      >>> trained = txl_jax.load("runs/quickstart")
      >>> txl_jax.save(trained, "exported")
      >>> sorted(os.listdir("exported"))
      ['config.json', 'model.safetensors', 'vocab.json']

    Args:
      trained: a model that :func:`txl_jax.load` returned, perhaps with other parameters.
      folder: a new or empty folder; any other folder raises ModelFormatError.
      record: the content of ``config.json`` in the model's workdir; by default the model's
        settings and the current versions.
    """
    from safetensors.numpy import save as to_bytes  # not needed to run a model

    folder = expanded_text(folder, "folder")
    require_empty_folder(folder)
    make_folder(folder)
    metadata = {"format": "txl_jax", "version": str(FORMAT), "step": str(trained.step)}
    atomic_write(os.path.join(folder, MODEL), to_bytes(flat_params(trained.params), metadata))
    if record is None:
        record = {**trained.config.to_dict(), "provenance": provenance()}
    write_record(folder, _without_paths(record), trained.vocab)


def push(trained: TrainedModel, repository: str, private: bool = True) -> str:
    """Uploads a model to the Hub as ``owner/name``; returns its address. Needs ``txl_jax[hub]``.

    The account is that of ``hf auth login`` or ``HF_TOKEN``. Raises WorkdirError if ``repository``
    is not text, ``huggingface_hub`` is missing, or the upload fails.

    Example:
      >>> import txl_jax
      >>> trained = txl_jax.load("runs/quickstart")
      >>> txl_jax.push(trained, "owner/name")  # doctest: +SKIP
    """
    if not isinstance(repository, str):
        shown = f"repository = {short_repr(repository)}"
        raise WorkdirError(f"{shown}: must be a text such as 'owner/name'")
    hub = import_hub()
    with tempfile.TemporaryDirectory() as folder:
        save(trained, folder)
        try:
            hub.create_repo(repository, private=private, exist_ok=True)
            return str(hub.upload_folder(repo_id=repository, folder_path=folder))
        except Exception as error:
            raise WorkdirError(f"{repository}: cannot be uploaded ({one_line(error)})") from error


def require_empty_folder(folder: str) -> None:
    """Raises ModelFormatError unless a folder is new or empty, and can be written."""
    opened = path(folder)
    if names(folder) or (opened.exists() and not opened.is_dir()):
        fault = "is not empty, or is not a folder; name a new or an empty folder"
        raise ModelFormatError(f"{folder}: {fault}")
    if is_remote(folder):
        return  # path() has checked the bucket
    parent = os.path.abspath(folder)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        raise ModelFormatError(f"{folder}: {parent} cannot be written; name another folder")


def _without_paths(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a workdir's record without the paths of its machine and without secret addresses."""
    settings = without_paths(record)
    data, corpus = record.get("data", {}), dict(record.get("corpus", {}))
    path, url = data.get("path"), data.get("url")
    parts = urlsplit(url or "")  # a user, password or query may be secret
    public = parts.scheme in ("http", "https") and "@" not in parts.netloc and not parts.query
    if url and not public:
        settings["data"] |= {"url": None, "hash": None}
    if "label" in corpus and data.get("name") in ("text", "tokens") and (path or not public):
        name = os.path.basename(os.path.normpath(path or ""))
        notes = "".join(note for note in _NOTES if note in corpus["label"])
        corpus["label"] = ("text" if name.startswith((".", "~")) or not name else name) + notes
    return {**settings, "corpus": corpus}
