"""What a single setting may be: a rule for its value, and the type it is read as."""

import ast
import contextlib
import dataclasses
import json
import math
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from txl_jax.config.bounds import ITEMS
from txl_jax.messages import short_repr


class ConfigError(ValueError):
    """A setting that cannot be used; the text names the key, the value and the rule.

    Example:
      >>> import txl_jax
      >>> txl_jax.ExperimentConfig.from_dict({"train": {"steps": -5}})
      Traceback (most recent call last):
      ...
      txl_jax.config.fields.ConfigError: config key train.steps = -5: must be at least 1
    """


FLOAT32 = (float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max))
"""The smallest and the largest positive number that float32 holds without loss of digits."""

BELOW_1 = 0.999999
"""The largest probability; numbers nearer to 1 than float32's digits would become 1."""


def refusal(key: str, value: Any, why: str) -> ConfigError:
    """The error for a value of a setting that cannot be used; ``why`` is the rule it breaks."""
    return ConfigError(f"config key {key} = {short_repr(value)}: {why}")


def rule(
    default: Any,
    text: str,
    holds: Callable[[Any], bool],
    most: float | None = None,
    **more: Any,
) -> Any:
    """A field with a default; ``text`` says in errors what ``holds`` tests.

    ``most``: the largest value, of each item if it is a list. Every integer has one (bounds.py).
    """
    metadata = {"rule": (text, holds), "most": most, **more}
    return dataclasses.field(default=default, metadata=metadata)


def local_path(default: Any, text: str = "", holds: Callable[[Any], bool] = lambda v: True) -> Any:
    """A field that names files or folders of this machine: an exported model does not have it."""
    return rule(default, text, holds, path=True)


def free_text(default: Any, text: str = "", holds: Callable[[Any], bool] = lambda v: True) -> Any:
    """A field of free text that names no file."""
    return rule(default, text, holds, path=False)


def at_least(low: float, default: Any, most: float | None = None) -> Any:
    """A field that must be ``low`` or more, and ``most`` at the most."""
    return rule(default, f"must be at least {low}", lambda v: v >= low, most)


def above(low: float, default: Any, most: float | None = None) -> Any:
    """A field that must be more than ``low``, and ``most`` at the most."""
    return rule(default, f"must be above {low}", lambda v: v > low, most)


def optional_count(most: int) -> Any:
    """A field from 1 to ``most``, or ``None``, its default."""
    return rule(None, "must be at least 1", lambda v: v is None or v >= 1, most)


def probability(default: float) -> Any:
    """A field from 0 to below 1."""
    return rule(default, "must be at least 0 and below 1", lambda v: 0 <= v < 1, BELOW_1)


def optional_probability() -> Any:
    """A field from 0 to below 1, or ``None``, its default."""
    holds = lambda v: v is None or 0 <= v < 1
    return rule(None, "must be at least 0 and below 1", holds, BELOW_1)


def without_paths(cls: type, nested: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the dataclass ``cls``, nested, with the default for every :func:`local_path`."""
    hints, cleared = typing.get_type_hints(cls), dict(nested)
    for field in dataclasses.fields(cls):
        if field.name not in cleared:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            cleared[field.name] = without_paths(hints[field.name], cleared[field.name])
        elif field.metadata.get("path"):
            default = field.default
            cleared[field.name] = list(default) if isinstance(default, tuple) else default
    return cleared


def check_fields(config: Any, prefix: str) -> None:
    """Reads every field as its type, in place, and holds it to its rule; raises ConfigError."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(value):
            continue
        object.__setattr__(config, field.name, typed(key, value, hints[field.name]))
        value = getattr(config, field.name)
        text, holds = field.metadata.get("rule", ("", lambda v: True))
        if not holds(value):
            raise refusal(key, value, text)
        _check_size(key, value, field.metadata.get("most"))


def _check_size(key: str, value: Any, most: float | None) -> None:
    """Raises ConfigError for a number that is too large, or that float32 cannot hold."""
    items = value if isinstance(value, tuple) else (value,)
    if len(items) > ITEMS:
        raise refusal(key, value, f"must have at most {ITEMS} items")
    for item in items:
        if type(item) is float and item and not FLOAT32[0] <= abs(item) <= FLOAT32[1]:
            low, high = (f"{x:.2g}" for x in FLOAT32)
            rule = f"must be 0 or between {low} and {high} in size, the range of float32"
            raise refusal(key, item, rule)
        if most is not None and item is not None and item > most:
            raise refusal(key, item, f"must be at most {most}")


def typed(key: str, value: Any, hint: Any) -> Any:
    """``value`` as the type ``hint``; text is read as that type.

    Text for a ``tuple``: see :func:`_listed`.

    Raises:
      ConfigError: it cannot be read as that type; a number is not finite; a value is missing.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        (inner,) = [a for a in args if a is not type(None)]
        if isinstance(value, str) and not value.strip():
            raise refusal(key, value, "a value is missing; give one, or none")
        return typed(key, value, inner)
    missing = isinstance(value, str) and not value.strip()
    if missing and hint is not str and origin is not tuple:
        raise refusal(key, value, f"a value is missing; {_expected(hint)}")
    if origin is Literal:
        for choice in args:
            if type(value) is type(choice) and value == choice:
                return choice
            if isinstance(value, str) and value.lower() == str(choice).lower():
                return choice
        raise refusal(key, value, _expected(hint))
    if origin is tuple:
        if isinstance(value, str):
            value = _listed(value, args[0] is str)
        if not isinstance(value, list | tuple):
            raise refusal(key, value, "must be a list")
        return tuple(typed(key, v, args[0]) for v in value)
    return _single(key, value, hint)


def _single(key: str, value: Any, hint: Any) -> Any:
    """A ``bool``, ``int``, ``float`` or ``str``."""
    if hint is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if hint in (int, float) and isinstance(value, str):
        value = _number(value)
    if hint is float and type(value) is int:
        value = _as_float(value)
    if hint is int and type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not hint:
        raise refusal(key, value, _expected(hint))
    if hint is float and not math.isfinite(value):
        raise refusal(key, value, "must be a finite number")
    return value


def _expected(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"must be one of {', '.join(repr(a) for a in typing.get_args(hint))}"
    return f"must be of type {hint.__name__}"


def _listed(text: str, of_texts: bool) -> Any:
    """A list that stands on a command line.

    Of texts: a JSON list (``["a, b", "\\n"]``) or a Python list or tuple of texts
    (``('a', 'b')``); anything else is split at commas, and white space, brackets and quotes stay
    as they are. Of other values: split at commas, inside brackets or not, quoted or not.
    """
    if not of_texts:
        parts = text.strip("()[] ").replace(" ", "").split(",")
        return [part.strip("'\"") for part in parts if part]
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            with warnings.catch_warnings(action="ignore"):  # of backslashes in the text
                value = read(text)
            if isinstance(value, list | tuple) and text.lstrip()[0] in "[(":
                return value
    return text.split(",") if text else []


def _number(text: str) -> Any:
    """The number that an ASCII text is, else the text: ``int`` also takes digits like ``٣``."""
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text) if text.isascii() else text
    return text


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
