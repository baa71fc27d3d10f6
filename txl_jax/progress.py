"""Shows the progress of long work on standard error, or what a program waits for."""

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from txl_jax.messages import names_flags

DELAY = 2.0
"""The seconds after which a bar is shown."""
PATIENCE = 1.0
"""The seconds after which a line says what a program waits for."""
LINES = 30.0
"""The seconds between the lines of progress that the command writes to a file or pipe."""


def is_watched() -> bool:
    """Whether a user sees standard error at once, in a terminal or in a notebook."""
    return is_terminal(sys.stderr) or type(sys.stderr).__module__.startswith("ipykernel")


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal. It can be ``None``, or an object without ``isatty``."""
    return getattr(stream, "isatty", bool)()


def bar(what: str, total: int | None, done: int = 0, unit: str = "B", disable: bool = False) -> Any:
    """Returns a tqdm bar of bytes or another unit on stderr, shown only after :data:`DELAY`."""
    from tqdm import tqdm

    seconds = 0.2 if is_watched() else LINES
    limits: Any = {"delay": DELAY, "mininterval": seconds, "maxinterval": max(seconds, 10.0)}
    units: Any = {"unit": unit, "unit_scale": unit == "B"}
    shown: Any = {"desc": what, "total": total, "initial": done, "file": sys.stderr}
    return tqdm(disable=disable, **shown, **units, **limits)


def work_bar(what: str, total: int | None, unit: str, disable: bool = False) -> Any:
    """Returns a :func:`bar` for the work of a library function.

    In a user's program, the bar appears only on a terminal or in a notebook. The command also
    writes it to a file or pipe, with a line every :data:`LINES` seconds.
    """
    return bar(what, total, unit=unit, disable=disable or not (names_flags() or is_watched()))


def watched(blocks: Iterable[bytes], what: str, total: int | None) -> Iterator[bytes]:
    """Yields the blocks while a :func:`bar` shows the number of their bytes."""
    with bar(what, total) as shown:
        for block in blocks:
            yield block
            shown.update(len(block))


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Says on stderr what a program waits for, if that takes longer than :data:`PATIENCE`.

    If stderr is a file or pipe, the command prints the line after :data:`LINES` seconds, and a
    user's program does not print it. The line appears above a progress bar.
    """
    if not (names_flags() or is_watched()):
        yield
        return
    from tqdm import tqdm

    patience = PATIENCE if is_watched() else LINES
    timer = threading.Timer(patience, tqdm.write, [f"{what} ...", sys.stderr])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
