"""Batches on device before they are needed, as a pure function of the step."""

import functools
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np

from txl_jax.data.batch import Batch, make_batch
from txl_jax.data.sentences import TrainingStreams

_READ_AHEAD = 2


def training_batch(
    streams: TrainingStreams,
    step: int,
    epoch_memory: str,
    reset_every: int = 0,
    rows: slice = slice(None),
) -> Batch:
    """The batch of a training step, a function of the step alone, so that resume is a seek.

    ``rows``: which streams; only their text is read.

    Memory is emptied at the first segment of an epoch with ``epoch_memory="reset"``, and with
    ``reset_every`` n > 0 at steps 0, n, 2n, ..
    """
    segment = streams.at_step(step, rows)
    return make_batch(segment, resets_memory(step, segment.first, epoch_memory, reset_every))


def resets_memory(step: int, first: bool, epoch_memory: str, reset_every: int) -> bool:
    """Whether memory is emptied before a step; ``first``: it is the first of an epoch."""
    again = reset_every > 0 and step % reset_every == 0
    return again or (first and epoch_memory == "reset")


def training_feed(
    streams: TrainingStreams,
    start: int,
    stop: int,
    epoch_memory: str,
    per_dispatch: int,
    sharding: jax.sharding.Sharding | None,
    reset_every: int = 0,
    of_step: Callable[..., Any] = training_batch,
) -> Generator[Any, None, None]:
    """Batches of the steps ``start`` .. ``stop - 1``, on device, read ahead in a thread.

    With ``per_dispatch`` S > 1 each item holds S steps, stacked on a new leading axis.
    What is read ahead is not state: a checkpoint needs the number of the step only.
    ``sharding``: see :func:`batch_on_device`.
    ``of_step``: :func:`training_batch`, or what takes the same and gives something else.
    """

    def read(step: int, rows: slice) -> Any:
        parts = [
            of_step(streams, s, epoch_memory, reset_every, rows)
            for s in range(step, step + per_dispatch)
        ]
        return parts[0] if per_dispatch == 1 else jax.tree.map(_stack, *parts)

    def batches() -> Iterator[Any]:
        axis = 0 if per_dispatch == 1 else 1
        for step in range(start, stop, per_dispatch):
            yield batch_on_device(functools.partial(read, step), sharding, streams.batch_size, axis)

    return prefetch(batches())


def batch_on_device(
    read: Callable[[slice], Any],
    sharding: jax.sharding.Sharding | None,
    n_rows: int,
    axis: int = 0,
) -> Any:
    """A batch on device, of which every process reads the rows that its own devices hold.

    With two processes of two devices, mesh data 2 x tensor 2, and 8 rows:

        process 0   devices 0 1   rows 0..3, read once for both
        process 1   devices 2 3   rows 4..7

    Args:
      read: gives the rows of a slice, the whole batch for ``slice(0, n_rows)``.
      sharding: of every field of a batch; ``None``: the default device.
      n_rows: B.
      axis: of the rows, 1 behind an axis of steps.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(read(slice(0, n_rows)), sharding)

    def bounds(index: Any) -> tuple[int, int]:  # slices, one of each axis
        start, stop, _ = index[axis].indices(n_rows)
        return start, stop

    there = sharding.addressable_devices_indices_map((1,) * axis + (n_rows,))
    held = sorted({bounds(index) for index in there.values()})
    parts = [read(slice(*rows)) for rows in held]

    def joined(*pieces: np.ndarray) -> jax.Array:
        shape = (*pieces[0].shape[:axis], n_rows, *pieces[0].shape[axis + 1 :])
        piece_of = dict(zip(held, pieces, strict=True))
        return jax.make_array_from_callback(shape, sharding, lambda i: piece_of[bounds(i)])

    return jax.tree.map(joined, *parts)


def prefetch(items: Iterator[Any], size: int = _READ_AHEAD) -> Generator[Any, None, None]:
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
