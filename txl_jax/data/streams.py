"""Cuts B parallel streams into segments of T tokens; :mod:`txl_jax.data.rows` has a picture.

Training step s takes segment ``s % n_segments`` of epoch ``s // n_segments``, so the number of the
step is the only state. A model without memory reads the C = ``context_len`` tokens before each
segment again. For C = 3, T = 2 and a stream 0 1 2 3 4 with 4 targets:

                 context   segment
      segment 0    . . .     0 1      the stream starts at index 3
      segment 1    . 0 1     2 3      the stream starts at index 1

If all segments have the same length, some tokens are near the start of their segment in every
epoch, and the gradient of their loss never reaches far back. Merity et al. 2018 (variable length
backpropagation) therefore draw a random length for each segment. The limits of the lengths are
those of the published Transformer-XL code. For T = 70 and s = 5:

    length   N(T, s), or one time in twenty N(T/2, s); truncated to an integer in 5 .. T+3s
    arrays   T + 3s positions, a shorter segment is right padded
    epoch 0  |------ 68 ------|------- 73 -------|-- 33 --|------ 71 ------| ..

The lengths depend only on (seed, epoch). The last segment of an epoch ends where the streams end,
so epochs have different numbers of segments.
"""

import bisect
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from txl_jax.config.training import longest_segment
from txl_jax.data.errors import DataError
from txl_jax.data.orders import InOrder, Rolled, ShuffledSentences
from txl_jax.data.pieces import Split, as_pieces
from txl_jax.data.rows import Rows, lay_out
from txl_jax.messages import fields_repr, short_repr

