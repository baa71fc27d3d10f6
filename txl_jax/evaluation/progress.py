"""The progress bar of an evaluation or an analysis."""

import contextlib
from collections.abc import Callable, Iterator

from txl_jax.data.sources.progress import bar
from txl_jax.parallel.processes import is_process_zero


@contextlib.contextmanager
def segment_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; gives ``progress(done, total)``, as :meth:`Evaluator.run` calls it."""
    with bar(title, None, unit="segment", disable=not is_process_zero()) as shown:

        def progress(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield progress
