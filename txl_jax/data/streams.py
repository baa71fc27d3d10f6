"""Reads a token array as B parallel streams, which are cut into segments of T tokens.

    tokens   0 1 2 3 4 5 6 7 8 9        N = 10, so 9 targets: 1..9;  B = 2, T = 2

    drop_remainder=False                n = ceil(9 / 2) = 5 targets for each stream
      stream 0   0 1 2 3 4 | 5          segment 0   segment 1   segment 2
      stream 1   5 6 7 8 | 9     inputs   0 1         2 3         4 .
                                          5 6         7 8         . .
                                 targets  1 2         3 4         5 .
                                          6 7         8 9         . .
    A point is padding, with weight 0. Every target is scored once for any B and T.

    drop_remainder=True                 n = N // B = 5 tokens for each stream, so 4 targets
      stream 0   0 1 2 3 4       inputs   0 1 / 5 6   2 3 / 7 8
      stream 1   5 6 7 8 9       targets  1 2 / 6 7   3 4 / 8 9
    As in the published code, the remainder of the tokens is dropped, and so is the target that
    would cross from one stream into the next (5 here).

Training step s takes segment ``s % n_segments``, so the step is the only state. A model without
memory reads the last C = ``context_len`` tokens of the stream again. For C = 3 and stream 0 of the
first picture:

                 context   segment
      segment 0    . . .     0 1      starts at 3 of 5
      segment 1    . 0 1     2 3      starts at 1
      segment 2    1 2 3     4 .      -

With partial shuffle (NVIDIA's code), each stream begins each epoch at a random token of its text
and wraps around. The token is drawn from (seed, epoch, stream):

    stream 0   0 1 2 3 4       epoch e, shift 3:   3 4 0 1 2      inputs   3 4   0 1
                                                                  targets  4 0   1 2
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from txl_jax.data.documents import Documents
from txl_jax.data.errors import DataError
from txl_jax.data.symbols import check_ids
from txl_jax.messages import fields_repr, short_repr


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
      weights: float32 [B, T], 1, or 0 for padding, where inputs and targets are also 0. A target
        that would cross a boundary of documents has weight 0 too.
      starts: bool [B, C+T], True at the first token of a stream; the argument ``reset`` of a model.
      first: True for the first segment of a pass, which must be read with an empty memory.
      resets: bool [B, C+T], True where a document begins; ``None`` without documents.
      lengths: int32 [B], the real inputs of each row; ``None`` without documents.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    first: bool
    resets: np.ndarray | None = None
    lengths: np.ndarray | None = None

    __repr__ = fields_repr


def read_segment(
    read: Callable[[int, int, int], np.ndarray],
    ends: dict[int, int],
    start: int,
    n: int,
    width: int,
    context_len: int = 0,
) -> Segment:
    """Reads the segment with targets ``start`` .. ``start + n - 1``, right padded to ``width``, T.

    ``read(stream, i, j)`` returns tokens i .. j-1. ``ends`` are the streams' numbers of targets.
    """
    before = min(context_len, start)  # the number of tokens of context
    real = _real_targets(list(ends.values()), start, n)
    tokens = np.zeros((len(ends), context_len + width + 1), np.int32)
    for row, stream in enumerate(ends):
        if real[row]:
            stop = start + int(real[row]) + 1
            piece = read(stream, start - before, stop)
            tokens[row, context_len - before :][: len(piece)] = piece
    return _segment(tokens, real, start, context_len)


def _real_targets(ends: Sequence[int], start: int, n: int) -> np.ndarray:
    """Returns how many of the targets ``start`` .. ``start + n - 1`` each row has, int [B]."""
    return np.minimum(np.maximum(np.subtract(ends, start), 0), n)  # np.clip takes twice the time


def _segment(
    tokens: np.ndarray,
    real: np.ndarray,
    start: int,
    context_len: int,
    begins: np.ndarray | None = None,
    shared: bool = False,
) -> Segment:
    """Returns a segment of the tokens at ``start - C`` .. ``start + T``, [B, C+T+1].

    Only ``real`` [B] targets are used. ``begins`` [B, C+T+1] is True where a document begins.
    """
    c, first = context_len, max(context_len - start, 0)
    column = np.arange(tokens.shape[1] - 1)
    filled = (column >= first) & (column < np.where(real, c + real, 0)[:, None])
    of_target = filled[:, c:]
    starts = np.zeros(filled.shape, bool)
    starts[:, first] = first == c - start
    arrays = (tokens[:, :-1] * filled, tokens[:, c + 1 :] * of_target)
    if begins is None:
        return Segment(*arrays, of_target.astype(np.float32), starts, first=start == 0)
    scored = of_target if shared else of_target & ~begins[:, c + 1 :]
    more = {"resets": begins[:, :-1] & filled, "lengths": (c + real).astype(np.int32)}
    return Segment(*arrays, scored.astype(np.float32), starts, first=start == 0, **more)


def _size(key: str, value: Any, least: int) -> int:
    """Returns a number as ``int``, since arithmetic with a NumPy integer may overflow."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise DataError(f"{key} = {short_repr(value)}: must be an integer")
    if value < least:
        raise DataError(f"{key} = {value}: must be at least {least}")
    return int(value)


