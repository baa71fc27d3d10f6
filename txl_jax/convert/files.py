"""Reads tensors and vocabularies of other programs without unpickling arbitrary objects.

.safetensors         read with safetensors
.pt .pth .bin        read with torch (optional) and ``weights_only``: tensors, plain containers
*.index.json         lists several files of one model, each in one of these formats; the index of
                     a variant, such as fp16, is *.index.fp16.json
a TF checkpoint      read with tensorflow (optional); given as a prefix, ``model.ckpt-0``, or folder
"""

import argparse
import io
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.tensors import read_safetensors, safetensors_names
from txl_jax.convert.shards import index_of, listed_files, read_shards
from txl_jax.data.vocab import Vocab
from txl_jax.files import decode_text
from txl_jax.library_errors import import_optional

TORCH = (".pt", ".pth", ".bin")
ENDINGS = (".safetensors", *TORCH)
"""The suffixes of files with tensors."""
NESTED = ("model_state", "state_dict", "model_state_dict", "model")
"""The keys under which a checkpoint may hold its tensors. NVIDIA's code uses the first one."""
VOCABULARIES = ("vocab.json", "vocab.txt", "vocab.bin")
"""The names of vocabulary files in a folder, in the order of preference."""

OWN_KEYS = {"kind", "symbols", "tokenizer"}
"""The keys of this project's ``vocab.json``; only some kinds have the last one."""


class Stored(NamedTuple):
    """A model's tensors, and its constructor arguments, symbols and step if the file has them."""

    tensors: dict[str, np.ndarray]
    args: dict[str, Any] | None = None
    symbols: list[str] | None = None
    step: int = 0


class Attributes:
    """Stands for an object of another program's class, with the object's attributes."""


def read(path: str, wanted: Callable[[str], bool] = lambda name: True) -> Stored:
    """Reads a file in the format of its suffix, or a TF checkpoint given as a prefix or folder.

    For an index of Hugging Face, or one of its shards, all shards are read.
    ``wanted`` selects the variables of a TF checkpoint. Raises ModelFormatError if the file is
    missing or damaged, has another format or pickled objects, or needs a package that is missing.
    """
    if is_tensorflow(path):
        return Stored(_read_tensorflow(path, wanted))
    if index := index_of(path):
        return Stored(read_shards(index, lambda shard: _read_file(shard).tensors))
    return _read_file(path)


def tensor_names(path: str) -> list[str] | None:
    """Returns the names of a file's or an index's tensors; ``None`` if it must be loaded first.

    Raises ModelFormatError or WorkdirError for an index that cannot be used.
    """
    if index := index_of(path):
        return list(listed_files(index))
    return safetensors_names(path) if path.endswith(".safetensors") else None


def _read_file(path: str) -> Stored:
    if path.endswith(".safetensors"):
        return Stored(read_safetensors(path))
    if not os.path.isfile(path):
        raise ModelFormatError(f"{path}: there is no such file")
    if path.endswith(TORCH):
        return stored(load_torch(path), path)
    raise ModelFormatError(
        f"{path}: must end in one of {', '.join(ENDINGS)}, or be a TF checkpoint's prefix"
    )


def is_tensorflow(path: str) -> bool:
    """Tells whether a path is the prefix of a TF checkpoint, or a folder with a TF checkpoint."""
    return os.path.isfile(path + ".index") or os.path.isfile(os.path.join(path, "checkpoint"))


def _read_tensorflow(path: str, wanted: Callable[[str], bool]) -> dict[str, np.ndarray]:
    missing = ModelFormatError(
        f"{path}: reading a TF checkpoint needs tensorflow; run pip install"
        " 'txl_jax[convert-tf]'. Or, where tensorflow is installed, save the variables of"
        " tf.train.load_checkpoint by name with safetensors.numpy.save_file"
    )
    tensorflow = import_optional("tensorflow", missing)
    try:
        reader = tensorflow.train.load_checkpoint(path)
        names = sorted(filter(wanted, reader.get_variable_to_shape_map()))
        return {name: np.asarray(reader.get_tensor(name)) for name in names}
    except (ValueError, RuntimeError, tensorflow.errors.OpError) as error:
        raise ModelFormatError(f"{path}: cannot be read as a TF checkpoint ({error})") from error


