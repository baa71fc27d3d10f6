"""Marks all but the first cases of a test as slow tests or as integration tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(kept: int, cases: Iterable[Any]) -> list[Any]:
    """The cases; those after the first ``kept`` are marked as slow tests."""
    return _rest(pytest.mark.slow, kept, cases)


def rest_integration(kept: int, cases: Iterable[Any]) -> list[Any]:
    """The cases; those after the first ``kept`` are marked as integration tests."""
    return _rest(pytest.mark.integration, kept, cases)


def _rest(mark: pytest.MarkDecorator, kept: int, cases: Iterable[Any]) -> list[Any]:
    many = list(cases)
    as_tuple = lambda case: case if isinstance(case, tuple) else (case,)
    return [*many[:kept], *(pytest.param(*as_tuple(case), marks=mark) for case in many[kept:])]
