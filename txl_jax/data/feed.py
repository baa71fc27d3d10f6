"""Batches on device before they are needed, as a pure function of the step."""

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any

import jax
import numpy as np

from txl_jax.data.batch import Batch, batch_of
from txl_jax.data.sentences import TrainingStreams

_READ_AHEAD = 2


def training_batch(
    streams: TrainingStreams, step: int, epoch_memory: str, reset_every: int = 0
) -> Batch:
    """The batch of a training step, a function of the step alone, so that resume is a seek.

    Memory is emptied at the first segment of an epoch with ``epoch_memory="reset"``, and with
    ``reset_every`` n > 0 at steps 0, n, 2n, ..
    """
    segment = streams.at_step(step)
    again = reset_every > 0 and step % reset_every == 0
    return batch_of(segment, forget=again or (segment.first and epoch_memory == "reset"))


def training_feed(
    streams: TrainingStreams,
    start: int,
    stop: int,
    epoch_memory: str,
    per_dispatch: int,
    sharding: Any,
    reset_every: int = 0,
) -> Generator[Batch, None, None]:
    """Batches of the steps ``start`` .. ``stop - 1``, on device, read ahead in a thread.

    With ``per_dispatch`` S > 1 each item holds S steps, stacked on a new leading axis.
    What is read ahead is not state: a checkpoint needs the number of the step only.
    """

    def batches() -> Iterator[Batch]:
        for step in range(start, stop, per_dispatch):
            parts = [
                training_batch(streams, s, epoch_memory, reset_every)
                for s in range(step, step + per_dispatch)
            ]
            whole = parts[0] if per_dispatch == 1 else jax.tree.map(_stack, *parts)
            yield jax.device_put(whole, sharding)

    return read_ahead(batches())


def read_ahead(items: Iterator[Any], size: int = _READ_AHEAD) -> Generator[Any, None, None]:
    """The same items, up to ``size`` of them made in advance by a thread.

    An error in the thread is raised where its item would have come. Closing the iterator
    ends the thread.
    """
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=size)
    closed = threading.Event()

    def put(kind: str, item: Any) -> None:
        while not closed.is_set():
            try:
                ready.put((kind, item), timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put("item", item)
                if closed.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=work, name="txl-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            kind, item = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise item
            yield item
    finally:
        closed.set()
        thread.join()


def _stack(*arrays: Any) -> np.ndarray:
    return np.stack(arrays)
