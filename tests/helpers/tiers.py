"""Which cases of a test run where: a few for every kind of code in each run, all in slow ones."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(kept: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, those after the first ``kept`` as slow tests."""
    many = list(cases)
    as_tuple = lambda case: case if isinstance(case, tuple) else (case,)
    slow = [pytest.param(*as_tuple(case), marks=pytest.mark.slow) for case in many[kept:]]
    return [*many[:kept], *slow]