MIN_LENGTH = 5
HALF = 0.05  # the probability that a length is drawn around T/2
_LENGTHS = 0x1E57  # makes lengths independent of other random numbers of the seed


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """The next T tokens of some streams, after up to C tokens of context.

    Example:
      >>> import numpy as np, txl_jax
      >>> first, second, _ = txl_jax.segments(np.arange(21), batch_size=2, seg_len=4)
      >>> first.inputs.tolist(), first.targets.tolist()
      ([[0, 1, 2, 3], [10, 11, 12, 13]], [[1, 2, 3, 4], [11, 12, 13, 14]])
      >>> second.inputs.tolist(), first.first, second.first
      ([[4, 5, 6, 7], [14, 15, 16, 17]], True, False)

    Attributes:
      inputs: int32 [B, C+T], the context and the segment; 0 before the start of a stream.
      targets: int32 [B, T], the token after each of the last T inputs.
      weights: float32 [B, T], 1 for targets and 0 for padding, where inputs and targets are also
        0. A target that begins a document has weight 0 too, unless documents share this token.
      starts: bool [B, C+T], True at the first token of a stream; a model gets it as ``reset``.
      first: True for the first segment of a pass over the text, read with an empty memory.
      resets: bool [B, C+T], True where a document begins; ``None`` without documents.
      lengths: int32 [B], the number of real inputs of each row; ``None`` without documents.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    first: bool
    resets: np.ndarray | None = None
    lengths: np.ndarray | None = None

    __repr__ = fields_repr


class Streams:
    """All segments of B parallel streams, by index; a short last segment is padded to T."""

    def __init__(
        self, rows: Rows, seg_len: int, context_len: int = 0, order: InOrder | None = None
    ):
        """Stores the rows; ``order`` decides in which order an epoch reads each row's tokens."""
        mapped = isinstance(rows.ids, np.memmap)  # a memmap is read faster as a plain array
        self._ids = rows.ids.view(np.ndarray) if mapped else rows.ids
        self.rows, self.order = rows, order or InOrder()
        self.batch_size, self.seg_len, self.context_len = len(rows.first), seg_len, context_len
        self.width = seg_len  # the number of targets in a segment's arrays, with padding
        self.n_targets, self.targets_per_stream = rows.n_targets, int(rows.ends.max())
        self.n_segments = -(-self.targets_per_stream // seg_len)  # of one pass over the text

    def __iter__(self) -> Iterator[Segment]:
        return map(self.segment, range(self.n_segments))

    def segment(self, index: int, rows: slice = slice(None), epoch: int = 0) -> Segment:
        """Returns segment ``index`` of an epoch for the streams ``rows``, or raises IndexError."""
        return self.window(*self._span(index, epoch), rows, epoch)

    def at_step(self, step: int, rows: slice = slice(None)) -> Segment:
        """Returns the segment of a training step; steps are counted from 0 over all epochs."""
        start, n, epoch = self.span_at(step)
        return self.window(start, n, rows, epoch)

    def span_at(self, step: int) -> tuple[int, int, int]:
        """Returns the first target, the number of targets and the epoch of a step's segment."""
        epoch, index = self._find(step)
        return *self._span(index, epoch), epoch

    def epochs(self, step: int) -> float:
        """Returns the number of passes over the text after a number of steps."""
        return step / self.n_segments

    def window(self, start: int, n: int, rows: slice = slice(None), epoch: int = 0) -> Segment:
        """Returns targets ``start`` .. ``start + n - 1`` of streams as a right padded segment."""
        c, first = self.context_len, self.rows.first[rows, None]
        real = np.minimum(np.maximum(self.rows.ends[rows] - start, 0), n)  # np.clip takes longer
        place = np.arange(start - c, start + self.width + 1)
        which = range(*rows.indices(self.batch_size))
        at = first + self.order.places(epoch, which, place)
        tokens = self._ids.take(at, mode="clip").astype(np.int32)  # only padding is out of range
        column, before = np.arange(c + self.width), max(c - start, 0)
        filled = (column >= before) & (column < np.where(real, c + real, 0)[:, None])
        of_target = filled[:, c:]
        starts = np.zeros(filled.shape, bool)
        starts[:, before] = before == c - start
        arrays = (tokens[:, :-1] * filled, tokens[:, c + 1 :] * of_target)
        if (documents := self.rows.documents) is None:
            return Segment(*arrays, of_target.astype(np.float32), starts, first=start == 0)
        begins = documents.begins_at(at) | (at == first)
        scored = of_target if documents.shared else of_target & ~begins[:, c + 1 :]
        more = {"resets": begins[:, :-1] & filled, "lengths": (c + real).astype(np.int32)}
        return Segment(*arrays, scored.astype(np.float32), starts, first=start == 0, **more)

    def preceding_tokens(self, stream: int, n: int) -> np.ndarray:
        """Returns up to n tokens that come before the first token of a stream in the text."""
        begin = int(self.rows.first[stream])
        return self._ids[max(begin - n, 0) if self.rows.has_past else begin : begin]

    def _find(self, step: int) -> tuple[int, int]:
        """Returns the epoch of a step, and the index of its segment in that epoch."""
        return divmod(step, self.n_segments)

    def _span(self, index: int, epoch: int) -> tuple[int, int]:
        """Returns the first target of a segment, and its number of targets in a full stream."""
        if not 0 <= index < self.n_segments:
            found = f"there are {self.n_segments} segments, counted from 0"
            raise IndexError(f"segment {index}: {found}")
        start = index * self.seg_len
        return start, min(self.seg_len, self.targets_per_stream - start)


def drawn_lengths(seed: int, epoch: int, n: int, seg_len: int, std: float) -> np.ndarray:
    """Draws the lengths of the first n segments of an epoch: int64 [n]."""
    rng = np.random.default_rng([seed, _LENGTHS, epoch])
    mean = np.where(rng.random(n) < HALF, seg_len / 2, seg_len)
    lengths = rng.normal(mean, std).astype(np.int64)
    return np.clip(lengths, MIN_LENGTH, longest_segment(seg_len, std))


class DrawnLengths(Streams):
    """Streams in segments of random lengths; ``std`` is s > 0 of N(T, s), in tokens."""

    def __init__(
        self, rows: Rows, seg_len: int, context_len: int, order: InOrder, std: float, seed: int
    ):
        super().__init__(rows, seg_len, context_len, order)
        self._std, self._seed = std, seed
        self.width = longest_segment(seg_len, std)
        self._bounds = functools.lru_cache(maxsize=2)(self._draw_bounds)
        self.n_segments = len(self._bounds(0)) - 1
        self._first_steps = [0]  # of each epoch counted so far, and of the next one
        self._lock = threading.Lock()  # the prefetch thread and the log both look up steps

    def epochs(self, step: int) -> float:
        """Returns the number of passes over the text after some steps, measured in tokens."""
        start, _, epoch = self.span_at(step)
        return epoch + start / self.targets_per_stream

    def _draw_bounds(self, epoch: int) -> np.ndarray:
        """Returns the starts of an epoch's n segments, and the end of the last one, int64 [n+1]."""
        end = self.targets_per_stream
        most = -(-end // MIN_LENGTH)
        ends = np.cumsum(drawn_lengths(self._seed, epoch, most, self.seg_len, self._std))
        return np.concatenate([[0], ends[ends < end], [end]])

    def _span(self, index: int, epoch: int) -> tuple[int, int]:
        start, stop = self._bounds(epoch)[index : index + 2].tolist()
        return start, stop - start

    def _find(self, step: int) -> tuple[int, int]:
        with self._lock:
            while self._first_steps[-1] <= step:
                n_segments = len(self._bounds(len(self._first_steps) - 1)) - 1
                self._first_steps.append(self._first_steps[-1] + n_segments)
            epoch = bisect.bisect_right(self._first_steps, step) - 1
            return epoch, step - self._first_steps[epoch]


def ordered_streams(
    split: Split,
    batch_size: int | np.integer,
    seg_len: int | np.integer,
    drop_remainder: bool = False,
    name: str | None = None,
    vocab_size: int | None = None,
    context_len: int | np.integer = 0,
    key: str = "batch_size",
) -> Streams:
    """Returns the streams of a split for scoring, in the order of the text.

    If ``vocab_size``, V, is given, every id must be below V. Raises DataError if arguments or ids
    are out of range, or if there are too few tokens. Errors name the split ``name``, and the
    setting of the batch size ``key``.
    """
    b, t, c = _sizes(batch_size, seg_len, context_len)
    pieces = as_pieces(split, name or "tokens")
    return Streams(
        lay_out(pieces, b, t, drop_remainder, name or pieces.kind, vocab_size, key), t, c
    )


def shuffled_streams(
    split: Split,
    batch_size: int,
    seg_len: int,
    seed: int,
    seg_len_std: float = 0.0,
    partial_shuffle: bool = False,
    name: str | None = None,
    vocab_size: int | None = None,
    context_len: int = 0,
    key: str = "batch_size",
) -> Streams:
    """Returns the streams of a split for training; sentences are in a random order.

    Any other text keeps its order. With ``partial_shuffle`` each of its streams begins an epoch at
    a random token, and with ``seg_len_std`` s > 0 its segments have random lengths. ``seed``
    decides everything that is random. Other arguments and errors are those of
    :func:`ordered_streams`. A stream can begin inside a document.
    """
    b, t, c = _sizes(batch_size, seg_len, context_len)
    pieces = as_pieces(split, name or "tokens")
    is_text = pieces.kind != "sentences"
    rows = lay_out(pieces, b, t, is_text, name or pieces.kind, vocab_size, key)
    if not is_text:
        return Streams(rows, t, c, ShuffledSentences(pieces, b, seed))
    order = Rolled(len(pieces.ids) // b, seed) if partial_shuffle else InOrder()
    if seg_len_std:
        return DrawnLengths(rows, t, c, order, seg_len_std, seed)
    return Streams(rows, t, c, order)


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
    streams = ordered_streams(split, batch_size, seg_len, drop_remainder, context_len=context_len)
    return iter(streams)


def _sizes(batch_size: Any, seg_len: Any, context_len: Any) -> list[int]:
    """Returns the sizes as ``int``, because arithmetic with a NumPy integer can overflow."""
    given = {"batch_size": batch_size, "seg_len": seg_len, "context_len": context_len}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise DataError(f"{key} = {short_repr(value)}: must be an integer")
        if value < (least := int(key != "context_len")):
            raise DataError(f"{key} = {value}: must be at least {least}")
    return list(map(int, given.values()))
