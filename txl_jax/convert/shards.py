"""Finds the files of a model in a folder, and reads a model that is saved in shards.

model.safetensors.index.json       {"weight_map": {tensor: file}}
model-00001-of-00002.safetensors   a shard: some of the tensors

A variant, such as ``fp16``, is in all names of Hugging Face's library: ``model.fp16.safetensors``,
``model.safetensors.index.fp16.json``, ``model.fp16-00001-of-00002.safetensors``.
"""

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.workdir import read_json
from txl_jax.messages import UserError

_INDEX = re.compile(r"(?P<stem>.+)(?P<end>\.\w+)\.index(?P<variant>\.[\w-]+)?\.json")
_SHARD = re.compile(
    r"(?P<stem>.+)-\d+-of-0*(?P<count>\d+)(?P<variant>\.[\w-]+)?(?P<end>\.\w+)", re.ASCII
)
_WHOLE = re.compile(r"(?P<stem>.+)(?P<end>\.\w+)")
HUGGINGFACE = ("model.safetensors", "pytorch_model.bin")
"""The names under which Hugging Face's library saves a model, the preferred one first."""

Tensors = Mapping[str, np.ndarray]


class Named(NamedTuple):
    """What a file's name says: the model's name without a variant, and the variant.

    ``kind`` is 0 for a whole model, 1 for an index and 2 for a shard.
    """

    model: str
    variant: str
    kind: int


def _named(name: str) -> Named:
    for kind, pattern in ((1, _INDEX), (2, _SHARD), (0, _WHOLE)):
        if match := pattern.fullmatch(name):
            found = match.groupdict()
            stem, variant = found["stem"], found.get("variant") or ""
            if not variant and kind != 1 and stem.rpartition(".")[0]:
                stem, _, variant = stem.rpartition(".")
            return Named(stem + found["end"], variant.removeprefix("."), kind)
    return Named(name, "", 0)


def is_huggingface(path: str) -> bool:
    """Tells whether Hugging Face's library saves a model, or a shard of one, under this name."""
    return _named(os.path.basename(path)).model in HUGGINGFACE


def index_of(path: str) -> str | None:
    """Returns the index that a path names, or to which a shard belongs; ``None`` for other files.

    Raises ModelFormatError for one of several shards if there is no index beside it.
    """
    folder, name = os.path.split(path)
    if _INDEX.fullmatch(name):
        return path
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    stem, variant, end = match["stem"], match["variant"] or "", match["end"]
    names = [f"{stem}{end}.index{variant}.json"]
    if not variant and "." in stem:
        start, _, variant = stem.rpartition(".")
        names.append(f"{start}{end}.index.{variant}.json")
    for index in (os.path.join(folder, name) for name in names):
        if os.path.isfile(index):
            return index
    if int(match["count"]) == 1 or not os.path.isfile(path):
        return None
    missing = " or ".join(os.path.join(folder, name) for name in reversed(names))
    raise ModelFormatError(
        f"{path}: is one of {int(match['count'])} files, and {missing} is missing, which lists the"
        " tensors of each; get that file too"
    )


def model_in(folder: str, endings: tuple[str, ...], others: tuple[str, ...]) -> str:
    """Returns the path of the model's only file, of its index, or of a shard without an index.

    Of several models, the one with a name of Hugging Face's library is taken, without a variant if
    possible. ``endings`` are the suffixes of files with tensors; ``others`` names files to ignore.

    Raises:
      ModelFormatError: there is no such file, or nothing tells which of several ones to take.
    """
    found: dict[tuple[str, str], tuple[int, str]] = {}
    names = sorted(os.listdir(folder))
    listed: set[str] = set()
    for name in filter(_INDEX.fullmatch, names):
        with contextlib.suppress(UserError):  # raised again when the index is read
            listed.update(listed_files(os.path.join(folder, name)).values())
    for name in names:
        model, variant, kind = _named(name)
        if model.endswith(endings) and name not in (*others, *listed):
            better = min(found.get((model, variant), (kind, name)), (kind, name))
            found[model, variant] = better
    for name in HUGGINGFACE:
        if (name, "") in found:
            return os.path.join(folder, found[name, ""][1])
    known = {key: file for key, file in found.items() if key[0] in HUGGINGFACE} or found
    if len({variant for _, variant in known}) == 1 and known is not found:
        first = min(known, key=lambda key: HUGGINGFACE.index(key[0]))
        known = {first: known[first]}
    if len(known) == 1:
        return os.path.join(folder, next(iter(known.values()))[1])
    if not found:
        wanted = f"{' or '.join(HUGGINGFACE)}, whole or in shards with an index"
        raise ModelFormatError(f"{folder}: has no file with tensors ({wanted})")
    some = ", ".join(file for _, file in sorted(known.values(), key=lambda item: item[1])[:5])
    raise ModelFormatError(
        f"{folder}: has {len(known)} models ({some}); name the file of one instead of the folder"
    )


def listed_files(index: str) -> dict[str, str]:
    """Returns the file of each tensor in an index; raises ModelFormatError or WorkdirError."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelFormatError(f"{index}: has no weight_map, which gives the file of each tensor")
    for file in listed.values():
        if not isinstance(file, str) or re.search(r"[/\\\0]", file) or file in ("", ".", ".."):
            raise ModelFormatError(f"{index}: {file!r} is not the name of a file beside the index")
    return listed


def read_shards(index: str, read: Callable[[str], Tensors]) -> dict[str, np.ndarray]:
    """Returns the tensors of all shards of an index; ``read`` returns those of one file.

    Raises ModelFormatError or WorkdirError if the index is invalid, names files in other folders,
    or does not agree with the tensors or with the number of its files.
    """
    listed = listed_files(index)
    folder, files = os.path.dirname(index), sorted(set(listed.values()))
    missing = [file for file in files if not os.path.isfile(os.path.join(folder, file))]
    if missing:
        names, count = ", ".join(missing[:3]), f"{len(missing)} of {len(files)} listed files"
        raise ModelFormatError(f"{index}: beside it {count} are missing ({names}); get them again")
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        path = os.path.join(folder, file)
        found, fix = read(path), "get the index and the files of one version again"
        for name in (*found, *listed):
            if name in found and listed.get(name) != file:
                where = f"lists it in {listed[name]}" if name in listed else "does not list it"
                raise ModelFormatError(f"{path}: has the tensor {name}, and {index} {where}; {fix}")
            if name not in found and listed[name] == file:
                where = f"has no tensor {name}, which {index} lists there"
                raise ModelFormatError(f"{path}: {where}; {fix}")
        tensors |= found
    _check_count(index, files)
    return tensors


def _check_count(index: str, files: list[str]) -> None:
    for file in files:
        match = _SHARD.fullmatch(file)
        if match and int(match["count"]) != len(files):
            listed = f"{len(files)} file{'s' * (len(files) > 1)}"
            raise ModelFormatError(
                f"{index}: lists {listed}, and the name {file} says that there are"
                f" {int(match['count'])}; get the index and the files of one version again"
            )
