"""Reads tensors and vocabularies of other programs without unpickling arbitrary objects.

.safetensors         read with safetensors
.pt .pth .bin        read with torch (optional) and ``weights_only``: tensors, plain containers
*.index.json         {"weight_map": {tensor: file}}: lists the shards of a model, which are files as
                     above; the index of a variant, such as fp16, is *.index.fp16.json
a TF checkpoint      read with tensorflow (optional); given as a prefix, ``model.ckpt-0``, or folder
a folder             has one of these; a model with a name of Hugging Face's library is preferred
"""

import argparse
import contextlib
import io
import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.tensors import read_safetensors
from txl_jax.checkpoint.workdir import read_json
from txl_jax.convert.tensorflow import is_parameter
from txl_jax.data.vocab import Vocab
from txl_jax.files import decode_text
from txl_jax.library_errors import import_optional
from txl_jax.messages import UserError

TORCH = (".pt", ".pth", ".bin")
ENDINGS = (".safetensors", *TORCH)
"""The suffixes of files with tensors."""
NESTED = ("model_state", "state_dict", "model_state_dict", "model")
"""The keys under which a checkpoint can hold its tensors. NVIDIA's code uses the first one."""
VOCABULARIES = ("vocab.json", "vocab.txt", "vocab.bin")
"""The names of vocabulary files in a folder, in the order of preference."""
HUGGINGFACE = ("model.safetensors", "pytorch_model.bin")
"""The names under which Hugging Face's library saves a model, the preferred one first."""
_VARIANT = re.compile(r"(model\b.*\.safetensors|pytorch_model\b.*\.bin)(\.index.*\.json)?")
"""The names that Hugging Face's library gives to files of models, to their shards and indices."""
_INDEX = re.compile(r".+\.\w+\.index(\.[\w-]+)?\.json")
_SHARD = re.compile(r".+-\d+-of-0*(\d+)\..+", re.ASCII)


class Stored(NamedTuple):
    """A model's tensors, and its constructor arguments, symbols and step if the file has them."""

    tensors: dict[str, np.ndarray]
    args: dict[str, Any] | None = None
    symbols: list[str] | None = None
    step: int = 0


class Attributes:
    """Replaces an object whose class is in another program, and has the object's attributes."""


def read(path: str) -> Stored:
    """Reads a model from a file in the format of its suffix, a TF checkpoint, or a folder.

    For an index or one of its shards, all shards are read. Raises ModelFormatError if the file is
    missing or damaged, has another format or pickled objects, or needs a package that is missing.
    """
    if os.path.isfile(path + ".index") or os.path.isfile(os.path.join(path, "checkpoint")):
        return Stored(_read_tensorflow(path))
    if not os.path.exists(path):
        raise ModelFormatError(f"{path}: there is no such file, folder or TF checkpoint")
    path = model_in(path) if os.path.isdir(path) else path
    index = index_of(path)
    return Stored(read_shards(index)) if index else _read_file(path)


def model_in(folder: str) -> str:
    """Returns the path of the model's only file, of its index, or of a shard without an index.

    Raises ModelFormatError if there is no such file, or if it is unclear which of several models to
    read.
    """
    names = sorted(os.listdir(folder))
    for name in HUGGINGFACE:
        for file in (name, f"{name}.index.json"):
            if file in names:
                return os.path.join(folder, file)
    indices, ignored = list(filter(_INDEX.fullmatch, names)), set(VOCABULARIES)
    for index in indices:
        ignored.update(listed_files(os.path.join(folder, index)).values())
    files = [name for name in names if name.endswith(ENDINGS) and name not in ignored]
    shards = list(filter(_SHARD.fullmatch, files))
    found = [*indices, *(name for name in files if name not in shards), *shards[:1]]
    found = list(filter(_VARIANT.fullmatch, found)) or found
    if not found:
        wanted = f"{' or '.join(HUGGINGFACE)}, whole or in shards with an index"
        raise ModelFormatError(f"{folder}: has no file with tensors ({wanted})")
    if len(found) > 1:
        some = ", ".join(found[:5])
        fix = "name the file of one instead of the folder"
        raise ModelFormatError(f"{folder}: has {len(found)} models ({some}); {fix}")
    return os.path.join(folder, found[0])


