"""Where the seconds of a run go: to steps, or lost to something else."""

import contextlib
import math
import typing
from collections.abc import Iterator
from time import perf_counter
from typing import Literal, TypeVar

Activity = Literal["compile", "data", "evaluate", "save"]
"""What a run does beside its steps; ``data`` is waiting for the next batch, ``save`` what saving
holds training up for, not what is written meanwhile."""

Item = TypeVar("Item")
_END = object()


class GoodputTimer:
    """Seconds since it was made, by activity.

    Attributes:
      seconds: of each activity so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[Activity, float] = dict.fromkeys(typing.get_args(Activity), 0.0)
        self._start = perf_counter()

    @contextlib.contextmanager
    def on(self, activity: Activity) -> Iterator[None]:
        """Counts the time in this context for an activity."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] += perf_counter() - start

    def waiting(self, items: Iterator[Item]) -> Iterator[Item]:
        """The same items; the time until each comes counts as ``data``."""
        while True:
            with self.on("data"):
                item = next(items, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]

    def line(self) -> str:
        """All of it in one line; what no activity took is ``step``."""
        total = perf_counter() - self._start
        step = max(total - sum(self.seconds.values()), 0.0)
        named: list[tuple[str, float]] = [("step", step), *self.seconds.items()]
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in named)
        share = step / total if total > 0 else math.nan
        return f"time {total:.1f} s: {parts}; {share:.0%} in steps"
