"""Reads tensors and vocabularies of other programs, and never unpickles arbitrary objects.

.safetensors         safetensors
.pt .pth .bin        torch (optional), with ``weights_only``: tensors and plain containers
a TF checkpoint      tensorflow (optional); named by its prefix, ``model.ckpt-0``, or its folder
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.tensors import read_safetensors
from txl_jax.data.vocab import Vocab

TORCH = (".pt", ".pth", ".bin")
NESTED = ("model_state", "state_dict", "model_state_dict", "model")
"""Keys of the tensors in a checkpoint that holds more; the first is NVIDIA's."""
VOCABULARIES = ("vocab.json", "vocab.txt", "vocab.bin")
"""Files of a folder that may hold its vocabulary, in order of preference."""


class Stored(NamedTuple):
    """A model's tensors, and its constructor's arguments, symbols and step if the file has them."""

    tensors: dict[str, np.ndarray]
    args: dict[str, Any] | None = None
    symbols: list[str] | None = None
    step: int = 0


class Attributes:
    """Replaces an object of another program's class and gets its attributes."""


def read(path: str, wanted: Callable[[str], bool] = lambda name: True) -> Stored:
    """Reads a file, whose ending names its format, or a TF checkpoint by its prefix or folder.

    ``wanted``: which variables of a TF checkpoint to read. Raises ModelFormatError if the file does
    not exist, is damaged, has another format or pickled objects, or a package is not installed.
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
            " 'txl_jax[convert-tf]'. Or save the variables of tf.train.load_checkpoint by name with"
            " safetensors.numpy.save_file where it is installed"
        ) from error
    try:
        reader = tensorflow.train.load_checkpoint(path)
        names = sorted(filter(wanted, reader.get_variable_to_shape_map()))
        return {name: np.asarray(reader.get_tensor(name)) for name in names}
    except (ValueError, RuntimeError, tensorflow.errors.OpError) as error:
        raise ModelFormatError(f"{path}: cannot be read as a TF checkpoint ({error})") from error


def load_torch(path: str) -> Any:
    """The content of a torch file; raises ModelFormatError for more than tensors and plain data."""
    try:
        import torch
    except ImportError as error:
        raise ModelFormatError(
            f"{path}: reading it needs torch, pip install 'txl_jax[convert-torch]'. Or call"
            " safetensors.torch.save_file(model.state_dict(), 'model.safetensors') where torch is"
            " installed"
        ) from error
    safe: list[Any] = [argparse.Namespace, (Attributes, "utils.vocabulary.Vocab")]
    try:
        with torch.serialization.safe_globals(safe):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what unpickling met, of many types
        reason = str(error).strip().partition("\n")[0]
        raise ModelFormatError(
            f"{path}: is damaged or holds more than tensors, and unpickling it could run any code"
            f" ({reason}). If you trust the file, save the state of a whole model with the program"
            " that made it: torch.save(torch.load(FILE, weights_only=False).state_dict(),"
            " 'state.pt')"
        ) from error


def stored(loaded: Any, path: str) -> Stored:
    """The model in the content of a torch file: a state, or a checkpoint that contains one."""
    content = loaded if isinstance(loaded, Mapping) else {}
    states = (content[key] for key in NESTED if isinstance(content.get(key), Mapping))
    tensors = next(states, content)
    if not tensors or not all(hasattr(value, "shape") for value in tensors.values()):
        raise ModelFormatError(
            f"{path}: holds no state_dict, neither itself nor under {', '.join(NESTED)}"
        )
    plain = lambda x: x.detach().float() if hasattr(x, "detach") else x  # bfloat16 to float32
    arrays = {
        name.removeprefix("module."): np.asarray(plain(value), np.float32)
        for name, value in tensors.items()
    }
    config, step = content.get("model_config"), content.get("train_step")
    args = dict(config) if isinstance(config, Mapping) else None
    step = step if isinstance(step, int) else 0
    return Stored(arrays, args, symbols_of(content.get("vocab")), step)


def symbols_of(vocab: Any) -> list[str] | None:
    """The symbols of the authors' vocabulary, a mapping or an object with ``idx2sym``."""
    found = vocab if isinstance(vocab, Mapping) else getattr(vocab, "__dict__", {})
    symbols = found.get("idx2sym")
    return list(symbols) if isinstance(symbols, list | tuple) else None


def vocab_from_file(path: str) -> Vocab:
    """The vocabulary in a file.

    A text file has a symbol a line in the order of ids, in the line's first field, as the published
    One Billion Word list. JSON is this project's ``vocab.json``, a list of symbols, or a mapping of
    symbols to ids. A torch file (Hugging Face's ``vocab.bin``) is a mapping with ``idx2sym``.

    Raises ModelFormatError if it cannot be read, DataError if it is no valid vocabulary.
    """
    if not os.path.isfile(path):
        raise ModelFormatError(f"vocabulary {path}: there is no such file")
    if path.endswith((".pkl", ".pickle")):
        raise ModelFormatError(
            f"vocabulary {path}: unpickling a file could run any code. If you trust it, write its"
            " idx2sym to a text file with one symbol per line, and name that file"
        )
    if path.endswith(TORCH):
        symbols = symbols_of(load_torch(path))
        if symbols is None:
            raise ModelFormatError(f"vocabulary {path}: has no idx2sym")
        return Vocab.from_symbols(symbols)
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            content = json.load(file) if path.endswith(".json") else list(file)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"vocabulary {path}: cannot be read ({error})") from error
    if not path.endswith(".json"):
        return Vocab.from_symbols([_symbol(line) for line in content])
    if isinstance(content, dict) and set(content) == {"kind", "symbols"}:
        return Vocab.from_json(content)
    if isinstance(content, dict):
        if sorted(content.values(), key=str) != sorted(range(len(content)), key=str):
            raise ModelFormatError(f"vocabulary {path}: its ids are not 0 to {len(content) - 1}")
        content = sorted(content, key=content.__getitem__)
    if not isinstance(content, list) or not all(isinstance(s, str) for s in content):
        raise ModelFormatError(f"vocabulary {path}: must be a list of symbols, or symbols with ids")
    return Vocab.from_symbols(content)


def vocab_in_folder(folder: str) -> str | None:
    """The path of the vocabulary in a folder, if there is one."""
    paths = [os.path.join(folder, name) for name in VOCABULARIES]
    return next((path for path in paths if os.path.isfile(path)), None)


def _symbol(line: str) -> str:
    text = line.removesuffix("\n").removesuffix("\r")
    return text if len(text) <= 1 else text.split()[0] if text.split() else text
