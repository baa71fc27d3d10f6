"""Loads an experiment from a config file: a Python file with ``get_config()``."""

import contextlib
import copy
import importlib.util
import inspect
import itertools
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from txl_jax.config.changes import set_all
from txl_jax.config.errors import ConfigError
from txl_jax.config.experiment import ExperimentConfig
from txl_jax.config.folders import expanded_text
from txl_jax.messages import argument, nearest_or_all, one_line, short_repr, truncate

_PACKAGE, _INIT = "txl_config_file", "__init__.py"
"""The name under which every config file and its package are imported."""
_RECIPES = [Path(__file__).parents[2] / name for name in ("txl_jax_configs", "configs")]
"""The folders of the recipes in an installed package and in a checkout."""


def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig | Any,
    overrides: Mapping[str, Any] | None = None,
) -> ExperimentConfig:
    """Returns the checked, frozen experiment that a recipe, a file or a dict describes.

    Args:
      config: the name of a recipe of this package, such as ``enwik8_24l``, or a Python file with
        ``get_config()`` that returns a ``ConfigDict``. The argument for ``get_config(variant)``
        may follow after a colon, as in ``enwik8_24l:smoke``. If a file has a list ``VARIANTS``,
        only these arguments are accepted. A file in a package (a folder with ``__init__.py``) can
        import its neighbours: ``from .x import y``. Instead, ``config`` may be a nested dict or
        ``ConfigDict`` of the settings that differ from the defaults, or an experiment.
      overrides: a dict from dotted keys to values, such as ``{"train.steps": 10}``. A string is
        converted to the type of the setting: ``8,16`` is a list, and a list of texts with commas
        may be a JSON list. If keys exclude each other (data.path and data.url), a key given here
        removes the other key that the file sets.

    Example:
      >>> import txl_jax
      >>> exp = txl_jax.load_config("enwik8_24l", {"train.batch_size": 16})
      >>> exp.model.n_layer, exp.model.d_model, exp.train.batch_size
      (24, 1024, 16)

    Raises:
      ConfigError: the file does not exist or is no config, or a setting cannot be used. The error
        comes before any device is used or any file is written.
    """
    if isinstance(config, str | bytes | os.PathLike):
        nested = _read(expanded_text(config, "config"))
    elif hasattr(config, "to_dict"):
        nested = config.to_dict()
    elif isinstance(config, Mapping):
        nested = dict(copy.deepcopy(config))  # a copy, because overrides change it
    else:
        kinds = "the name of a recipe, a file, a dict, a ConfigDict or an ExperimentConfig"
        raise ConfigError(f"{argument('config', short_repr(config))}: must be {kinds}")
    if not isinstance(overrides, Mapping | None):
        what = "must be a dict from dotted keys to values, such as {'train.steps': 10}"
        raise ConfigError(f"{argument('overrides', short_repr(overrides))}: {what}")
    set_all(nested, overrides or {})
    return ExperimentConfig.from_dict(nested)


def _read(path: str) -> dict[str, Any]:
    """Returns the settings of a config file or a recipe as a nested dict."""
    import ml_collections  # here, because models run without this package

    variant, where = path.partition(":")[2], argument("config", truncate(path))
    with _config_module(path) as module:
        any_text = inspect.signature(module.get_config).parameters and [variant]
        if variant and variant not in (known := getattr(module, "VARIANTS", any_text)):
            listed = f"variants: {', '.join(known)}" if known else "the file has no variants"
            raise ConfigError(f"{where}: there is no variant {short_repr(variant)}; {listed}")
        config = module.get_config(variant) if variant else module.get_config()
        if not isinstance(config, ml_collections.ConfigDict):
            raise ConfigError(f"{where}: get_config() must return an ml_collections.ConfigDict")
    return config.to_dict()


def config_rows(path: str) -> tuple[str, ...]:
    """Returns the names of a file's experiments (``ROWS``), or () if it has only one experiment."""
    with _config_module(path) as module:
        return tuple(getattr(module, "ROWS", ()))


@contextlib.contextmanager
def _config_module(path: str) -> Iterator[Any]:
    """Imports a config file; an error in the ``with`` block becomes a ConfigError of the file."""
    file, where = path.partition(":")[0], argument("config", truncate(path))
    if re.fullmatch(r"\w+", file) and not os.path.exists(file):
        if file not in (recipes := _recipe_files()):
            known = nearest_or_all(file, sorted(recipes))
            raise ConfigError(f"{where}: there is no such file or recipe; {known}")
        file = recipes[file]
    name, full = short_repr(file), os.path.abspath(file)
    if not os.path.isfile(file):
        stem = Path(file).stem
        fix = f"; for the recipe give {argument('config', stem)}" if stem in _recipe_files() else ""
        raise ConfigError(f"{where}: there is no file {name}{fix}")
    if not file.endswith(".py"):
        raise ConfigError(f"{where}: {name} is not a Python file (*.py)")
    try:
        with _fresh_imports():
            module = _import_file(Path(full))
            if not callable(getattr(module, "get_config", None)):
                raise ConfigError(f"{where}: {name} has no function get_config()")
            yield module
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == full]
        line = f" (line {lines[-1]})" if lines else ""
        what = f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")
        raise ConfigError(f"{where}: {name} cannot be run: {what}{line}") from error


def recipe_names() -> list[str]:
    """Returns the names of the recipes of this package, in order."""
    return sorted(_recipe_files())


def _recipe_files() -> dict[str, str]:
    folder = next(filter(Path.is_dir, _RECIPES))
    return {file.stem: str(file) for file in folder.glob("[!_]*.py")}


@contextlib.contextmanager
def _fresh_imports() -> Iterator[None]:
    """A context in which imports write no ``__pycache__``; its end removes config modules."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]


def _import_file(file: Path) -> Any:
    """Imports a file; if its folder is a package, imports it as a module of this package."""
    packages = list(itertools.takewhile(lambda folder: (folder / _INIT).is_file(), file.parents))
    name = _PACKAGE
    if packages:
        _load(name, packages[-1] / _INIT)
        package = ".".join([_PACKAGE, *file.parent.relative_to(packages[-1]).parts])
        importlib.import_module(package)
        name = f"{package}.{file.stem.replace('.', '_')}"
    return _load(name, file)


def _load(name: str, file: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
