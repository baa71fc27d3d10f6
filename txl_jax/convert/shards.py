"""Reads a model that Hugging Face's library saved in several files, which are called shards.

model.safetensors.index.json       {"weight_map": {tensor: file}}
model-00001-of-00002.safetensors   some of the tensors
"""

import os
import re
from collections.abc import Callable, Mapping

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.workdir import read_json

INDEX = ".index.json"
"""Ends the name of an index; the name before it is that of the model's only file."""
_SHARD = re.compile(r"-\d+-of-(\d+)(\.\w+)$")

Tensors = Mapping[str, np.ndarray]


def index_of(path: str) -> str | None:
    """Returns the index that a path names, or to which a shard belongs; ``None`` for other files.

    Raises ModelFormatError for one of several shards without an index beside it.
    """
    if path.endswith(INDEX):
        return path
    match = _SHARD.search(path)
    if match is None:
        return None
    index = path[: match.start()] + match[2] + INDEX
    if os.path.isfile(index):
        return index
    if int(match[1]) == 1 or not os.path.isfile(path):
        return None
    raise ModelFormatError(f"{path}: is one of {int(match[1])} files, and {index} is missing")


def shard_in(folder: str) -> str | None:
    """Returns the path of a shard in a folder, or ``None``."""
    names = sorted(filter(_SHARD.search, os.listdir(folder)))
    return os.path.join(folder, names[0]) if names else None


def read_shards(index: str, read: Callable[[str], Tensors]) -> dict[str, np.ndarray]:
    """Returns the tensors of all shards of an index; ``read`` returns those of one file.

    Raises ModelFormatError or WorkdirError if the index is none, names files in other folders, or
    differs from the tensors in its files.
    """
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelFormatError(f"{index}: has no weight_map, which gives the file of each tensor")
    for file in listed.values():
        if not isinstance(file, str) or not re.fullmatch(r"\w[\w.-]*", file):
            raise ModelFormatError(f"{index}: {file!r} is not the name of a file beside the index")
    folder, files = os.path.dirname(index), sorted(set(listed.values()))
    missing = [file for file in files if not os.path.isfile(os.path.join(folder, file))]
    if missing:
        names, count = ", ".join(missing[:3]), f"{len(missing)} of {len(files)} files are missing"
        raise ModelFormatError(f"{index}: {count} beside it ({names}); get them again")
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        path = os.path.join(folder, file)
        found = read(path)
        for name in (*found, *listed):
            if name in found and listed.get(name) != file:
                where = f"lists it in {listed[name]}" if name in listed else "does not list it"
                raise ModelFormatError(f"{path}: has the tensor {name}, and {index} {where}")
            if name not in found and listed[name] == file:
                raise ModelFormatError(f"{path}: has no tensor {name}, which {index} lists there")
        tensors |= found
    return tensors
