"""Tensors out of files of other programs. Nothing is ever unpickled freely.

.safetensors         safetensors, always there
.pt .pth .bin        torch (optional), with ``weights_only``: tensors and plain containers
a TF checkpoint      tensorflow (optional); named by its prefix, ``model.ckpt-0``, or its folder
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.tensors import read_safetensors

TORCH = (".pt", ".pth", ".bin")

NESTED = ("model_state", "state_dict", "model_state_dict", "model")
"""Where a checkpoint that holds more keeps its tensors; the first is NVIDIA's."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a file has of a model.

    Attributes:
      tensors: by the other program's names.
      args: of the model's constructor; ``None`` where they are not in the file.
      symbols: of the vocabulary, in id order; ``None`` likewise.
      step: of the training that it came from; 0 where it is not said.
    """

    tensors: dict[str, np.ndarray]
    args: dict[str, Any] | None = None
    symbols: list[str] | None = None
    step: int = 0


class Attributes:
    """Stands in for an object of another program's class; what it knew are its attributes."""


def read(path: str, wanted: Callable[[str], bool] = lambda name: True) -> Stored:
    """What is in a file, told by its ending.

    Args:
      path: of a file, or the prefix (or folder) of a TF checkpoint.
      wanted: which variables of a TF checkpoint to read; their number is twice the model's with
        the optimizer's.

    Raises:
      ModelFormatError: no file, a damaged one, one that would have to be unpickled, or a package
        that is not installed.
    """
    if is_tensorflow(path):
        return Stored(_read_tensorflow(path, wanted))
    if path.endswith(".safetensors"):
        return Stored(read_safetensors(path))
    if not os.path.isfile(path):
        raise ModelFormatError(f"{path}: there is no such file")
    if path.endswith(TORCH):
        return stored(load_torch(path), path)
    endings = ", ".join((".safetensors", *TORCH))
    raise ModelFormatError(f"{path}: must end in one of {endings}, or be a TF checkpoint's prefix")


def is_tensorflow(path: str) -> bool:
    """Whether this is the prefix of a TF checkpoint, or a folder with one."""
    return os.path.isfile(path + ".index") or os.path.isfile(os.path.join(path, "checkpoint"))


def _read_tensorflow(path: str, wanted: Callable[[str], bool]) -> dict[str, np.ndarray]:
    try:
        import tensorflow
    except ImportError as error:
        raise ModelFormatError(
            f"{path}: reading a TF checkpoint needs tensorflow, pip install"
            " 'txl_jax[convert-tf]'. Or where it is installed, save the variables, name by name"
            " from tf.train.load_checkpoint, with safetensors.numpy.save_file"
        ) from error
    try:
        reader = tensorflow.train.load_checkpoint(path)
        names = sorted(filter(wanted, reader.get_variable_to_shape_map()))
        return {name: np.asarray(reader.get_tensor(name)) for name in names}
    except (ValueError, RuntimeError, tensorflow.errors.OpError) as error:
        raise ModelFormatError(f"{path}: cannot be read as a TF checkpoint ({error})") from error


def load_torch(path: str) -> Any:
    """What ``torch.load`` gives with ``weights_only``; objects of NVIDIA's ``Vocab`` come as
    :class:`Attributes`.

    Raises:
      ModelFormatError: torch is missing, or the file holds more than that.
    """
    try:
        import torch
    except ImportError as error:
        raise ModelFormatError(
            f"{path}: reading it needs torch, pip install 'txl_jax[convert-torch]'. Or where torch"
            " is installed, safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
        ) from error
    safe: list[Any] = [argparse.Namespace, (Attributes, "utils.vocabulary.Vocab")]
    try:
        with torch.serialization.safe_globals(safe):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what unpickling met, of many types
        reason = str(error).strip().partition("\n")[0]
        raise ModelFormatError(
            f"{path}: is not read, for it is damaged or holds more than tensors, and running what"
            f" is pickled in it could do anything ({reason}). A whole model that torch.save wrote"
            " has to be opened by the program that made it, where you trust the file:"
            " torch.save(torch.load(FILE, weights_only=False).state_dict(), 'state.pt')"
        ) from error


def stored(loaded: Any, path: str) -> Stored:
    """What a model needs of an unpacked torch file: a state, or a checkpoint with one in it."""
    nested = next((k for k in NESTED if isinstance(_entry(loaded, k), Mapping)), None)
    state = loaded if nested is None else loaded[nested]
    tensors = state if isinstance(state, Mapping) else {}
    if not tensors or not all(hasattr(value, "shape") for value in tensors.values()):
        raise ModelFormatError(
            f"{path}: holds no state_dict, neither by itself nor as {', '.join(NESTED)}"
        )
    arrays = {name.removeprefix("module."): _array(value) for name, value in tensors.items()}
    config, step = _entry(loaded, "model_config"), _entry(loaded, "train_step")
    return Stored(
        arrays,
        dict(config) if isinstance(config, Mapping) else None,
        symbols_of(_entry(loaded, "vocab")),
        step if isinstance(step, int) else 0,
    )


def symbols_of(vocab: Any) -> list[str] | None:
    """The symbols of a vocabulary of the authors' making: a mapping or object with ``idx2sym``."""
    found = vocab if isinstance(vocab, Mapping) else getattr(vocab, "__dict__", {})
    symbols = found.get("idx2sym")
    return list(symbols) if isinstance(symbols, list | tuple) else None


def _entry(loaded: Any, key: str) -> Any:
    return loaded.get(key) if isinstance(loaded, Mapping) else None


def _array(tensor: Any) -> np.ndarray:
    """A torch tensor of any float type, or an array, as float32."""
    tensor = tensor.detach().float() if hasattr(tensor, "detach") else tensor
    return np.asarray(tensor, np.float32)
