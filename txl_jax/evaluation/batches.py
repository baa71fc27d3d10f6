"""The segments that an evaluation reads, as batches on the devices."""

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from txl_jax.config import ProtocolConfig
from txl_jax.data.batch import Batch, make_batch, warm_up_batches
from txl_jax.data.feed import batch_on_device
from txl_jax.data.sentences import AnyStreams
from txl_jax.parallel.shardings import Shardings


class EvaluationBatches:
    """Segments of B streams under a protocol, padded with empty rows for all devices.

    ``rows``: B rounded up to a multiple of the devices that share them; ``warm_up``: the number of
    segments that are read before the ``scored`` ones.
    """

    def __init__(self, streams: AnyStreams, protocol: ProtocolConfig, shardings: Shardings):
        self._streams, self._sharding = streams, shardings.rows()
        self.rows = -(-protocol.batch_size // shardings.row_devices) * shardings.row_devices
        self._warm_up_len = 0  # at most the text before the last stream
        if protocol.warm_start:
            last = protocol.batch_size - 1
            self._warm_up_len = len(streams.preceding_tokens(last, protocol.warm_start))
        self.warm_up = -(-self._warm_up_len // protocol.seg_len)
        self.scored = min(streams.n_segments, protocol.max_segments or streams.n_segments)

    def shapes(self) -> Batch:
        """Shapes and dtypes of a batch."""
        batch = make_batch(self._streams.segment(0), reset_memory=False)
        shape = lambda x: jax.ShapeDtypeStruct((self.rows, *x.shape[1:]), x.dtype)
        return jax.tree.map(shape, batch)

    def __iter__(self) -> Iterator[Batch]:
        """The warm-up segments, then the scored ones."""
        warm_up = functools.cache(
            lambda *rows: warm_up_batches(self._streams, self._warm_up_len, slice(*rows))
        )

        def read(index: int, rows: slice) -> Batch:
            if index < self.warm_up:
                return warm_up(rows.start, rows.stop)[index]
            batch = make_batch(self._streams.segment(index - self.warm_up, rows), False)
            if index and index == self.warm_up:  # streams without warm-up text start empty
                has_text = [b.reset.any(axis=1) for b in warm_up(rows.start, rows.stop)]
                batch = batch.replace(reset=~np.any(has_text, axis=0))
            return batch

        return self._on_device(read, self.warm_up + self.scored)

    def first(self, n: int) -> Iterator[Batch]:
        """The first n segments, without warm-up; the streams start again where they end."""

        def read(index: int, rows: slice) -> Batch:
            segment = self._streams.at_step(index, rows)
            return make_batch(segment, reset_memory=segment.first and index > 0)

        return self._on_device(read, n)

    def _on_device(self, read: Callable[[int, slice], Batch], n: int) -> Iterator[Batch]:
        def padded(index: int, rows: slice) -> Batch:
            stop = max(rows.start, min(rows.stop, self._streams.batch_size))
            pad = lambda x: np.pad(x, [(0, rows.stop - stop)] + [(0, 0)] * (x.ndim - 1))
            return jax.tree.map(pad, read(index, slice(rows.start, stop)))

        for index in range(n):
            yield batch_on_device(functools.partial(padded, index), self._sharding, self.rows)
