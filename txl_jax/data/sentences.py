"""Reads sentences without an order as B parallel streams, for the One Billion Word benchmark.

A text of sentences is one token array with ``<S>`` before, between and after the sentences:

    <S> the cat sat <S> it rained <S> yes <S>        7 words, 3 sentences, 10 targets

A sentence includes both of its ``<S>``: inputs ``<S> it rained``, targets ``it rained <S>``. The
last ``<S>`` of a sentence is also the first one of the next. In TF's stream (protocol ``double``)
there are two between sentences, and a sentence is ``<S> it rained <S> <S>``.

Rows are contiguous ranges of whole sentences with about the same number of tokens, and memory is
carried along each row. In training, every epoch has a new random order in each row: the row's
shards of 1024 sentences are shuffled, and so are the sentences in a shard.

    row b        |  shard 0  |  shard 1  |  shard 2 |        fixed
    epoch e      | 2: 5 0 3… | 0: 9 1 7… | 1: 4 8…  |        drawn from (seed, e, b)

Segment i of epoch e is a pure function of (seed, e, i), so the step is the only state. The
published benchmark is already shuffled, so the range of a row is a random sample of it.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from txl_jax.config.arguments import names_the_nearest
from txl_jax.data.documents import Documents, as_positions
from txl_jax.data.drawn_lengths import DrawnLengths
from txl_jax.data.errors import DataError
from txl_jax.data.streams import BaseStreams, DocumentStreams, Segment, Streams
from txl_jax.data.symbols import check_ids

SHARD = 1024  # sentences
_KEPT = 2  # shuffled shards of each row: the one being read, and the one before it


class Sentences(Sequence[np.ndarray]):
    """The sentences of a text, each ``<S> words <S>``, which are read lazily by index.

    Example:
      >>> import numpy as np, txl_jax
      >>> text = txl_jax.Sentences(np.array([0, 5, 6, 0, 7, 0]), np.array([0, 3, 5]))
      >>> [sentence.tolist() for sentence in text]
      [[0, 5, 6, 0], [0, 7, 0]]

    Attributes:
      tokens: 1-D ids of the whole text, perhaps memory-mapped; the last id is that of ``<S>``.
      offsets: int64 [n+1], the positions where each sentence begins and where the last one ends.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray):
        self.tokens, self.offsets = tokens, as_positions(offsets, "offsets")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Sentences({len(self):,} sentences, {len(self.tokens):,} tokens)"

    def __getitem__(self, index: Any) -> Any:
        """Returns a sentence as 1-D ids, or a slice of sentences, lazily if the step is 1."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return Sentences(self.tokens, self.offsets[start : max(start, stop) + 1])
            return [self[i] for i in range(start, stop, step)]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"sentence {index}: there are {len(self)}")
        return self.tokens[int(self.offsets[at]) : int(self.offsets[at + 1]) + 1]

    @property
    def n_targets(self) -> int:
        """The number of targets: all words, and one ``<S>`` for each sentence (``double``: two)."""
        return int(self.offsets[-1] - self.offsets[0])


class SentenceStreams(BaseStreams):
    """All segments of some sentences, by index."""

    def __init__(
        self,
        sentences: Sentences,
        batch_size: int,
        seg_len: int,
        drop_remainder: bool = False,
        name: str = "sentences",
        vocab_size: int | None = None,
        context_len: int = 0,
        seed: int | None = None,
    ):
        """Lays out the rows; other arguments and errors are those of :class:`Streams`.

        With a ``seed``, every epoch has its own random order. With ``drop_remainder`` (not with a
        seed), as in the published code, each row takes the next sentence when it needs one, and the
        pass ends with the last segment that is full in all rows. Whole rows are then in memory.
        """
        super().__init__(batch_size, seg_len, context_len)
        batch_size, seg_len = self.batch_size, self.seg_len
        if batch_size > len(sentences):
            raise DataError(
                f"batch_size = {batch_size}: {name} has {len(sentences)} sentences, at least one"
                " is needed for each stream; use a smaller batch or more text"
            )
        check_ids(sentences.tokens, vocab_size, name)
        if drop_remainder:
            self._text: Any = _RowsInTurn(sentences, batch_size, seg_len)
        elif seed is None:
            self._text = _RangeRows(sentences, batch_size)
        else:
            self._text = _ShuffledRows(sentences, batch_size, seed)
        self._lay_out(self._text.sizes.tolist())
        if not self.n_segments:
            raise DataError(
                f"batch_size = {batch_size}: {name} does not fill one segment of {seg_len} in"
                " every stream (drop_remainder); use a smaller batch or a shorter segment"
            )

    def preceding_tokens(self, stream: int, n: int) -> np.ndarray:
        """Returns up to n tokens before a row's text; needs no seed and no drop_remainder."""
        return self._text.before(stream, n)

    def _read(self, epoch: int, stream: int, start: int, stop: int) -> np.ndarray:
        return self._text.read(epoch, stream, start, stop)


