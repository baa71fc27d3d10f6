"""Measures how many seconds a run spends on training steps and on other activities."""

import contextlib
import typing
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any, Literal

Activity = Literal["compile", "data", "evaluate", "save"]
"""The activities of a run other than training steps. ``data`` is the wait for the next batch.
``save`` is the time for which saves block training. It excludes writing in the background."""


class GoodputTimer:
    """Measures the time of a run. ``seconds`` has the total of each :data:`Activity`."""

    def __init__(self) -> None:
        self.seconds: dict[Activity, float] = dict.fromkeys(typing.get_args(Activity), 0.0)
        self._start = perf_counter()

    def training_seconds(self) -> float:
        """Returns the seconds of training steps so far, and of waiting for their data."""
        paused = sum(self.seconds.values()) - self.seconds["data"]
        return perf_counter() - self._start - paused

    @contextlib.contextmanager
    def pause(self, activity: Activity) -> Iterator[None]:
        """Adds the time inside this context to an activity. Contexts must not be nested."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] += perf_counter() - start

    def waiting(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items, and counts the time spent waiting for them as ``data``."""
        iterator, end = iter(items), object()
        while True:
            with self.pause("data"):
                item = next(iterator, end)
            if item is end:
                return
            yield item

    def line(self) -> str:
        """Returns one line with the seconds of all activities. ``step`` is the remaining time."""
        total = perf_counter() - self._start
        step = max(total - sum(self.seconds.values()), 0.0)
        parts = ", ".join(f"{k} {v:.1f}" for k, v in [("step", step), *self.seconds.items()])
        return f"time {total:.1f} s: {parts}; {step / total:.0%} in steps"
