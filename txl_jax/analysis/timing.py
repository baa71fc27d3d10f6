"""Programs timed in alternation in one process, so that a busy machine slows all of them alike.

A program is a function without arguments that works, waits for the end and returns the seconds of
one unit of its work: an update, a segment, a token.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Program = Callable[[], float]


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the result of ``work`` is ready."""
    start = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start


def time_alternating(
    programs: Mapping[str, Program], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of each program in each round, without the warm-up rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(warm_up + rounds):
        for name, program in programs.items():
            seconds[name].append(program())
    return {name: times[warm_up:] for name, times in seconds.items()}


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return {
        "median": statistics.median(ordered),
        "lower_quartile": ordered[quarter],
        "upper_quartile": ordered[-1 - quarter],
        "least": ordered[0],
        "most": ordered[-1],
        "rounds": len(ordered),
    }


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """The ratio slow / fast of each round, summarized by :func:`summary`."""
    return summary([a / b for a, b in zip(slow, fast, strict=True)])