Split = np.ndarray | Sentences | Documents
"""The tokens of a split."""
AnyStreams = Streams | SentenceStreams | DocumentStreams
TrainingStreams = AnyStreams | DrawnLengths


def ordered_streams(split: Split, batch_size: Any, seg_len: Any, **options: Any) -> AnyStreams:
    """Returns the streams of a split in its order, for scoring; options are those of the class."""
    if isinstance(split, Documents) and not options.pop("drop_remainder", False):
        return DocumentStreams(split, batch_size, seg_len, **options)
    options |= {"drop_remainder": True} if isinstance(split, Documents) else {}
    kind = SentenceStreams if isinstance(split, Sentences) else Streams
    return kind(split, batch_size, seg_len, **options)  # type: ignore[arg-type]


def shuffled_streams(
    split: Split,
    batch_size: int,
    seg_len: int,
    seed: int,
    seg_len_std: float = 0.0,
    partial_shuffle: bool = False,
    **options: Any,
) -> TrainingStreams:
    """Returns the streams of a split for training, with sentences in a random order.

    ``seed`` decides the order of sentences, and the shifts and the lengths of segments of a
    continuous text. Lengths are drawn (:class:`DrawnLengths`) if ``seg_len_std`` s > 0.
    """
    if isinstance(split, Sentences):
        return SentenceStreams(split, batch_size, seg_len, seed=seed, **options)
    options |= {"partial_shuffle_seed": seed if partial_shuffle else None}
    streams = Streams(split, batch_size, seg_len, drop_remainder=True, **options)
    return DrawnLengths(streams, seg_len_std, seed) if seg_len_std else streams


@names_the_nearest()
def segments(
    split: Split,
    batch_size: int | np.integer,
    seg_len: int | np.integer,
    drop_remainder: bool = False,
    context_len: int | np.integer = 0,
) -> Iterator[Segment]:
    """Returns an iterator over the segments of one pass over a split, in order.

    Example:
      >>> import numpy as np, txl_jax
      >>> for seg in txl_jax.segments(np.arange(10), batch_size=1, seg_len=4):
      ...     print(seg.inputs.tolist(), seg.targets.tolist(), seg.weights.tolist())
      [[0, 1, 2, 3]] [[1, 2, 3, 4]] [[1.0, 1.0, 1.0, 1.0]]
      [[4, 5, 6, 7]] [[5, 6, 7, 8]] [[1.0, 1.0, 1.0, 1.0]]
      [[8, 0, 0, 0]] [[9, 0, 0, 0]] [[1.0, 0.0, 0.0, 0.0]]
    """
    options = {"drop_remainder": drop_remainder, "context_len": context_len}
    return iter(ordered_streams(split, batch_size, seg_len, **options))


def flat_tokens(split: Split) -> np.ndarray:
    """Returns all ids of a split in order, 1-D; all but the first are targets, if not documents."""
    if isinstance(split, Documents):
        return split.tokens
    if isinstance(split, Sentences):
        return split.tokens[int(split.offsets[0]) : int(split.offsets[-1]) + 1]
    return split


# The classes below have the text of each row. ``sizes``, int64 [B], are the numbers of targets, and
# ``read(epoch, row, i, j)`` returns the tokens i .. j-1 of a row.


