"""From a config file, overrides or JSON to a checked experiment, and back to what differs."""

import dataclasses
import difflib
import inspect
import os
import re
import runpy
import tokenize
import traceback
import typing
from collections.abc import Callable, Mapping
from typing import Any

from txl_jax.config.checks import check_combinations
from txl_jax.config.fields import ConfigError, check_fields, refusal, typed
from txl_jax.config.model import TransformerXLConfig
from txl_jax.config.settings import ExperimentConfig
from txl_jax.messages import one_line, short_repr, truncate

ANALYSES = ("context", "recl", "attention", "ablation", "speed", "score", "probe", "report")
"""Sections of what a trained model is asked."""

FREE_TO_CHANGE = (
    "name",
    "model.scan_layers",
    "model.remat",
    "model.kernel",
    "data.path",
    "data.cache_dir",
    "train.log_every",
    "train.eval_every",
    "train.non_finite",
    "train.max_skipped",
    "average.use",
    "validate",
    "evaluate",
    "generate",
    "checkpoint",
    "mesh",
    *ANALYSES,
)
"""Keys (or whole sections) that a resumed run may change: they do not touch the trained state.
(The corpus's hash, not its path, is what must stay the same.)"""


ALTERNATIVES = (
    ("generate.prompt", "generate.prompt_file", "generate.prompts_file"),
    ("data.path", "data.url"),
)
"""Groups of keys of which one is given: an override of one replaces a stored value of another."""


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Dotted keys that decide the trained state and differ, each as ``key: old -> new``.

    A key that is missing has its default: settings that came later do not part old runs from
    new ones.
    """
    defaults = flatten(ExperimentConfig().to_dict())
    fa, fb = ({**defaults, **flatten(nested)} for nested in (a, b))
    keys = [k for k in sorted(fa.keys() | fb.keys()) if not _is_free(k)]
    return [
        f"{k}: {short_repr(fa.get(k, 'absent'))} -> {short_repr(fb.get(k, 'absent'))}"
        for k in keys
        if fa.get(k, "absent") != fb.get(k, "absent")
    ]


def load_config(path: str, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """The checked, frozen experiment that a config file describes.

    Args:
      path: a Python file with ``get_config()`` that returns a ``ConfigDict``; after a colon
        the argument for ``get_config(variant)``, e.g. ``configs/enwik8_24l.py:smoke``.
      overrides: dotted keys to values, e.g. ``{"train.steps": 10}``. A string is read as the
        key's type, so that command-line text works. A list is written with commas: ``8,16``. A
        list of texts may also be a JSON list or a Python tuple, where a text has a comma; white
        space, brackets and quotes outside of these belong to the texts. Of keys that
        exclude each other (:data:`ALTERNATIVES`) one that is given here replaces the file's.

    Example:
      >>> import txl_jax
      >>> exp = txl_jax.load_config("configs/enwik8_24l.py", {"train.batch_size": 16})
      >>> exp.model.n_layer, exp.model.d_model, exp.train.batch_size
      (24, 1024, 16)

    Raises:
      ConfigError: the file is not there or not a config, or a setting cannot be used. Nothing
        has touched a device or written a file by then.
    """
    nested = _config_file(path)
    _set_all(nested, overrides or {})
    return ExperimentConfig.from_dict(nested)


def override(exp: ExperimentConfig, overrides: Mapping[str, Any]) -> ExperimentConfig:
    """The experiment with some settings changed, checked again; keys as in :func:`load_config`."""
    nested = exp.to_dict()
    _set_all(nested, overrides)
    return ExperimentConfig.from_dict(nested)


def of_record(record: Mapping[str, Any]) -> ExperimentConfig:
    """The experiment of a ``config.json``, which has more beside the settings.

    Settings of analyses that this version does not have are passed over: they decide nothing that
    was trained, and a run must not be lost for them. An empty ``data.path`` or other optional text,
    which earlier versions accepted, is read as none.

    Raises:
      ConfigError: as :meth:`ExperimentConfig.from_dict`.
    """
    settings = {k: v for k, v in record.items() if k not in ("corpus", "provenance")}
    plain = ExperimentConfig().to_dict()
    for name in ("validate", "evaluate"):
        section = settings.get(name)
        if isinstance(section, Mapping) and section.get("context_len") and section.get("mem_len"):
            # a run from before the rule that refuses the two together, which changed no number
            settings[name] = {**section, "first_memory": "empty"}
    for name, section in settings.items():
        if not isinstance(section, Mapping):
            continue
        known = plain.get(name, {})
        settings[name] = {
            key: None if value == "" and known.get(key, "") is None else value
            for key, value in section.items()
            if key in known or name not in ANALYSES
        }
    return ExperimentConfig.from_dict(settings)


def _config_file(path: str) -> dict[str, Any]:
    file, _, variant = path.partition(":")
    name, where = short_repr(file), f"--config={truncate(path)}"
    if not os.path.isfile(file):
        raise ConfigError(f"{where}: there is no file {name}")
    if not file.endswith(".py"):
        raise ConfigError(f"{where}: {name} is not a Python file (*.py)")
    try:
        # Not an import: that would write a __pycache__, and read a stale one back when a file
        # of the same size is rewritten within a second.
        module = runpy.run_path(file, run_name="txl_config")
        if not callable(module.get("get_config")):
            raise ConfigError(f"{where}: {name} has no function get_config()")
        nested = _returned(where, module["get_config"], variant)
        _refuse_unknown_variant(where, module, variant, nested)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        line = f" (line {lines[-1]})" if lines else ""
        what = f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")
        raise ConfigError(f"{where}: {name} cannot be run: {what}{line}") from error
    return nested


def _returned(where: str, get_config: Callable[..., Any], variant: str) -> dict[str, Any]:
    """What ``get_config`` returns for a variant, or for none, as plain nested dicts."""
    import ml_collections  # here, so that models run where it is not installed

    if variant and not inspect.signature(get_config).parameters:
        raise ConfigError(f"{where}: there is no variant {short_repr(variant)}; the file has none")
    config = get_config(variant) if variant else get_config()
    if not isinstance(config, ml_collections.ConfigDict):
        raise ConfigError(f"{where}: get_config() must return an ml_collections.ConfigDict")
    return config.to_dict()


def _refuse_unknown_variant(
    where: str, module: Mapping[str, Any], variant: str, nested: dict[str, Any]
) -> None:
    """Raises ConfigError for a variant that changes nothing: the file does not know it.

    A table's rows (``ROWS``) and the parameter's default are known: one is what no variant gives.
    The error lists the rows and the texts that the file compares the parameter with.
    """
    parameter = next(iter(inspect.signature(module["get_config"]).parameters.values()), None)
    rows = list(module.get("ROWS", ()))
    if not variant or parameter is None or variant in (parameter.default, *rows):
        return
    if parameter.default is parameter.empty or nested != _returned(where, module["get_config"], ""):
        return
    with tokenize.open(module["__file__"]) as file:
        compared = re.findall(rf"\b{parameter.name} == ['\"]([^'\"]+)['\"]", file.read())
    known = ", ".join(dict.fromkeys([*rows, *compared]))
    there_are = f"variants: {known}" if known else "the file has none"
    raise ConfigError(f"{where}: there is no variant {short_repr(variant)}; {there_are}")


def _set_all(nested: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for group in ALTERNATIVES:
        if any(key in overrides and not _is_none(key, overrides[key]) for key in group):
            for key in group:
                _remove(nested, key)
    for key, value in overrides.items():
        _set(nested, key, value)


def _is_none(key: str, value: Any) -> bool:
    """Whether a value takes a setting away; text that is not optional may well be "none"."""
    return key != "generate.prompt" and str(value).lower() == "none"


def _remove(nested: dict[str, Any], key: str) -> None:
    """Gives a key its default again."""
    section, _, leaf = key.rpartition(".")
    if isinstance(inner := nested.get(section), dict):
        inner.pop(leaf, None)


def _set(nested: dict[str, Any], key: str, value: Any) -> None:
    if not isinstance(key, str):
        raise ConfigError(f"override {short_repr(key)}: a key is text like 'train.steps'")
    *sections, leaf = key.split(".")
    for section in sections:
        inner = nested.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(_unknown(key))
        nested = inner
    nested[leaf] = value


def build(cls: type, nested: Mapping[str, Any], prefix: str) -> Any:
    """An instance of the dataclass ``cls`` from a nested mapping, every leaf type-checked."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in nested.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise ConfigError(_unknown(_first_leaf(key, value)))
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise refusal(key, value, "is a section, not a value")
            section_defaults = {"split": "valid"} if key == "validate" else {}
            values[name] = build(
                typing.cast(type, hints[name]), {**section_defaults, **value}, key + "."
            )
        elif isinstance(value, Mapping) and value:
            raise ConfigError(_unknown(_first_leaf(key, value)))
        else:
            values[name] = typed(key, value, hints[name])
    built = cls(**values)
    if cls is not TransformerXLConfig:
        check_fields(built, prefix.rstrip("."))
    if cls is ExperimentConfig:
        check_combinations(built)
    return built


def _first_leaf(key: str, value: Any) -> str:
    """The first dotted key below ``key``, at most a few levels down: a dict may contain itself."""
    for _ in range(5):
        if not isinstance(value, Mapping) or not value:
            break
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _unknown(key: str) -> str:
    known = list(flatten(dataclasses.asdict(ExperimentConfig())))
    key = truncate(key)
    leaf = key.rpartition(".")[2]
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf]
    near = difflib.get_close_matches(key, same_leaf or known, n=1, cutoff=0.0)
    return f"unknown config key {key!r}; the nearest key is {near[0]!r}"


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in FREE_TO_CHANGE)
