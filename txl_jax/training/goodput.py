"""Where the seconds of a run go: to steps, or to something else."""

import contextlib
import math
import typing
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any, Literal

Activity = Literal["compile", "data", "evaluate", "save"]
"""What a run does besides its steps. ``data``: waiting for the next batch. ``save``: how long a
save holds training up; writing in the background does not count."""


class GoodputTimer:
    """Seconds of a run by activity, in ``seconds``."""

    def __init__(self) -> None:
        self.seconds: dict[Activity, float] = dict.fromkeys(typing.get_args(Activity), 0.0)
        self._start = perf_counter()
        self._paused_seconds, self._depth, self._paused_at = 0.0, 0, 0.0

    def training_seconds(self) -> float:
        """Seconds so far without those in :meth:`pause`."""
        now = self._paused_at if self._depth else perf_counter()
        return now - self._start - self._paused_seconds

    @contextlib.contextmanager
    def pause(self, activity: Activity) -> Iterator[None]:
        """Counts the time in this context for an activity, not for training; may be nested."""
        start = perf_counter()
        if not self._depth:
            self._paused_at = start
        self._depth += 1
        try:
            yield
        finally:
            now = perf_counter()
            self.seconds[activity] += now - start
            self._depth -= 1
            if not self._depth:
                self._paused_seconds += now - self._paused_at

    def waiting(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same items; the time until each one arrives counts as ``data``."""
        iterator, end = iter(items), object()
        while True:
            start = perf_counter()
            item = next(iterator, end)
            self.seconds["data"] += perf_counter() - start
            if item is end:
                return
            yield item

    def line(self) -> str:
        """All seconds in one line; those of no activity are ``step``."""
        total = perf_counter() - self._start
        step = max(total - sum(self.seconds.values()), 0.0)
        parts = ", ".join(f"{k} {v:.1f}" for k, v in [("step", step), *self.seconds.items()])
        share = step / total if total > 0 else math.nan
        return f"time {total:.1f} s: {parts}; {share:.0%} in steps"