def _bounds(sentences: Sentences, batch_size: int) -> np.ndarray:
    """Returns the first sentence of each row, for rows of nearly equal length: int64 [B+1]."""
    offsets, n = sentences.offsets, len(sentences)
    first, rows = int(offsets[0]), np.arange(batch_size + 1)
    even = first + rows * sentences.n_targets // batch_size
    after = np.clip(np.searchsorted(offsets, even), 1, n)
    nearer_before = even - offsets[after - 1] < offsets[after] - even
    bounds = np.where(nearer_before, after - 1, after).astype(np.int64)
    bounds = np.maximum.accumulate(bounds - rows) + rows  # each row has a sentence
    bounds = np.minimum(bounds, n - batch_size + rows)
    bounds[0], bounds[-1] = 0, n
    return bounds


class _RangeRows:
    """Rows that are contiguous ranges of the sentences, in order."""

    def __init__(self, sentences: Sentences, batch_size: int):
        self._tokens = sentences.tokens
        self._starts = np.asarray(sentences.offsets[_bounds(sentences, batch_size)], np.int64)
        self.sizes = np.diff(self._starts)

    def read(self, epoch: int, row: int, start: int, stop: int) -> np.ndarray:
        return self._tokens[self._starts[row] + start : self._starts[row] + stop]

    def before(self, row: int, n: int) -> np.ndarray:
        begin = self._starts[row]
        return self._tokens[max(begin - n, self._starts[0]) : begin]


class _RowsInTurn:
    """Rows as in the authors' code, where each row takes the next sentence when it needs one."""

    def __init__(self, sentences: Sentences, batch_size: int, seg_len: int):
        rows: list[list[np.ndarray]] = [[] for _ in range(batch_size)]
        filled, following = [0] * batch_size, iter(sentences)
        with contextlib.suppress(StopIteration):
            for full in itertools.count(0, seg_len):  # targets in every row
                for row in range(batch_size):
                    while filled[row] < full + seg_len:
                        rows[row].append(next(following)[:-1])
                        filled[row] += len(rows[row][-1])
        self.sizes = np.full(batch_size, full)
        self._rows = [np.concatenate([*row, sentences[0][:1]]) for row in rows]

    def read(self, epoch: int, row: int, start: int, stop: int) -> np.ndarray:
        return self._rows[row][start:stop]


class _ShuffledRows:
    """Rows that are ranges of the sentences, in another order in each epoch."""

    def __init__(self, sentences: Sentences, batch_size: int, seed: int):
        self._sentences, self._seed = sentences, seed
        bounds = _bounds(sentences, batch_size)
        self.sizes = np.diff(np.asarray(sentences.offsets[bounds], np.int64))
        self._edges = [
            np.append(np.arange(first, last, SHARD), last)
            for first, last in itertools.pairwise(bounds)
        ]
        self._order = functools.lru_cache(batch_size)(self._draw_order)
        self._shard = functools.lru_cache(_KEPT * batch_size)(self._shuffle_shard)

    def read(self, epoch: int, row: int, start: int, stop: int) -> np.ndarray:
        order, ends = self._order(epoch, row)
        place = int(np.searchsorted(ends, start, side="right"))
        parts: list[np.ndarray] = []
        while start < stop and place < len(order):
            begin = int(ends[place - 1]) if place else 0
            text = self._shard(epoch, row, int(order[place]))
            parts.append(text[start - begin : stop - begin])
            start, place = int(ends[place]), place + 1
        if start < stop:  # the ``<S>`` after the last sentence
            parts.append(self._sentences[0][:1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _draw_order(self, epoch: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws the order of a row's shards in an epoch; also returns where each shard ends."""
        edges = np.asarray(self._sentences.offsets[self._edges[row]], np.int64)
        order = self._rng(epoch, row, 0).permutation(len(edges) - 1)
        return order, np.cumsum(np.diff(edges)[order])

    def _shuffle_shard(self, epoch: int, row: int, shard: int) -> np.ndarray:
        """Returns the text of a shard in the order of an epoch, without the last ``<S>``."""
        first, last = self._edges[row][shard : shard + 2]
        offsets = np.asarray(self._sentences.offsets[first : last + 1], np.int64)
        text = np.asarray(self._sentences.tokens[offsets[0] : offsets[-1]])
        order = self._rng(epoch, row, shard + 1).permutation(last - first)
        sizes = np.diff(offsets)[order]
        begins = np.cumsum(sizes) - sizes
        moved = np.repeat(offsets[:-1][order] - offsets[0] - begins, sizes)
        return text[moved + np.arange(len(text))]

    def _rng(self, *where: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *where])
