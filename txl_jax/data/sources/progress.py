"""A bar on the terminal for what takes long: downloads, counting, encoding."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

DELAY = 2.0
"""Seconds after which a bar is shown."""


def bar(what: str, total: int | None, done: int = 0) -> Any:
    """A tqdm bar over bytes, on stderr; nothing is shown of what is over at once."""
    from tqdm import tqdm

    seconds = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(
        desc=what,
        total=total,
        initial=done,
        unit="B",
        unit_scale=True,
        delay=DELAY,
        mininterval=seconds,
        maxinterval=max(seconds, 10.0),
    )


def watched(blocks: Iterable[bytes], what: str, total: int | None) -> Iterator[bytes]:
    """The same blocks, their bytes counted on a :func:`bar`."""
    with bar(what, total) as shown:
        for block in blocks:
            yield block
            shown.update(len(block))
