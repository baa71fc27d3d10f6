"""Traces some training steps for xprof, TensorBoard and Perfetto (``train.profile``)."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax

from txl_jax.parallel import processes
from txl_jax.paths import local_folder

Tracer = Callable[[int, Any], None]


@contextlib.contextmanager
def traced_steps(
    steps: tuple[int, int] | None, workdir: str, report: Callable[[str], None]
) -> Iterator[Tracer]:
    """Yields a function to call before the first dispatch and after each one.

    Its arguments are the number of steps done, and arrays that the last dispatch computes. A trace
    of the steps START+1 to STOP, rounded up to whole dispatches, is written into the folder
    ``tensorboard`` of ``workdir`` by process 0. If training ends earlier, the trace ends with it.
    ``report`` receives the folder. ``steps`` ``None`` traces nothing.
    """
    folder, tracing = os.path.join(workdir, "tensorboard"), False
    written = contextlib.ExitStack()

    def stop(step: int) -> None:
        nonlocal tracing
        tracing = False
        jax.profiler.stop_trace()
        written.close()
        report(f"traced steps to {step:,}: {folder}")

    def trace(step: int, computed: Any) -> None:
        nonlocal tracing
        if steps is None or not processes.is_process_zero():
            return
        if tracing and step >= steps[1]:
            jax.block_until_ready(computed)
            stop(step)
        elif not tracing and steps[0] <= step < steps[1]:
            jax.block_until_ready(computed)  # earlier steps are not part of the trace
            jax.profiler.start_trace(written.enter_context(local_folder(folder)))
            tracing = True

    try:
        yield trace
    finally:
        if tracing:
            stop(steps[1] if steps else 0)
