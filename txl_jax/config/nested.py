"""Converts nested dicts of settings to sections, and to flat dicts with dotted keys."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from txl_jax.config.arguments import SYNONYMS
from txl_jax.config.errors import UnknownKeyError, refusal
from txl_jax.config.fields import NAMED, Section, checked
from txl_jax.config.folders import expanded_paths
from txl_jax.messages import argument, names_flags, nearest, truncate

S = TypeVar("S", bound=Section)


def replace_nested(section: S, nested: Mapping[str, Any], prefix: str = "", root: Any = None) -> S:
    """Returns the section with the values of a nested mapping; converts text to a setting's type.

    In every ``file_path``, ``~`` becomes the home folder. Errors, which are those of
    :meth:`ExperimentConfig.from_dict`, name the key with the section's ``prefix``. The error of an
    unknown key names the nearest key of ``root``, the section of all settings.
    """
    root, values = root or section, {}
    fields = {field.name: field for field in dataclasses.fields(cast(Any, section))}
    for name, value in nested.items():
        key, own = f"{prefix}{name}", getattr(section, name) if name in fields else None
        if isinstance(own, Section):
            if not isinstance(value, Mapping):
                rule = f"is a section of settings, not one setting; set {key}.NAME"
                raise refusal(key, value, rule)
            values[name] = replace_nested(own, value, f"{key}.", root)
        elif name not in fields:
            while isinstance(value, Mapping) and value:  # to the first leaf
                inner, value = next(iter(value.items()))
                key = f"{key}.{inner}"
            raise unknown_key(key, root)
        else:
            values[name] = checked(fields[name], key, value)
            if path := fields[name].metadata.get("path"):
                where, remote = f"config key {key}", fields[name].metadata["remote"]
                with_home = expanded_paths(values[name], where, path == NAMED, remote)
                if prefix != "data.":  # the label of the corpus shows the paths as given
                    values[name] = with_home
    return dataclasses.replace(section, **values)  # type: ignore[type-var]


def unknown_key(key: str, root: Any) -> UnknownKeyError:
    """Returns the error for a key that ``root``, the section of all settings, does not have."""
    known = list(flatten(dataclasses.asdict(root)))
    leaves = {name: name.rpartition(".")[2] for name in known}
    short = truncate(key)
    leaf = short.rpartition(".")[2]
    synonym = SYNONYMS.get(leaf.lower())
    if synonym and not ("." in short and leaf in leaves.values()):
        near = [synonym]
    else:
        like = nearest(leaf, leaves.values())
        same_leaf = [name for name in known if leaves[name] == like]
        near = difflib.get_close_matches(short, same_leaf, n=1, cutoff=0.0)
    first, sections = short.partition(".")[0], [k.partition(".")[0] for k in known if "." in k]
    if near:
        fix = f"the nearest key is {near[0]!r}"
    elif first in sections:
        inside = [k.removeprefix(f"{first}.") for k in known if k.startswith(f"{first}.")]
        fix = f"the keys of {first} are {', '.join(inside)}"
    else:
        everywhere = argument("mode", "settings") if names_flags() else "docs/settings.md"
        fix = f"{everywhere} lists the keys of {', '.join(dict.fromkeys(sections))}"
    return UnknownKeyError(f"unknown config key {short!r}; {fix}", key)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by dotted key, with lists in place of tuples.

    Each item of a dict has a key of its own. An empty dict inside a section is a value of one key.
    """
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and (value or not prefix):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat


def path_fields(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Yields every ``file_path`` of the section ``cls``, with its dotted key."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            yield from path_fields(cast(type, field.type), f"{prefix}{field.name}.")
        elif field.metadata.get("path"):
            yield f"{prefix}{field.name}", field
