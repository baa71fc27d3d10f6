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

    Its arguments are the number of steps done, and arrays that the last dispatch computes. With
    ``steps`` = (START, STOP), process 0 traces the steps START+1 to STOP, rounded up to whole
    dispatches. It writes the trace into the folder ``tensorboard`` of ``workdir``, and ``report``
    prints the name of this folder. If training ends earlier, the trace ends with it. If ``steps``
    is ``None``, nothing is traced.
    """
    start, stop = steps if steps and processes.is_process_zero() else (0, 0)
    folder, tracing, done = os.path.join(workdir, "tensorboard"), False, 0
    with contextlib.ExitStack() as trace:

        def at_step(step: int, computed: Any) -> None:
            nonlocal tracing, done
            done = step
            if tracing == (start <= step < stop):
                return
            jax.block_until_ready(computed)  # so the trace has whole steps
            tracing = not tracing
            if not tracing:
                trace.close()
                return
            trace.callback(lambda: report(f"traced steps to {done:,}: {folder}"))
            jax.profiler.start_trace(trace.enter_context(local_folder(folder)))
            trace.callback(jax.profiler.stop_trace)

        yield at_step
