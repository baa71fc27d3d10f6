"""Reads batches in advance and puts them on device; the number of a step decides its batch."""

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np

from txl_jax.data.batch import Batch, make_batch
from txl_jax.data.streams import Streams

GROUP = 1 << 13
"""The number of tokens that are prefetched together, if one batch has fewer tokens."""


def training_batch(
    streams: Streams,
    step: int,
    epoch_memory: str,
    reset_every: int = 0,
    rows: slice = slice(None),
) -> Batch:
    """Returns the batch of a training step for the streams ``rows``; it depends only on the step.

    The memory is emptied at the first segment of an epoch with ``epoch_memory="reset"``, and at
    steps 0, n, 2n, .. with ``reset_every`` n > 0.
    """
    segment = streams.at_step(step, rows)
    return make_batch(segment, resets_memory(step, segment.first, epoch_memory, reset_every))


def resets_memory(step: int, first: bool, epoch_memory: str, reset_every: int) -> bool:
    """Whether memory is emptied before a step; ``first`` is true for an epoch's first step."""
    again = reset_every > 0 and step % reset_every == 0
    return again or (first and epoch_memory == "reset")


def training_feed(
    streams: Streams,
    start: int,
    stop: int,
    epoch_memory: str,
    per_dispatch: int,
    sharding: jax.sharding.Sharding | None,
    reset_every: int = 0,
    read_step: Callable[..., Any] = training_batch,
) -> Generator[Any, None, None]:
    """Yields batches of the steps ``start`` .. ``stop - 1`` on device, prefetched by a thread.

    With ``per_dispatch`` S > 1 each item has S steps, stacked on a new leading axis.
    ``read_step`` reads the batch of one step, with the arguments of :func:`training_batch`.
    """

    def read(step: int, rows: slice) -> Any:
        steps = range(step, step + per_dispatch)
        parts = [read_step(streams, s, epoch_memory, reset_every, rows) for s in steps]
        return parts[0] if per_dispatch == 1 else jax.tree.map(lambda *x: np.stack(x), *parts)

    put = functools.partial(batch_on_device, sharding=sharding, n_rows=streams.batch_size)
    reads = (functools.partial(read, step) for step in range(start, stop, per_dispatch))
    items = (put(read_rows, axis=int(per_dispatch > 1)) for read_rows in reads)
    return prefetch(items, group=max(1, GROUP // (streams.batch_size * streams.seg_len)))


def batch_on_device(
    read: Callable[[slice], Any], sharding: jax.sharding.Sharding | None, n_rows: int, axis: int = 0
) -> Any:
    """Returns a batch on device; every process reads only the rows of its own devices, once.

    ``read`` takes a slice of rows, and returns this part of the batch. ``sharding`` applies to
    every field of the batch; ``None`` means the default device. ``n_rows`` is B. ``axis`` is the
    axis of the rows: 1 if an axis of steps comes before it.
    """
    if sharding is None or sharding.is_fully_addressable:
        return _put(sharding)(read(slice(0, n_rows)))

    bounds = lambda index: index[axis].indices(n_rows)[:2]  # an index has a slice for each axis
    index_map = sharding.addressable_devices_indices_map((1,) * axis + (n_rows,))
    local_rows = sorted({bounds(index) for index in index_map.values()})
    parts = [read(slice(*rows)) for rows in local_rows]

    def global_array(*shards: np.ndarray) -> jax.Array:
        shape = (*shards[0].shape[:axis], n_rows, *shards[0].shape[axis + 1 :])
        shard_of = dict(zip(local_rows, shards, strict=True))
        return jax.make_array_from_callback(shape, sharding, lambda i: shard_of[bounds(i)])

    return jax.tree.map(global_array, *parts)


@functools.lru_cache(maxsize=8)
def _put(sharding: jax.sharding.Sharding | None) -> Callable[[Any], Any]:
    """Returns a function like ``jax.device_put``, but several times as fast for small arrays."""
    return jax.jit(lambda batch: batch, in_shardings=sharding, out_shardings=sharding)


def prefetch(items: Iterator[Any], size: int = 2, group: int = 1) -> Generator[Any, None, None]:
    """Yields the given items in order; a thread computes up to ``size`` groups in advance.

    Larger groups are faster if items are small. An error of ``items`` is raised after the items
    before it. Closing the generator ends the thread.
    """

    def next_group() -> tuple[list[Any], BaseException | None]:
        """Returns items, and the error or StopIteration after them."""
        found: list[Any] = []
        try:
            for _ in range(group):
                found.append(next(items))
        except BaseException as error:
            return found, error
        return found, None

    pool = concurrent.futures.ThreadPoolExecutor(1, "txl-prefetch")
    try:
        ready = collections.deque(pool.submit(next_group) for _ in range(size))
        error = None
        while error is None:
            found, error = ready.popleft().result()
            ready.append(pool.submit(next_group))
            yield from found
        if not isinstance(error, StopIteration):
            raise error
    finally:
        pool.shutdown(cancel_futures=True)
