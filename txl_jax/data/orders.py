"""The order in which the tokens of each row are read in an epoch, a function of (seed, epoch, row).

Without a shuffle, every epoch is the same. With partial shuffle (NVIDIA's code), each row begins
each epoch at a random token of its text and wraps around:

    stream 0   0 1 2 3 4       epoch e, shift 3:   3 4 0 1 2      inputs   3 4   0 1
                                                                  targets  4 0   1 2

Sentences have a new random order in each row and epoch: the row's shards of 1024 sentences are
shuffled, and so are the sentences in a shard. No sentence moves to another row. The published
benchmark is already shuffled, so each row has a random sample of its sentences.

    row b        |  shard 0  |  shard 1  |  shard 2 |        fixed
    epoch e      | 2: 5 0 3… | 0: 9 1 7… | 1: 4 8…  |        drawn from (seed, e, b)
"""

import functools
import itertools

import numpy as np

from txl_jax.data.pieces import Pieces
from txl_jax.data.rows import row_bounds

SHARD = 1024  # sentences
_KEPT = 2  # shuffled shards kept for each row: the current shard, and the shard before it


class InOrder:
    """Reads each row from its first token to its last one."""

    def shift(self, epoch: int, row: int) -> int:
        """Returns the position in a row's text at which the row begins an epoch, from 0."""
        return 0

    def places(self, epoch: int, rows: range, place: np.ndarray) -> np.ndarray:
        """Returns the positions, in the texts of R rows, of W tokens that each row reads: [R,W].

        ``place`` [W] has the places of these tokens in the order in which a row reads its tokens in
        this epoch, counted from 0. If the order is the same in all rows, the result can be [W].
        """
        return place


class Rolled(InOrder):
    """Reads each row from a random token on and wraps around; a row has ``size`` tokens."""

    def __init__(self, size: int, seed: int):
        self._size, self._seed = size, seed

    def shift(self, epoch: int, row: int) -> int:
        """See :meth:`InOrder.shift`."""
        return int(np.random.default_rng([self._seed, epoch, row]).integers(self._size))

    def places(self, epoch: int, rows: range, place: np.ndarray) -> np.ndarray:
        """See :meth:`InOrder.places`."""
        shifts = np.array([self.shift(epoch, row) for row in rows], np.int64)
        return (place + shifts[:, None]) % self._size


class ShuffledSentences(InOrder):
    """Reads the sentences of each row in a new random order in each epoch."""

    def __init__(self, sentences: Pieces, batch_size: int, seed: int):
        self._sentences, self._seed = sentences, seed
        self._edges = [
            np.append(np.arange(first, last, SHARD), last)
            for first, last in itertools.pairwise(row_bounds(sentences, batch_size))
        ]
        self._order = functools.lru_cache(batch_size)(self._draw_order)
        self._shard = functools.lru_cache(_KEPT * batch_size)(self._shuffle_shard)

    def places(self, epoch: int, rows: range, place: np.ndarray) -> np.ndarray:
        """See :meth:`InOrder.places`."""
        found = [self._places_of_row(epoch, row, place) for row in rows]
        return np.array(found, np.int64).reshape(len(rows), len(place))

    def _places_of_row(self, epoch: int, row: int, place: np.ndarray) -> np.ndarray:
        order, begins, ends = self._order(epoch, row)
        size = int(ends[-1])  # the place of the ``<S>`` after the last sentence
        found = np.clip(place, 0, size)
        start, stop = max(int(place[0]), 0), min(int(place[-1]) + 1, size)
        at = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            end, before = min(int(ends[at]), stop), int(ends[at - 1]) if at else 0
            inside = self._shard(epoch, row, int(order[at]))[start - before : end - before]
            found[start - place[0] : end - place[0]] = begins[at] + inside
            start, at = end, at + 1
        return found

    def _draw_order(self, epoch: int, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws the order of a row's shards; also returns where each shard begins and ends.

        A shard begins at a position in the row's text, and ends at a position in the epoch's order.
        """
        edges = self._sentences.edges(self._edges[row])
        order = self._rng(epoch, row, 0).permutation(len(edges) - 1)
        return order, edges[order] - edges[0], np.cumsum(np.diff(edges)[order])

    def _shuffle_shard(self, epoch: int, row: int, shard: int) -> np.ndarray:
        """Returns the positions of a shard's n tokens in the order of an epoch, int32 [n].

        A position counts from the first token of the shard in the text.
        """
        first, last = self._edges[row][shard : shard + 2]
        starts = self._sentences.edges(np.arange(first, last + 1))
        order = self._rng(epoch, row, shard + 1).permutation(last - first)
        sizes = np.diff(starts)[order]
        begins = np.cumsum(sizes) - sizes
        moved = np.repeat(starts[:-1][order] - starts[0] - begins, sizes)
        return (moved + np.arange(len(moved))).astype(np.int32)

    def _rng(self, *where: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *where])
