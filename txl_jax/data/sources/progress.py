"""Shows a progress bar on the terminal for long work: downloads, counting and encoding."""

from collections.abc import Iterable, Iterator
from typing import Any

from txl_jax.standard_streams import stderr

DELAY = 2.0  # seconds after which a bar is shown


def bar(what: str, total: int | None, done: int = 0, unit: str = "B", disable: bool = False) -> Any:
    """Returns a tqdm bar of bytes or another unit on stderr, shown only after :data:`DELAY`."""
    from tqdm import tqdm

    stream = stderr()
    seconds = 0.2 if stream.isatty() else 30.0
    limits: Any = {"delay": DELAY, "mininterval": seconds, "maxinterval": max(seconds, 10.0)}
    units: Any = {"unit": unit, "unit_scale": unit == "B"}
    shown: Any = {"desc": what, "total": total, "initial": done, "file": stream}
    return tqdm(disable=disable, **shown, **units, **limits)


def watched(blocks: Iterable[bytes], what: str, total: int | None) -> Iterator[bytes]:
    """Yields the blocks while a :func:`bar` shows the number of their bytes."""
    with bar(what, total) as shown:
        for block in blocks:
            yield block
            shown.update(len(block))
