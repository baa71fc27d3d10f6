"""Converts nested dicts of settings to sections, and to flat dicts with dotted keys."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast, get_origin

from txl_jax.config.arguments import SYNONYMS
from txl_jax.config.errors import UnknownKeyError, refusal
from txl_jax.config.fields import NAMED, Section, checked
from txl_jax.config.folders import expanded_paths, path_text
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
        elif name not in fields or (
            isinstance(value, Mapping) and value and get_origin(fields[name].type) is not dict
        ):
            for _ in range(5):  # to the first leaf; a dict may contain itself
                if isinstance(value, Mapping) and value:
                    inner, value = next(iter(value.items()))
                    key = f"{key}.{inner}"
            raise unknown_key(key, root)
        else:
            values[name] = checked(fields[name], key, value)
            # Paths of the section data stay as given, because the label of the corpus shows them.
            path = fields[name].metadata.get("path")
            remote = fields[name].metadata.get("remote", False)
            if path and prefix != "data.":
                where, named = f"config key {key}", path == NAMED
                values[name] = expanded_paths(values[name], where, named, remote)
            elif path and values[name]:
                path_text(values[name], f"config key {key}", remote)  # raises an error for a URL
    return dataclasses.replace(section, **values)  # type: ignore[type-var]


def unknown_key(key: str, root: Any) -> UnknownKeyError:
    """Returns the error for a key that ``root``, the section of all settings, does not have."""
    known = list(flatten(dataclasses.asdict(root)))
    short = truncate(key)
    leaf = short.rpartition(".")[2]
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf]
    near = difflib.get_close_matches(short, same_leaf or known, n=1, cutoff=0.0)[0]
    if not ("." in short and same_leaf):
        near = SYNONYMS.get(leaf.lower(), near)
    sections = list(dict.fromkeys(k.partition(".")[0] for k in known if "." in k))
    first = short.partition(".")[0]
    if leaf.lower() in SYNONYMS or same_leaf or _is_near(short, near):
        fix = f"the nearest key is {near!r}"
    elif first in sections:
        inside = [k.removeprefix(f"{first}.") for k in known if k.startswith(f"{first}.")]
        fix = f"the keys of {first} are {', '.join(inside)}"
    else:
        everywhere = argument("mode", "settings") if names_flags() else "docs/settings.md"
        fix = f"{everywhere} lists the keys of {', '.join(sections)}"
    return UnknownKeyError(f"unknown config key {short!r}; {fix}", key)


def _is_near(key: str, known: str) -> bool:
    """Whether a key is similar to a known key; its last part is enough if the section is right."""
    section, _, leaf = known.rpartition(".")
    before, _, last = key.rpartition(".")
    whole = [] if before == section else [known, section]
    return bool(nearest(key, whole) or nearest(last, [leaf]))


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
