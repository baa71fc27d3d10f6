"""Reads the vocabulary of another program's model: from text, JSON or a torch file."""

import json
import os
from typing import Any

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.convert.files import TORCH, load_torch, symbols_of
from txl_jax.data.vocab import Vocab

HUGGINGFACE = ("vocab.json", "vocab.txt", "vocab.bin")
"""Files of a folder that may hold its vocabulary, in order of preference."""


def vocab_from_file(path: str) -> Vocab:
    """The vocabulary in a file.

    A text file has one symbol on each line, in id order; only the first field of a line counts, as
    in the published One Billion Word list. JSON is this project's ``vocab.json``, a list of
    symbols, or a mapping of symbols to ids. A torch file (Hugging Face's ``vocab.bin``) is a
    mapping with ``idx2sym``.

    Raises:
      ModelFormatError: it cannot be read in the format that its ending names.
      DataError: it is not a valid vocabulary, such as one with a symbol twice.
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
    if path.endswith(".json"):
        return _from_json(content, path)
    return Vocab.from_symbols([_symbol(line) for line in content])


def vocab_in_folder(folder: str) -> str | None:
    """The path of the vocabulary in a folder, if there is one."""
    paths = [os.path.join(folder, name) for name in HUGGINGFACE]
    return next((path for path in paths if os.path.isfile(path)), None)


def _symbol(line: str) -> str:
    text = line.removesuffix("\n").removesuffix("\r")
    return text if len(text) <= 1 else text.split()[0] if text.split() else text


def _from_json(content: Any, path: str) -> Vocab:
    if isinstance(content, dict) and set(content) == {"kind", "symbols"}:
        return Vocab.from_json(content)
    if isinstance(content, dict):
        if sorted(content.values(), key=str) != sorted(range(len(content)), key=str):
            raise ModelFormatError(f"vocabulary {path}: its ids are not 0 to {len(content) - 1}")
        content = sorted(content, key=content.__getitem__)
    if not isinstance(content, list) or not all(isinstance(s, str) for s in content):
        raise ModelFormatError(f"vocabulary {path}: must be a list of symbols, or symbols with ids")
    return Vocab.from_symbols(content)
