"""Declares settings as fields with a default, a rule and a largest value.

The string below a field is its documentation, one sentence.

A section is a frozen dataclass of such fields. A section checks its values when it is built, so no
section has a value that cannot be used.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Callable
from typing import Any

from txl_jax.config.bounds import BELOW_1, LARGEST, SMALLEST
from txl_jax.config.errors import refusal
from txl_jax.config.folders import path_texts
from txl_jax.config.parsing import typed
from txl_jax.messages import truncate

Test = Callable[[Any], Any]
NAMED = "NAME=PATH"
"""The form of the items of a list of paths in which each path has a name."""
LONGEST_REPR = 400
"""The largest number of characters of the ``repr`` of a section."""


def setting(
    default: Any,
    rule: str,
    holds: Test,
    most: float | None = None,
    path: bool | str | None = None,
    remote: bool = False,
) -> Any:
    """Declares a field with a rule; the text ``rule`` describes the test ``holds`` in errors.

    ``most`` is the largest allowed value, or item of a list, unless the rule states it (bounds.py).
    ``path`` says whether the value names files; it is :data:`NAMED` for a list of texts of this
    form. ``remote`` says whether the files may be in a bucket. If the type of the field allows
    ``None``, this value is not tested.
    """
    metadata = {"rule": rule, "holds": holds, "most": most, "path": path, "remote": remote}
    return dataclasses.field(default=default, metadata=metadata)


def at_least(low: float, default: Any, most: float | None = None) -> Any:
    """Declares a field whose value must be at least ``low``."""
    return setting(default, f"must be at least {low}", lambda v: v >= low, most)


def above_0(default: Any) -> Any:
    """Declares a field whose value must be above 0 and finite, also when rounded to float32."""
    rule = "must be above 0 and finite in float32"
    return setting(default, rule, lambda v: SMALLEST <= v <= LARGEST)


def within(low: float, high: float, default: Any, also: str = "") -> Any:
    """Declares a field whose value must be from ``low`` to ``high``.

    With a text ``also``, such as ``"0 (greedy) or "``, 0 is allowed too, and the rule says so.
    """
    rule = f"must be {also}from {low} to {high}"
    return setting(default, rule, lambda v: low <= v <= high or (also and v == 0))


def minus_1_or_count(meaning: str, default: int | None, most: int) -> Any:
    """Declares a field from 1 to ``most``, or -1, which has a ``meaning`` of its own."""
    rule = f"must be -1 ({meaning}) or at least 1"
    return setting(default, rule, lambda v: v == -1 or v >= 1, most)


def probability(default: float | None) -> Any:
    """Declares a field from 0 to just below 1."""
    return within(0, BELOW_1, default)


def rising(low: int, default: tuple[int, ...], most: int, count: int = 1) -> Any:
    """Declares a list of at least ``count`` (0 to 2) numbers in increasing order."""
    number = ("", "one or more ", "two or more ")[count]
    rises = lambda v: all(a < b for a, b in zip((low - 1, *v), v, strict=False))
    rule = f"must be {number}increasing numbers, each at least {low}"
    return setting(default, rule, lambda v: len(v) >= count and rises(v), most)


def file_path(
    default: Any,
    rule: str = "",
    holds: Test = lambda v: True,
    named: bool = False,
    remote: bool = True,
) -> Any:
    """Declares a field that names files or folders; exported models leave its value out.

    A ``named`` field is a list of texts of the form :data:`NAMED`. ``remote`` says whether the
    files may be in a bucket, ``gs://BUCKET/NAME``.
    """
    return setting(default, rule, holds, path=NAMED if named else True, remote=remote)


def free_text(default: Any, rule: str = "", holds: Test = lambda v: True) -> Any:
    """Declares a field of free text that does not name a file."""
    return setting(default, rule, holds, path=False)


def named_values() -> Any:
    """Declares a field that is a dict of numbers, texts and lists by name."""
    metadata = {"rule": "", "holds": lambda v: True, "path": False}
    return dataclasses.field(default_factory=dict, hash=False, metadata=metadata)


class Section:
    """The base class of every group of settings, which checks its values when it is built.

    ``key`` is the section's name in errors. A section that occurs under several names has no key.
    Errors of such a section name only the setting, and ``from_dict`` adds the section.
    """

    _prefix = ""

    def __init_subclass__(cls, key: str = ""):
        cls._prefix = f"{key}." if key else ""
        setattr(cls, "__repr__", Section.__repr__)  # noqa: B010  (else dataclass writes its own)

    def __repr__(self) -> str:
        """Shows the settings that differ from their defaults, shortened to a few lines."""
        changed = []
        for field in dataclasses.fields(typing.cast(Any, self)):
            value, made = getattr(self, field.name), field.default_factory
            if value != (field.default if made is dataclasses.MISSING else made()):
                changed.append(f"{field.name}={value!r}")
        return truncate(f"{type(self).__name__}({', '.join(changed)})", LONGEST_REPR)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(typing.cast(Any, self)):
            value = checked(field, self._prefix + field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)


@functools.cache
def sentences(cls: type) -> dict[str, str]:
    """Returns the documentation of each field, which is the string below it in the source."""
    docs: dict[str, str] = {}
    for base in cls.__mro__[: cls.__mro__.index(Section)]:
        (definition,) = ast.parse(inspect.getsource(base)).body
        for pair in itertools.pairwise(typing.cast(ast.ClassDef, definition).body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def checked(field: dataclasses.Field, key: str, value: Any) -> Any:
    """Converts the value of a setting to its type and checks it, or raises ConfigError."""
    kind: Any = field.type
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, typing.cast(type, kind)):
            name = typing.cast(type, kind).__name__
            raise refusal(key, value, f"must be a {name}, because the key is a section")
        return value
    if field.metadata.get("path"):
        value = path_texts(value)
    value = typed(key, value, kind)
    if value is None:
        return None
    if field.metadata and not field.metadata["holds"](value):
        raise refusal(key, value, field.metadata["rule"])
    most, items = field.metadata.get("most"), value if isinstance(value, tuple) else (value,)
    for item in items:
        if most is not None and item > most:
            raise refusal(key, item, f"must be at most {most}")
    return value
