"""Sentences in no order, as B parallel streams: the One Billion Word benchmark.

A text of sentences is one token array with ``<S>`` before, between and after them:

    <S> the cat sat <S> it rained <S> yes <S>        7 words, 3 sentences, 10 targets

Sentence i is what lies between two of these, with both: inputs ``<S> it rained``, targets
``it rained <S>``. Next to another sentence its last ``<S>`` is that one's first, so no target is
of another sentence than its inputs, and each row of a batch reads one text like the above, whose
memory is carried from sentence to sentence.

With two ``<S>`` between sentences (TF) the second of them begins the next sentence, so that
sentence i is ``<S> it rained <S> <S>``; all that follows holds for it too.

Rows are contiguous ranges of whole sentences with nearly as many tokens each. In training the
order within a row is drawn anew every epoch, in two steps, so that nothing as long as the corpus
is kept or searched: the order of the row's shards of 1024 sentences, and the order in a shard.

    row b        |  shard 0  |  shard 1  |  shard 2 |        fixed
    epoch e      | 2: 5 0 3… | 0: 9 1 7… | 1: 4 8…  |        drawn from (seed, e, b)

Segment i of epoch e is a pure function of (seed, e, i): any of them is made from one shard a row,
and the step is all the state there is. The published benchmark is shuffled already, so rows that
stay in their range do not see less of it at a time than the authors' do in theirs.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from txl_jax.data.drawn_lengths import DrawnLengths
from txl_jax.data.errors import DataError
from txl_jax.data.streams import Segment, Streams, read_segment
from txl_jax.data.vocab import check_ids

SHARD = 1024
"""Sentences that are shuffled among each other."""
_KEPT = 2
"""Shards of each row that are kept ready: the one being read, and the one before it."""


class Sentences(Sequence[np.ndarray]):
    """The sentences of a text, by index, each ``<S> words <S>``; read when they are asked for.

    In TF's stream (protocol ``double``) each is ``<S> words <S> <S>``: the last ``<S>`` is the next
    one's first, and there is one after the last sentence too.

    Example:
      >>> import numpy as np, txl_jax
      >>> text = txl_jax.Sentences(np.array([0, 5, 6, 0, 7, 0]), np.array([0, 3, 5]))
      >>> [sentence.tolist() for sentence in text]
      [[0, 5, 6, 0], [0, 7, 0]]

    Attributes:
      tokens: 1-D ids of the whole text, may be memory-mapped; the last is ``<S>``.
      offsets: int64 [n+1]: where each sentence begins, and where the last one ends.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray):
        self.tokens, self.offsets = tokens, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> "Sequence[np.ndarray]": ...
    def __getitem__(self, index):
        """A sentence as 1-D ids; a slice gives sentences, lazily where the step is 1."""
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
        """Targets of all sentences: their words, and a ``<S>`` (``double``: two) each."""
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def dtype(self) -> np.dtype:
        """Of the ids."""
        return self.tokens.dtype