def load_torch(path: str) -> Any:
    """Loads the tensors and plain data of a torch file, and runs no code of it.

    Raises ModelFormatError if the file cannot be read, is damaged or holds anything else.
    """
    missing = ModelFormatError(
        f"{path}: reading this file needs torch; run pip install 'txl_jax[convert-torch]'. Or,"
        " where torch is installed, call safetensors.torch.save_file(model.state_dict(),"
        " 'model.safetensors')"
    )
    torch = import_optional("torch", missing)
    safe: list[Any] = [argparse.Namespace, (Attributes, "utils.vocabulary.Vocab")]
    try:
        with torch.serialization.safe_globals(safe):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read ({error})") from error
    except Exception as error:  # errors of unpickling have many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelFormatError(
            f"{path}: is damaged or has more than tensors, and unpickling it could run any code"
            f" ({reason}). Save the model's tensors in the program that wrote the file:"
            " torch.save(model.state_dict(), 'state.pt'). docs/converting.md has the details"
        ) from error


def stored(loaded: Any, path: str) -> Stored:
    """Extracts the model from a loaded torch file: a state_dict, or a checkpoint with one."""
    content = loaded if isinstance(loaded, Mapping) else {}
    states = (content[key] for key in NESTED if isinstance(content.get(key), Mapping))
    tensors = next(states, content)
    if not tensors or not all(hasattr(value, "shape") for value in tensors.values()):
        raise ModelFormatError(
            f"{path}: is not a state_dict, and has none under the keys {', '.join(NESTED)}"
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
    """Returns ``idx2sym`` of the authors' vocabulary, a mapping or an object, or ``None``."""
    found = vocab if isinstance(vocab, Mapping) else getattr(vocab, "__dict__", {})
    symbols = found.get("idx2sym")
    return list(symbols) if isinstance(symbols, list | tuple) else None


def vocab_from_file(path: str) -> Vocab:
    """Reads the vocabulary in a file, or raises ModelFormatError or DataError.

    A text file has one symbol per line in the order of ids: the first field of the line, as in the
    published One Billion Word list. A JSON file is this project's ``vocab.json``, a
    ``tokenizer.json`` of Hugging Face tokenizers, a list of symbols, or a mapping of symbols to
    ids. A torch file, such as Hugging Face's ``vocab.bin``, is
    a mapping with ``idx2sym``.
    """
    if not os.path.isfile(path):
        raise ModelFormatError(f"vocabulary {path}: there is no such file")
    if path.endswith((".pkl", ".pickle")):
        raise ModelFormatError(
            f"vocabulary {path}: unpickling a file could run any code. If you trust the file,"
            " write its idx2sym to a text file with one symbol per line, and name that file"
        )
    if path.endswith(TORCH):
        symbols = symbols_of(load_torch(path))
        if symbols is None:
            raise ModelFormatError(f"vocabulary {path}: has no idx2sym, the list of symbols")
        return Vocab.from_symbols(symbols)
    try:
        with open(path, "rb") as file:
            text = decode_text(file.read())
        content = json.loads(text) if path.endswith(".json") else list(io.StringIO(text))
    except ValueError as error:
        raise ModelFormatError(f"vocabulary {path}: cannot be read ({error})") from error
    if not path.endswith(".json"):
        return Vocab.from_symbols([_symbol(line) for line in content])
    if isinstance(content, dict) and {"kind", "symbols"} <= set(content) <= OWN_KEYS:
        return Vocab.from_json(content)
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        return Vocab.from_tokenizer(path)
    if isinstance(content, dict):
        if sorted(content.values(), key=str) != sorted(range(len(content)), key=str):
            rule = f"the ids must be 0 to {len(content) - 1}, each once"
            raise ModelFormatError(f"vocabulary {path}: {rule}")
        content = sorted(content, key=content.__getitem__)
    if not isinstance(content, list) or not all(isinstance(s, str) for s in content):
        rule = "must be a list of symbols, or a map from symbols to ids"
        raise ModelFormatError(f"vocabulary {path}: {rule}")
    return Vocab.from_symbols(content)


def vocab_in_folder(folder: str) -> str | None:
    """Returns the path of the vocabulary file in a folder, or ``None``."""
    paths = [os.path.join(folder, name) for name in VOCABULARIES]
    return next((path for path in paths if os.path.isfile(path)), None)


def _symbol(line: str) -> str:
    text = line.removesuffix("\n").removesuffix("\r")
    return text if len(text) <= 1 else text.split()[0] if text.split() else text
