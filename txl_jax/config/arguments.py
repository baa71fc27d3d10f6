"""Names the nearest argument in the error for a keyword that a public function does not have."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from txl_jax.config.errors import ConfigError
from txl_jax.config.nested import SYNONYMS
from txl_jax.messages import nearest_or_all

P = ParamSpec("P")
T = TypeVar("T")


class ArgumentError(ConfigError, TypeError):
    """A keyword that a function does not have; the message names the nearest one."""


class Unset:
    """The default of an argument that takes the value of the run; ``None`` may be another value."""

    def __repr__(self) -> str:
        return "<the run's>"


RUN: Any = Unset()


def given(arguments: dict[str, Any], *without: str) -> dict[str, Any]:
    """Returns the arguments in ``locals()`` that the caller gave; others have the run's value."""
    return {k: v for k, v in arguments.items() if v is not RUN and k not in ("self", *without)}


def names_the_nearest(**reasons: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function with the error :class:`ArgumentError` for keywords it does not have.

    ``reasons`` say why some names are no arguments, in place of the nearest one.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in known:
                    what = f"{function.__name__}() has no argument {name!r}"
                    why = f": {reasons[name]}" if name in reasons else _nearest(name, known)
                    raise ArgumentError(what + why)
            return function(*args, **kwargs)

        return call

    return decorate


def _nearest(name: str, known: list[str]) -> str:
    meant = SYNONYMS.get(name.lower(), "").rpartition(".")[2]
    return f"; {nearest_or_all(meant if meant in known else name, known)}"
