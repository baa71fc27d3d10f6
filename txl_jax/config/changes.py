"""Overrides settings of an experiment, and finds what a resumed run has changed."""

import copy
import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from txl_jax.config.analysis import Analyses
from txl_jax.config.combinations import ALTERNATIVES
from txl_jax.config.errors import ConfigError, UnknownKeyError
from txl_jax.config.experiment import ExperimentConfig
from txl_jax.config.fields import NAMED
from txl_jax.config.folders import absolute_paths, same_files
from txl_jax.config.nested import flatten, path_fields, unknown_key
from txl_jax.messages import short_repr

FREE_TO_CHANGE = (
    *("name", "model.scan_layers", "model.remat", "model.kernel", "data.path", "data.cache_dir"),
    "data.tokenizer",
    *("train.log_every", "train.eval_every", "train.non_finite", "train.max_skipped"),
    *("train.wandb", "train.profile", "average.use"),
    *("validate", "evaluate", "generate", "export", "checkpoint", "mesh"),
    *(one.name for one in dataclasses.fields(Analyses)),
)
"""Keys and sections that a resumed run may change, because they do not affect the trained state.
The path of the corpus may change, but its text must keep its hash."""


def override(exp: ExperimentConfig, overrides: Mapping[str, Any]) -> ExperimentConfig:
    """Returns the experiment with overrides, checked again; keys are as in :func:`load_config`."""
    nested = exp.to_dict()
    set_all(nested, overrides)
    return ExperimentConfig.from_dict(nested)


def set_all(nested: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Sets dotted keys in a nested dict, and removes keys that they exclude (ALTERNATIVES)."""
    # The prompt may be the text "none".
    is_none = lambda key: key != "generate.prompt" and str(overrides[key]).lower() == "none"
    for group in ALTERNATIVES:
        if any(key in overrides and not is_none(key) for key in group):
            for section, _, leaf in (key.rpartition(".") for key in group):
                if isinstance(inner := nested.get(section), dict):
                    inner.pop(leaf, None)
    for key, value in overrides.items():
        inner, (*sections, leaf) = nested, key.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise unknown_key(key, ExperimentConfig())
        inner[leaf] = value


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Returns differences of settings that affect the trained state, as ``key: old -> new``.

    A missing key has its default value. Paths are equal if they name the same files.
    """
    paths, defaults = dict(path_fields(ExperimentConfig)), flatten(ExperimentConfig().to_dict())
    old, new = ({**defaults, **flatten(nested)} for nested in (a, b))
    keys = [key for key in sorted(old.keys() | new.keys()) if not is_free(key)]
    pairs = [(key, old.get(key, "absent"), new.get(key, "absent")) for key in keys]
    same = lambda key, x, y: same_files(x, y) if key in paths else x == y
    return [
        f"{key}: {short_repr(x)} -> {short_repr(y)}" for key, x, y in pairs if not same(key, x, y)
    ]


def changed_validation(before: Mapping[str, Any], exp: ExperimentConfig) -> list[str]:
    """Returns how validation settings, except the batch size, differ from those of a record."""
    old, new = flatten(before.get("validate", {})), flatten(exp.to_dict()["validate"])
    other = [key for key in old if old[key] != new.get(key) and key != "batch_size"]
    return [f"validate.{key}: {old[key]} -> {new.get(key)}" for key in other]


def is_free(key: str) -> bool:
    """Whether a resumed run may change a setting, see :data:`FREE_TO_CHANGE`."""
    return any(key == free or key.startswith(free + ".") for free in FREE_TO_CHANGE)


def with_absolute_paths(exp: ExperimentConfig) -> ExperimentConfig:
    """Returns the experiment with absolute paths in all its settings, ready to be stored."""
    changes = {}
    for key, field in path_fields(ExperimentConfig):
        value, named = attrgetter(key)(exp), field.metadata["path"] == NAMED
        changes[key] = absolute_paths(value, f"config key {key}", named)
    return override(exp, changes)


def without_paths(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a record, with the default in place of each path of files."""
    cleared, given = copy.deepcopy(dict(record)), flatten(record)
    defaults, paths = flatten(ExperimentConfig().to_dict()), dict(path_fields(ExperimentConfig))
    set_all(cleared, {key: defaults[key] for key in paths if key in given})
    return cleared


def from_record(record: Mapping[str, Any]) -> ExperimentConfig:
    """Returns the experiment in a ``config.json``, which has other content besides the settings.

    Raises ConfigError as :meth:`ExperimentConfig.from_dict` does. A setting that does not exist in
    this version of txl_jax is an error too.
    """
    settings = {k: v for k, v in record.items() if k not in ("corpus", "provenance")}
    try:
        return ExperimentConfig.from_dict(settings)
    except UnknownKeyError as error:
        fix = "train or export the model again with this version"
        raise ConfigError(f"was written by another version of txl_jax ({error}); {fix}") from error
