"""Reads the named arrays of a stored model, checks their shapes and builds a tree of parameters."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from txl_jax.checkpoint.errors import ModelFormatError


class Tensors:
    """Hands out the arrays of a stored state by name, and collects problems for :meth:`finish`."""

    def __init__(self, state: Mapping[str, Any]):
        self._left = dict(state)
        self._problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> Any:
        """Removes and returns an array as float32; zeros if it is missing or its shape differs."""
        if name not in self._left:
            self._problems.append(f"{name} {list(shape)} is missing")
            return np.zeros(shape, np.float32)
        tensor = self._left.pop(name)
        if not isinstance(tensor, jax.Array):  # a traced array cannot be converted
            tensor = np.asarray(tensor)
        if tensor.shape != shape:
            self._problems.append(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
            return np.zeros(shape, np.float32)
        return tensor.astype(np.float32)

    def alias(self, name: str, of: str, tensor: np.ndarray, why: str) -> None:
        """Removes the array ``name``, which can be missing but must not differ from ``tensor``.

        ``tensor`` is the array ``of`` of the same state, and ``why`` says why both must be equal.
        """
        if name in self._left and not np.array_equal(self.take(name, tensor.shape), tensor):
            self._problems.append(f"{name} differs from {of}, and {why}")

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises ModelFormatError for problems, and for arrays left over besides ``ignored``."""
        unknown = [f"{name} is not known" for name in self._left if name not in ignored]
        if problems := self._problems + unknown:
            why = "; ".join(problems)
            raise ModelFormatError(f"the tensors do not fit the configuration: {why}")


def read_safetensors(path: str) -> dict[str, np.ndarray]:
    """Reads the arrays of a safetensors file by name; raises ModelFormatError if this fails."""
    from safetensors import SafetensorError  # not needed to run a model
    from safetensors.numpy import load_file

    if not os.path.isfile(path):
        raise ModelFormatError(f"{path}: there is no such file")
    try:
        return load_file(path)
    except SafetensorError as error:
        fault = f"is not a complete safetensors file ({error})"
        raise ModelFormatError(f"{path}: {fault}; get the file again") from error


def safetensors_header(path: str) -> tuple[list[str], dict[str, str]]:
    """Returns a safetensors file's tensor names and metadata; both are empty if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return list(file.keys()), file.metadata() or {}
    except (OSError, SafetensorError):
        return [], {}


def flat_params(params: Any) -> dict[str, np.ndarray]:
    """Returns parameters by their paths in the tree, in C order as safetensors needs them."""
    flat = flatten_dict(jax.device_get(params), sep="/")
    return {name: np.ascontiguousarray(array) for name, array in sorted(flat.items())}


def parameters_hash(params: Any) -> str:
    """Returns the sha256 of all parameters with their names and shapes, in hexadecimal."""
    digest = hashlib.sha256()
    for name, array in flat_params(params).items():
        digest.update(name.encode() + str(array.shape).encode() + array.tobytes())
    return digest.hexdigest()


def params_from_flat(tensors: Mapping[str, np.ndarray], shapes: Any) -> dict[str, Any]:
    """Builds a tree like ``shapes`` from arrays by path; raises ModelFormatError if they differ."""
    left = Tensors(tensors)
    wanted = flatten_dict(shapes, sep="/").items()
    params = {name: left.take(name, leaf.shape) for name, leaf in wanted}
    left.finish()
    return unflatten_dict(params, sep="/")