class SentenceStreams:
    """All segments of some sentences, by index; the interface of :class:`Streams`.

    Attributes:
      batch_size: B.
      seg_len: T; every segment has this length, a row that is over is padded.
      context_len: C.
      n_segments: segments of one pass; also ``len()``.
      n_targets: targets of one pass, the sum of all weights.
      seed: of the order; ``None``: the order of the text.
    """

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
        """Lays out the rows; little is read but for the check of ids.

        Args:
          sentences: at least B.
          batch_size: B, at least 1.
          seg_len: T, at least 1.
          drop_remainder: False: rows are ranges of sentences, and every target of a pass is
            scored once. True: each row takes the next sentence when it needs one, and the pass
            ends with the last segment that is full in all rows, as in the published code; whole
            rows are held in memory. Not with a seed.
          name: of the text, for errors.
          vocab_size: V; if given, all ids are checked to be from 0 to V-1.
          context_len: C, tokens of the row given again before each segment.
          seed: if given, every epoch has an order of its own.

        Raises:
          DataError: too few sentences for B, B or T below 1, C below 0, drop_remainder
            with a seed, or an id out of range.
        """
        if drop_remainder and seed is not None:
            raise DataError("drop_remainder: is for sentences in order; leave the seed out")
        lengths = (("batch_size", batch_size, 1), ("seg_len", seg_len, 1))
        for key, value, least in (*lengths, ("context_len", context_len, 0)):
            if value < least:
                raise DataError(f"{key} = {value}: must be at least {least}")
        if batch_size > len(sentences):
            raise DataError(
                f"batch_size = {batch_size}: {name} has {len(sentences)} sentences, at least one"
                " is needed for each stream; use a smaller batch or more text"
            )
        if vocab_size is not None:
            check_ids(sentences.tokens, vocab_size, name)
        self.batch_size, self.seg_len, self.context_len = batch_size, seg_len, context_len
        self.seed = seed
        if drop_remainder:
            dealt, self.n_segments = _dealt(sentences, batch_size, seg_len)
            if not self.n_segments:
                raise DataError(
                    f"batch_size = {batch_size}: {name} does not fill one segment of {seg_len} in"
                    " every stream (drop_remainder); use a smaller batch or a shorter segment"
                )
            self._text: _Texts = _Dealt(sentences, dealt)
            self._totals = np.full(batch_size, self.n_segments * seg_len)
        else:
            bounds = _bounds(sentences, batch_size)
            if seed is None:
                self._text = _InOrder(sentences, bounds)
            else:
                self._text = _Shuffled(sentences, bounds, seed)
            self._totals = np.diff(np.asarray(sentences.offsets[bounds], np.int64))
            self.n_segments = -(-int(self._totals.max()) // seg_len)
        self.n_targets = int(self._totals.sum())

    def __len__(self) -> int:
        return self.n_segments

    def __iter__(self) -> Iterator[Segment]:
        return map(self.segment, range(self.n_segments))

    def segment(self, index: int, rows: slice = slice(None), epoch: int = 0) -> Segment:
        """Segment ``index`` of an epoch, the same whatever was asked for before.

        Args:
          index: from 0 to ``n_segments - 1``.
          rows: which streams; only their sentences are read. The arrays have as many rows.
          epoch: from 0; without a seed all are alike.

        Raises:
          IndexError: there is no such segment.
        """
        if not 0 <= index < self.n_segments:
            raise IndexError(f"segment {index}: there are {self.n_segments}, counted from 0")
        ends = {b: int(self._totals[b]) for b in range(*rows.indices(self.batch_size))}
        read = lambda stream, i, j: self._text.read(epoch, stream, i, j)
        start, t = index * self.seg_len, self.seg_len
        return read_segment(read, ends, start, t, t, self.context_len)

    def at_step(self, step: int, rows: slice = slice(None)) -> Segment:
        """The segment of a training step, counted from 0 over all epochs."""
        return self.segment(step % self.n_segments, rows, step // self.n_segments)

    def epochs(self, step: int) -> float:
        """Passes over the text that are done after a number of steps."""
        return step / self.n_segments

    def preceding_tokens(self, stream: int, n: int) -> np.ndarray:
        """Up to n tokens of the text that come before a row's first one.

        Only where rows are ranges of the text in its order: no seed, no drop_remainder.
        """
        return self._text.preceding_tokens(stream, n)


AnyStreams = Streams | SentenceStreams
TrainingStreams = AnyStreams | DrawnLengths


def ordered_streams(
    split: np.ndarray | Sentences,
    batch_size: int,
    seg_len: int,
    drop_remainder: bool = False,
    name: str = "tokens",
    vocab_size: int | None = None,
    context_len: int = 0,
) -> AnyStreams:
    """A split in its own order, to be scored: of a token array or of sentences."""
    about = drop_remainder, name, vocab_size, context_len
    if isinstance(split, Sentences):
        return SentenceStreams(split, batch_size, seg_len, *about)
    return Streams(split, batch_size, seg_len, *about)


def shuffled_streams(
    split: np.ndarray | Sentences,
    batch_size: int,
    seg_len: int,
    seed: int,
    name: str = "tokens",
    vocab_size: int | None = None,
    context_len: int = 0,
    seg_len_std: float = 0.0,
    partial_shuffle: bool = False,
) -> TrainingStreams:
    """A split to be trained on: sentences in an order of each epoch, a text as the authors cut it.

    Args:
      split, batch_size, seg_len, name, vocab_size, context_len: see :class:`Streams`.
      seed: of the order of sentences, of drawn lengths, of shifts.
      seg_len_std: s > 0: segments have lengths of their own, see :class:`DrawnLengths`.
      partial_shuffle: in each epoch every stream begins at a random place of its own.

    Raises:
      DataError: what :class:`Streams` refuses; drawn lengths or rolling for sentences.
    """
    if not isinstance(split, Sentences):
        shuffle_seed = seed if partial_shuffle else None
        streams = Streams(
            split, batch_size, seg_len, True, name, vocab_size, context_len, shuffle_seed
        )
        return DrawnLengths(streams, seg_len_std, seed) if seg_len_std else streams
    for key, value in (("seg_len_std", seg_len_std), ("partial_shuffle", partial_shuffle)):
        if value:
            raise DataError(f"{key} = {value}: {name} is of sentences, which have no one order")
    return SentenceStreams(
        split,
        batch_size,
        seg_len,
        name=name,
        vocab_size=vocab_size,
        context_len=context_len,
        seed=seed,
    )


def segments(
    split: np.ndarray | Sentences,
    batch_size: int,
    seg_len: int,
    drop_remainder: bool = False,
    context_len: int = 0,
) -> Iterator[Segment]:
    """The segments of one pass over a token array or sentences, in their order.

    See :class:`~txl_jax.data.streams.Streams` and :class:`SentenceStreams`.

    Example:
      >>> import numpy as np, txl_jax
      >>> for seg in txl_jax.segments(np.arange(10), batch_size=1, seg_len=4):
      ...     print(seg.inputs.tolist(), seg.targets.tolist(), seg.weights.tolist())
      [[0, 1, 2, 3]] [[1, 2, 3, 4]] [[1.0, 1.0, 1.0, 1.0]]
      [[4, 5, 6, 7]] [[5, 6, 7, 8]] [[1.0, 1.0, 1.0, 1.0]]
      [[8, 0, 0, 0]] [[9, 0, 0, 0]] [[1.0, 0.0, 0.0, 0.0]]
    """
    return iter(
        ordered_streams(split, batch_size, seg_len, drop_remainder, context_len=context_len)
    )


def flat_tokens(split: np.ndarray | Sentences) -> np.ndarray:
    """All ids of a split, 1-D, in their order; all but the first are targets."""
    if isinstance(split, Sentences):
        return split.tokens[int(split.offsets[0]) : int(split.offsets[-1]) + 1]
    return split


# --------------------------------------------------------------------------------------
# The text that each row reads.


def _bounds(sentences: Sentences, batch_size: int) -> np.ndarray:
    """int64 [B+1]: the sentence that each row begins with, where the tokens are cut evenly."""
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


class _Texts:
    """What the rows of a batch read."""

    def read(self, epoch: int, row: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of the row's text."""
        raise NotImplementedError

    def preceding_tokens(self, row: int, n: int) -> np.ndarray:
        """Up to n tokens before the row's text."""
        raise NotImplementedError(f"{type(self).__name__}: rows do not follow each other")


class _InOrder(_Texts):
    def __init__(self, sentences: Sentences, bounds: np.ndarray):
        self._tokens = sentences.tokens
        self._starts = [int(start) for start in sentences.offsets[bounds]]

    def read(self, epoch: int, row: int, start: int, stop: int) -> np.ndarray:
        return self._tokens[self._starts[row] + start : self._starts[row] + stop]

    def preceding_tokens(self, row: int, n: int) -> np.ndarray:
        begin = self._starts[row]
        return self._tokens[max(begin - n, self._starts[0]) : begin]


class _Dealt(_Texts):
    def __init__(self, sentences: Sentences, dealt: list[list[int]]):
        self._rows = [
            np.concatenate([*(sentences[i][:-1] for i in row), sentences[row[-1]][-1:]])
            for row in dealt
        ]

    def read(self, epoch: int, row: int, start: int, stop: int) -> np.ndarray:
        return self._rows[row][start:stop]


class _Shuffled(_Texts):
    def __init__(self, sentences: Sentences, bounds: np.ndarray, seed: int):
        self._sentences, self._seed = sentences, seed
        self._edges = [
            np.append(np.arange(bounds[row], bounds[row + 1], SHARD), bounds[row + 1])
            for row in range(len(bounds) - 1)
        ]
        self._orders: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}
        self._shards: dict[int, collections.OrderedDict[tuple[int, int], np.ndarray]] = {}

    def read(self, epoch: int, row: int, start: int, stop: int) -> np.ndarray:
        order, ends = self._order(epoch, row)
        place = int(np.searchsorted(ends, start, side="right"))
        parts: list[np.ndarray] = []
        while start < stop and place < len(order):
            begin = int(ends[place - 1]) if place else 0
            text = self._shard(epoch, row, int(order[place]))
            parts.append(text[start - begin : stop - begin])
            start, place = int(ends[place]), place + 1
        if start < stop:  # past the last sentence there is its ``<S>``
            parts.append(self._sentences[0][:1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _order(self, epoch: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards of a row in the order of an epoch, and where each of them ends."""
        kept = self._orders.get(row)
        if kept is None or kept[0] != epoch:
            edges = np.asarray(self._sentences.offsets[self._edges[row]], np.int64)
            order = self._draw(epoch, row, 0).permutation(len(edges) - 1)
            kept = self._orders[row] = epoch, order, np.cumsum(np.diff(edges)[order])
        return kept[1], kept[2]

    def _shard(self, epoch: int, row: int, shard: int) -> np.ndarray:
        """A shard's text in the order of an epoch, without the last ``<S>``."""
        kept = self._shards.setdefault(row, collections.OrderedDict())
        text = kept.get((epoch, shard))
        if text is None:
            first, last = self._edges[row][shard : shard + 2]
            text = self._shuffled(int(first), int(last), self._draw(epoch, row, shard + 1))
            kept[epoch, shard] = text
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        return text

    def _shuffled(self, first: int, last: int, draw: np.random.Generator) -> np.ndarray:
        offsets = np.asarray(self._sentences.offsets[first : last + 1], np.int64)
        text = np.asarray(self._sentences.tokens[offsets[0] : offsets[-1]])
        order = draw.permutation(last - first)
        sizes = np.diff(offsets)[order]
        begins = np.cumsum(sizes) - sizes
        moved = np.repeat(offsets[:-1][order] - offsets[0] - begins, sizes)
        return text[moved + np.arange(len(text))]

    def _draw(self, *where: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *where])


def _dealt(sentences: Sentences, batch_size: int, seg_len: int) -> tuple[list[list[int]], int]:
    """The sentences of each row as the authors deal them, and the number of full segments."""
    sizes = np.diff(np.asarray(sentences.offsets, np.int64)).tolist()
    rows: list[list[int]] = [[] for _ in range(batch_size)]
    filled, following, n_segments = [0] * batch_size, 0, 0
    while True:
        for row in range(batch_size):
            while filled[row] < (n_segments + 1) * seg_len:
                if following == len(sizes):
                    return rows, n_segments
                rows[row].append(following)
                filled[row] += sizes[following]
                following += 1
        n_segments += 1
