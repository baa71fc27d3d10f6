"""Converts the value of a setting to its type; the value may be text from a command line."""

import ast
import contextlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from txl_jax.config.errors import refusal
from txl_jax.messages import nearest


def typed(key: str, value: Any, hint: Any) -> Any:
    """Converts ``value`` to the type ``hint``, or raises ConfigError."""
    value = plain(value)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    text = value.lower() if isinstance(value, str) else None
    if origin in (types.UnionType, typing.Union):
        if value is None or text == "none":
            return None
        if text is not None and not text.strip(" "):  # a line end can be a separator
            raise refusal(key, value, "a value is missing; give one, or the word none")
        return typed(key, value, next(a for a in args if a is not type(None)))
    if origin is Literal:
        value = _dtype_name(value)
        for choice in args:
            if (type(value) is type(choice) and value == choice) or text == str(choice).lower():
                return choice
        raise refusal(key, value, _expected(hint, value))
    if origin is dict:
        return _mapping(key, value)
    if origin is tuple:
        if isinstance(value, str):
            value = _listed(value, args[0] is str)
        elif getattr(value, "ndim", 0) == 1:
            value = list(value)
        if not isinstance(value, list | tuple | range):
            raise refusal(key, value, "must be a list")
        return tuple(typed(key, v, args[0]) for v in value)
    return _single(key, value, hint)


def plain(value: Any) -> Any:
    """Returns a scalar of NumPy or JAX, or a subclass of ``int`` or ``str``, as Python's own type.

    A float of less than 64 bits becomes the shortest decimal number that rounds to it. Other
    values, such as arrays with axes, are returned as they are.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if not hasattr(value, "dtype") or getattr(value, "ndim", None) != 0:
        return float(value) if isinstance(value, float) else value
    import numpy as np  # NumPy or JAX made the value, so this is fast

    scalar = np.asarray(value)[()]
    if scalar.dtype.kind in "biuU":
        return scalar.item()
    is_float = scalar.dtype.kind == "f" or scalar.dtype.name == "bfloat16"
    return float(str(scalar)) if is_float else value


def _dtype_name(value: Any) -> Any:
    """Returns the name of a dtype or of a type of NumPy's or JAX's numbers, such as ``int32``."""
    if isinstance(value, type) or type(value).__name__.endswith("DType"):
        with contextlib.suppress(TypeError):
            import numpy as np

            return np.dtype(value).name
    return value


def _single(key: str, value: Any, hint: Any) -> Any:
    """Converts a value to ``bool``, ``int``, ``float`` or ``str``."""
    if hint is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if hint in (int, float) and isinstance(value, str):
        value = _number(value)
    if hint is float and type(value) is int:
        if abs(value) > 10**308:
            raise refusal(key, value, "must be a finite number")
        value = float(value)
    if hint is int and type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not hint:
        raise refusal(key, value, _expected(hint))
    if hint is float and not math.isfinite(value):
        raise refusal(key, value, "must be a finite number")
    return value


def _mapping(key: str, value: Any) -> dict[str, Any]:
    """Converts a mapping, perhaps as JSON text, to a dict of numbers, texts, lists and ``None``.

    The values of a nested mapping get dotted names.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise refusal(key, value, f"must be a dict; give one value as {key}.NAME=VALUE")
    found: dict[str, Any] = {}
    for name, one in value.items():
        where = f"{key}.{name}"
        if isinstance(one, Mapping):
            found |= {f"{name}.{inner}": x for inner, x in _mapping(where, one).items()}
        else:
            found[str(name)] = _anything(where, one)
    return found


def _anything(key: str, value: Any) -> Any:
    """Converts a value, perhaps text from a command line, to the type that it looks like."""
    value = plain(value)
    if isinstance(value, str):
        known = {"true": True, "false": False, "none": None, "null": None}
        if not value.strip():
            raise refusal(key, value, "a value is missing; give one, or the word none")
        if value.lstrip()[:1] in ("(", "[") or "," in value:
            parts = _listed(value, True)
            if any(isinstance(part, str) and part.lstrip()[:1] in ("(", "[") for part in parts):
                raise refusal(key, value, "is no complete list; write 1,2 or a,b or ['a', 'b']")
            value = parts
        else:
            value = known.get(value.lower(), _number(value))
    if isinstance(value, list | tuple | range) or getattr(value, "ndim", 0) == 1:
        return [_anything(key, item) for item in value]
    if not isinstance(value, bool | int | float | str | None):
        raise refusal(key, value, "must be a number, a text, true, false, none or a list of these")
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal(key, value, "must be a finite number")
    return value


def _expected(hint: Any, value: Any = None) -> str:
    if typing.get_origin(hint) is Literal:
        known = typing.get_args(hint)
        near = nearest(str(value), [name for name in known if isinstance(name, str)])
        rule = f"must be one of {', '.join(map(repr, known))}"
        return f"{rule}; the nearest is {near!r}" if near else rule
    return f"must be of type {hint.__name__}"


def _listed(text: str, of_texts: bool) -> Any:
    """Parses a list from a command line.

    A list of texts may be a JSON list (``["a, b", "\\n"]``) or a Python list or tuple
    (``('a', 'b')``). Other text is split at commas, and white space, brackets and quotes are kept.
    A list of other values is split at commas, and brackets, spaces and quotes are ignored.
    """
    if not of_texts:
        parts = text.strip("()[] ").replace(" ", "").split(",")
        return [part.strip("'\"") for part in parts if part]
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, TypeError, SyntaxError):
            value = read(text)
            if isinstance(value, list | tuple) and text.lstrip()[0] in "[(":
                return value
    return text.split(",") if text else []


def _number(text: str) -> Any:
    """Converts ASCII text to a number if possible; ``int`` would also accept digits like ``٣``."""
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text) if text.isascii() else text
    return text