class BaseStreams:
    """All segments of B parallel streams, by index; a short last segment is padded to T."""

    def __init__(self, batch_size: int, seg_len: int, context_len: int):
        self.batch_size = _size("batch_size", batch_size, 1)
        self.seg_len = _size("seg_len", seg_len, 1)
        self.context_len = _size("context_len", context_len, 0)

    def _lay_out(self, ends: Sequence[int]) -> None:
        """Sets the numbers of targets of each stream, and those of one pass."""
        self._ends = ends
        self.n_targets, self.n_segments = sum(ends), -(-max(ends) // self.seg_len)

    def __iter__(self) -> Iterator[Segment]:
        return map(self.segment, range(self.n_segments))

    def segment(self, index: int, rows: slice = slice(None), epoch: int = 0) -> Segment:
        """Returns segment ``index`` of an epoch for the streams ``rows``, or raises IndexError."""
        if not 0 <= index < self.n_segments:
            raise IndexError(f"segment {index}: there are {self.n_segments}, counted from 0")
        return self.window(index * self.seg_len, self.seg_len, self.seg_len, rows, epoch)

    def window(
        self, start: int, n: int, width: int, rows: slice = slice(None), epoch: int = 0
    ) -> Segment:
        """Returns targets ``start`` .. ``start + n - 1`` of each stream, padded to ``width``."""
        which = range(*rows.indices(self.batch_size))
        ends = {row: self._ends[row] for row in which}
        read = functools.partial(self._read, epoch)
        return read_segment(read, ends, start, n, width, self.context_len)

    def at_step(self, step: int, rows: slice = slice(None)) -> Segment:
        """Returns the segment of a training step; steps are counted from 0 over all epochs."""
        return self.segment(step % self.n_segments, rows, step // self.n_segments)

    def epochs(self, step: int) -> float:
        """Returns the number of passes over the text after a number of steps."""
        return step / self.n_segments

    def _read(self, epoch: int, stream: int, start: int, stop: int) -> np.ndarray:
        """Returns tokens ``start`` .. ``stop - 1`` of a stream in the order of an epoch."""
        raise NotImplementedError


class ArrayStreams(BaseStreams):
    """Streams of one token array, whose segments are read for all rows at once."""

    documents: Documents | None = None

    def _lay_out_in(self, tokens: np.ndarray, first: np.ndarray, ends: Sequence[int]) -> None:
        """Sets the tokens, the position of each stream's first one [B], and the numbers."""
        mapped = isinstance(tokens, np.memmap)  # read faster as a plain array
        self._tokens, self._first = tokens.view(np.ndarray) if mapped else tokens, first
        self._lay_out(ends)

    def window(self, start, n, width, rows=slice(None), epoch=0):
        """See :meth:`BaseStreams.window`."""
        c, first = self.context_len, self._first[rows, None]
        real = _real_targets(self._ends[rows], start, n)
        at = first + self._places(epoch, rows, np.arange(start - c, start + width + 1))
        tokens = self._tokens.take(at, mode="clip").astype(np.int32)  # clips padding only
        if self.documents is None:
            return _segment(tokens, real, start, c)
        begins = self.documents.begins_at(at) | (at == first)
        return _segment(tokens, real, start, c, begins, self.documents.shared)

    def _places(self, epoch: int, rows: slice, place: np.ndarray) -> np.ndarray:
        """Returns the places in the texts of streams that are read as ``place`` [W], [R,W]."""
        return place


class Streams(ArrayStreams):
    """All segments of a token array, by index; a full stream has ``targets_per_stream`` targets."""

    def __init__(
        self,
        tokens: np.ndarray | Documents,
        batch_size: int,
        seg_len: int,
        drop_remainder: bool = False,
        name: str = "tokens",
        vocab_size: int | None = None,
        context_len: int = 0,
        partial_shuffle_seed: int | None = None,
    ):
        """Lays out the streams of integers [N] or documents, which ``name`` names in errors.

        A stream may begin inside a document; memory is reset there as well.
        Ids must be below ``vocab_size``, V, if it is given. Partial shuffle needs a seed and
        ``drop_remainder``. Raises DataError if arguments or ids are out of range or tokens too few.
        """
        self.documents = tokens if isinstance(tokens, Documents) else None
        tokens = np.asanyarray(tokens.tokens if isinstance(tokens, Documents) else tokens)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"{name} has shape {tokens.shape} and type {tokens.dtype}: must be 1-D integers"
            )
        if partial_shuffle_seed is not None and not drop_remainder:
            raise DataError("partial_shuffle_seed: needs drop_remainder=True")
        super().__init__(batch_size, seg_len, context_len)
        batch_size = self.batch_size
        largest = len(tokens) // 2 if drop_remainder else len(tokens) - 1
        if batch_size > largest:
            raise DataError(
                f"batch_size = {batch_size}: {name} has {len(tokens)} tokens, enough for"
                f" {max(largest, 0)} streams with a target each; use a smaller batch"
                " or a longer text"
            )
        check_ids(tokens, vocab_size, name)
        self._seed = partial_shuffle_seed
        n = len(tokens) - 1
        self._stride = len(tokens) // batch_size if drop_remainder else -(-n // batch_size)
        self.targets_per_stream = self._stride - int(drop_remainder)
        first = np.arange(batch_size) * self._stride
        ends = np.clip(n - first, 0, self.targets_per_stream)
        self._lay_out_in(tokens, first, ends.tolist())
        if self.documents is not None and not self.documents.shared:
            edges = np.stack([first, first + ends]) + 1
            before = np.searchsorted(self.documents.starts, edges)
            self.n_targets -= int((before[1] - before[0]).sum())

    def span_at(self, step: int) -> tuple[int, int, int]:
        """Returns the first target, the number of targets and the epoch of a step's segment."""
        epoch, index = divmod(step, self.n_segments)
        start = index * self.seg_len
        return start, min(self.seg_len, self.targets_per_stream - start), epoch

    def preceding_tokens(self, stream: int, n: int) -> np.ndarray:
        """Returns up to n tokens of the text before the first token of a stream."""
        begin = stream * self._stride
        return self._tokens[max(begin - n, 0) : begin]

    def stream_begins(self) -> np.ndarray | None:
        """Tells where documents and streams begin, bool [B,n]; ``None`` without documents."""
        if self.documents is None:
            return None
        n = self.batch_size * self._stride
        flags = np.zeros(n, bool)
        flags[self.documents.starts[: np.searchsorted(self.documents.starts, n)]] = True
        flags[self._first] = True
        return flags.reshape(self.batch_size, -1)

    def stream_tokens(self) -> np.ndarray:
        """Returns the unshuffled tokens of every stream, int32 [B,n]; needs drop_remainder."""
        used = self._tokens[: self.batch_size * self._stride]
        return np.asarray(used, np.int32).reshape(self.batch_size, self._stride)

    def shifts(self, epoch: int) -> np.ndarray:
        """Returns the :meth:`shift` of every stream, int32 [B]."""
        return np.array([self.shift(epoch, b) for b in range(self.batch_size)], np.int32)

    def shift(self, epoch: int, stream: int) -> int:
        """Returns the position in a stream's text at which the stream begins an epoch, from 0."""
        if self._seed is None:
            return 0
        return int(np.random.default_rng([self._seed, epoch, stream]).integers(self._stride))

    def _places(self, epoch: int, rows: slice, place: np.ndarray) -> np.ndarray:
        if self._seed is None:
            return place
        return (place + self.shifts(epoch)[rows, None]) % self._stride


class DocumentStreams(ArrayStreams):
    """All segments of whole documents in order, by index; rows have about the same length.

    Each row begins with a document, so the losses do not depend on the number of rows. If there are
    fewer documents than rows, some rows are empty.
    """

    documents: Documents

    def __init__(
        self,
        documents: Documents,
        batch_size: int,
        seg_len: int,
        name: str = "documents",
        vocab_size: int | None = None,
        context_len: int = 0,
    ):
        """Lays out the rows; arguments and errors are those of :class:`Streams`."""
        super().__init__(batch_size, seg_len, context_len)
        if documents.n_targets < 1:
            raise DataError(f"{name} has no target; give longer documents")
        check_ids(documents.tokens, vocab_size, name)
        batch_size = self.batch_size
        self.documents, starts, n = documents, documents.starts, len(documents.tokens)
        even = np.arange(1, batch_size) * n // batch_size
        after = np.searchsorted(starts, even)
        ends = np.append(starts, n)
        nearer_before = even - ends[np.maximum(after - 1, 0)] < ends[after] - even
        inner = ends[np.where(nearer_before, after - 1, after)]
        edges = np.concatenate([[0], inner, [n]]).astype(np.int64)
        sizes, last_shared = np.diff(edges), documents.shared & (edges[1:] < n)
        ends = np.where(sizes > 0, sizes - 1 + last_shared, 0)
        self._lay_out_in(documents.tokens, edges[:-1], ends.tolist())
        self.n_targets = documents.n_targets

    def preceding_tokens(self, stream: int, n: int) -> np.ndarray:
        """Returns no tokens, because the first document of a row needs none."""
        return self.documents.tokens[:0]
