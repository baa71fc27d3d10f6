"""Reads the value of a setting as its type; text from a command line is converted."""

import ast
import contextlib
import json
import math
import types
import typing
import warnings
from typing import Any, Literal

from txl_jax.config.errors import refusal


def typed(key: str, value: Any, hint: Any) -> Any:
    """``value`` as the type ``hint``; text is read as that type.

    Text for a ``tuple``: see :func:`_listed`.

    Raises:
      ConfigError: it cannot be read as that type; a number is not finite; a value is missing.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    text = value.lower() if isinstance(value, str) else None
    missing = text is not None and not text.strip()
    if origin in (types.UnionType, typing.Union):
        if value is None or text == "none":
            return None
        if missing:
            raise refusal(key, value, "a value is missing; give one, or none")
        return typed(key, value, next(a for a in args if a is not type(None)))
    if missing and hint is not str and origin is not tuple:
        raise refusal(key, value, f"a value is missing; {_expected(hint)}")
    if origin is Literal:
        for choice in args:
            if (type(value) is type(choice) and value == choice) or text == str(choice).lower():
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
        value = float(value) if abs(value) < 2**1023 else math.inf
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