def index_of(path: str) -> str | None:
    """Returns the path if it is an index, otherwise the index that lists this file, or ``None``.

    Raises ModelFormatError for one of several shards if no index beside it lists the file.
    """
    folder, name = os.path.split(path)
    if _INDEX.fullmatch(name):
        return path
    for index in filter(_INDEX.fullmatch, sorted(os.listdir(folder or "."))):
        with contextlib.suppress(UserError):  # a file that is not a valid index
            if name in listed_files(os.path.join(folder, index)).values():
                return os.path.join(folder, index)
    if (match := _SHARD.fullmatch(name)) and int(match[1]) > 1:
        missing = "no index (*.index.json) beside it lists it; get the model's index too"
        raise ModelFormatError(f"{path}: is one of {match[1]} files, and {missing}")
    return None


def listed_files(index: str) -> dict[str, str]:
    """Returns the file of each tensor in an index; raises ModelFormatError or WorkdirError."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelFormatError(f"{index}: has no weight_map, which gives the file of each tensor")
    for file in listed.values():
        if not isinstance(file, str) or os.path.basename(file) != file:
            raise ModelFormatError(f"{index}: {file!r} is not the name of a file beside the index")
    return listed


def read_shards(index: str) -> dict[str, np.ndarray]:
    """Returns the tensors of all shards of an index.

    Raises ModelFormatError or WorkdirError if the index is invalid, or its files do not have
    exactly the tensors that it lists.
    """
    listed, tensors = listed_files(index), dict[str, np.ndarray]()
    paths = {name: os.path.join(os.path.dirname(index), name) for name in listed.values()}
    if missing := [name for name, path in sorted(paths.items()) if not os.path.isfile(path)]:
        some = ", ".join(missing[:3])
        raise ModelFormatError(f"{index}: listed files are missing beside it ({some}); get them")
    for name, path in paths.items():
        found = _read_file(path).tensors
        if wrong := found.keys() ^ {tensor for tensor, file in listed.items() if file == name}:
            raise ModelFormatError(
                f"{path}: has other tensors than {index} lists for it ({min(wrong)}); get the index"
                " and the files of one version again"
            )
        tensors |= found
    return tensors


def _read_file(path: str) -> Stored:
    if path.endswith(".safetensors"):
        return Stored(read_safetensors(path))
    if path.endswith(TORCH):
        return stored(load_torch(path), path)
    raise ModelFormatError(
        f"{path}: must end in one of {', '.join(ENDINGS)}, or be a TF checkpoint's prefix"
    )


def _read_tensorflow(path: str) -> dict[str, np.ndarray]:
    missing = ModelFormatError(
        f"{path}: reading a TF checkpoint needs tensorflow; run pip install"
        " 'txl_jax[convert-tf]'. Or, where tensorflow is installed, save the variables of"
        " tf.train.load_checkpoint by name with safetensors.numpy.save_file"
    )
    tensorflow = import_optional("tensorflow", missing)
    try:
        reader = tensorflow.train.load_checkpoint(path)
        names = sorted(filter(is_parameter, reader.get_variable_to_shape_map()))
        return {name: np.asarray(reader.get_tensor(name)) for name in names}
    except (ValueError, RuntimeError, tensorflow.errors.OpError) as error:
        raise ModelFormatError(f"{path}: cannot be read as a TF checkpoint ({error})") from error


def load_torch(path: str) -> Any:
    """Loads the tensors and plain data of a torch file, without running code in the file.

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
    nested = map(content.get, NESTED)
    tensors = next((state for state in nested if isinstance(state, Mapping)), content)
    if not tensors or not all(hasattr(value, "shape") for value in tensors.values()):
        keys = ", ".join(NESTED)
        raise ModelFormatError(f"{path}: is not a state_dict, and has none under the keys {keys}")
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
    """Returns ``idx2sym`` of the authors' vocabulary (a mapping or an object), or ``None``."""
    found = vocab if isinstance(vocab, Mapping) else getattr(vocab, "__dict__", {})
    symbols = found.get("idx2sym")
    return list(symbols) if isinstance(symbols, list | tuple) else None


def vocab_from_file(path: str) -> Vocab:
    """Reads the vocabulary in a file, or raises ModelFormatError or DataError.

    A text file has one symbol per line in the order of ids: the first field of the line, as in the
    published One Billion Word list. A JSON file is this project's ``vocab.json``, a
    ``tokenizer.json`` of Hugging Face tokenizers, a list of symbols, or a mapping of symbols to
    ids. A torch file, such as Hugging Face's ``vocab.bin``, is a mapping with ``idx2sym``.
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
        return Vocab.from_symbols(map(_symbol, content))
    if isinstance(content, dict) and isinstance(content.get("symbols"), list):
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
    return next(filter(os.path.isfile, paths), None)


def _symbol(line: str) -> str:
    text = line.removesuffix("\n").removesuffix("\r")
    return text if len(text) == 1 or not text.strip() else text.split()[0]
