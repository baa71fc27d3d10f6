"""Expands home folders in paths, and finds the folder of corpora and compiled programs."""

import dataclasses
import os
from pathlib import Path
from typing import Any, TypeVar

from txl_jax.config.errors import ConfigError
from txl_jax.messages import short_repr

E = TypeVar("E")


def expanded(path: str, where: str) -> Path:
    """Returns the path with ``~`` or ``~user`` replaced by a home folder.

    Raises:
      ConfigError: the user or the home folder does not exist; ``where`` names the flag or key.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        home = Path(path).parts[0]
        raise ConfigError(
            f"{where} = {short_repr(path)}: there is no home folder {short_repr(home)}; write the"
            " whole path"
        ) from error


def expand_paths(exp: E) -> E:
    """Returns an experiment with ``~`` replaced by home folders in every ``local_path``.

    The paths of ``data`` are not changed here, because the label of the corpus shows them as given.

    Raises:
      ConfigError: the home folder of a path does not exist; the message names the key.
    """
    changed = {}
    for section in dataclasses.fields(exp):  # type: ignore[arg-type]
        inner = getattr(exp, section.name)
        if section.name == "data" or not dataclasses.is_dataclass(inner):
            continue
        for field in dataclasses.fields(inner):
            value, key = getattr(inner, field.name), f"config key {section.name}.{field.name}"
            if field.metadata.get("path") and (new := _expanded_setting(value, key)) != value:
                inner = dataclasses.replace(inner, **{field.name: new})  # type: ignore[type-var]
                changed[section.name] = inner
    return dataclasses.replace(exp, **changed) if changed else exp  # type: ignore[type-var]


def _expanded_setting(value: Any, key: str) -> Any:
    """Expands home folders in a path or in a list of paths or ``name=path``."""
    if isinstance(value, tuple):
        parts = [text.rpartition("=") for text in value]
        return tuple(name + sign + _expanded_setting(path, key) for name, sign, path in parts)
    return str(expanded(value, key)) if value and value.startswith("~") else value


def data_folder(cache_dir: str | None = None) -> Path:
    """Returns the absolute path of the folder of prepared corpora and compiled programs.

    This is ``data.cache_dir``, or if not set ``$TXL_DATA_DIR``, or if not set ``~/.cache/txl_jax``.

    Raises:
      ConfigError: the path is in the home folder of a user that does not exist.
    """
    if cache_dir:
        return expanded(cache_dir, "config key data.cache_dir").absolute()
    named = os.environ.get("TXL_DATA_DIR") or "~/.cache/txl_jax"
    return expanded(named, "environment variable TXL_DATA_DIR").absolute()
