"""Programs timed in turn, in one run, so that a busy machine slows all of them alike.

A program is a function of no arguments that does its work, waits for the end and gives the seconds
of one unit of it: an update, a segment, a token.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Program = Callable[[], float]


def timed(work: Callable[[], Any]) -> float:
    """Seconds until what ``work`` gives is there."""
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began


def in_turn(
    programs: Mapping[str, Program], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of each program in each round; rounds of warm-up are left out."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for n in range(warm_up + rounds):
        for name, program in programs.items():
            took = program()
            if n >= warm_up:
                seconds[name].append(took)
    return seconds


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
    """How many times quicker ``fast`` is: the ratio of each round's two, as :func:`summary`."""
    return summary([a / b for a, b in zip(slow, fast, strict=True)])
