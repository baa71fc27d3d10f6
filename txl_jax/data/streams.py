"""A token array as B parallel streams, cut into segments of T tokens.

    tokens   0 1 2 3 4 5 6 7 8 9        N = 10, so 9 targets: 1..9;  B = 2, T = 2

    cut="every_target"                  n = ceil(9 / 2) = 5 targets for each stream
      stream 0   0 1 2 3 4 | 5          segment 0   segment 1   segment 2
      stream 1   5 6 7 8 | 9     inputs   0 1         2 3         4 .
                                          5 6         7 8         . .
                                 targets  1 2         3 4         5 .
                                          6 7         8 9         . .
    A point is padding, of weight 0. Every target is scored once, whatever B and T are.

    cut="authors"                       n = N // B = 5 tokens for each stream, so 4 targets
      stream 0   0 1 2 3 4       inputs   0 1 / 5 6   2 3 / 7 8
      stream 1   5 6 7 8 9       targets  1 2 / 6 7   3 4 / 8 9
    As the published code: what does not fill the streams is dropped, and so is the target
    that would cross from one stream into the next (5 here).

Segments follow each other in every stream, so a model that carries memory from one to the next
reads each stream as one long text. A segment is a pure function of its index: training step s
takes segment ``s % n_segments``, and the step is all the state there is.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np

from txl_jax.data.errors import DataError
from txl_jax.data.vocab import check_ids

Cut = Literal["every_target", "authors"]


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """The next T tokens of some streams.

    Attributes:
      inputs: int32 [B, T].
      targets: int32 [B, T], the token after each input.
      weights: float32 [B, T]: 1, or 0 where inputs and targets are padding (and 0 too).
      first: True for the first segment of a pass, which must be met with an empty memory.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    first: bool


class Streams:
    """All segments of a token array, by index.

    Attributes:
      batch_size: B.
      seg_len: T; every segment has this length, a short last one is padded.
      n_segments: segments of one pass; also ``len()``.
      n_targets: targets of one pass, the sum of all weights.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        seg_len: int,
        cut: Cut = "every_target",
        name: str = "tokens",
        vocab_size: int | None = None,
    ):
        """Lays out the streams; nothing is read but for the check of ids.

        Args:
          tokens: integers [N], N >= 2; may be memory-mapped.
          batch_size: B, at least 1.
          seg_len: T, at least 1.
          cut: how the streams lie, see the head of this file.
          name: of the token array, for errors.
          vocab_size: V; if given, all ids are checked to be from 0 to V-1.

        Raises:
          DataError: tokens that are not 1-D integers or too few for B, B or T below 1, an
            unknown cut, or an id out of range.
        """
        tokens = np.asanyarray(tokens)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"{name} has shape {tokens.shape} and type {tokens.dtype}: must be 1-D integers"
            )
        if cut not in get_args(Cut):
            raise DataError(f"cut = {cut!r}: must be one of 'every_target', 'authors'")
        for key, value in (("batch_size", batch_size), ("seg_len", seg_len)):
            if value < 1:
                raise DataError(f"{key} = {value}: must be at least 1")
        largest = len(tokens) - 1 if cut == "every_target" else len(tokens) // 2
        if batch_size > largest:
            raise DataError(
                f"batch_size = {batch_size}: {name} has {len(tokens)} tokens, enough for"
                f" {max(largest, 0)} streams with a target each (cut {cut!r}); use a smaller batch"
                " or a longer text"
            )
        if vocab_size is not None:
            check_ids(tokens, vocab_size, name)
        self.batch_size, self.seg_len = batch_size, seg_len
        self._tokens = tokens
        if cut == "every_target":
            self.n_targets = len(tokens) - 1
            self._stride = -(-self.n_targets // batch_size)  # tokens from stream to stream
            longest = self._stride
        else:
            self._stride = len(tokens) // batch_size
            longest = self._stride - 1
            self.n_targets = batch_size * longest
        self._longest = longest  # targets of a full stream
        self.n_segments = -(-longest // seg_len)

    def __len__(self) -> int:
        return self.n_segments

    def __iter__(self) -> Iterator[Segment]:
        return map(self.segment, range(self.n_segments))

    def segment(self, index: int, rows: slice = slice(None)) -> Segment:
        """Segment ``index`` of the pass, the same whatever was asked for before.

        Args:
          index: from 0 to ``n_segments - 1``.
          rows: which streams; only their tokens are read. The arrays have as many rows.

        Raises:
          IndexError: there is no such segment.
        """
        if not 0 <= index < self.n_segments:
            raise IndexError(f"segment {index}: there are {self.n_segments}, counted from 0")
        streams = range(*rows.indices(self.batch_size))
        inputs, targets = np.zeros((2, len(streams), self.seg_len), np.int32)
        weights = np.zeros((len(streams), self.seg_len), np.float32)
        for row, stream in enumerate(streams):
            start = stream * self._stride + index * self.seg_len
            stop = min(start + self.seg_len, self._end(stream))
            if start < stop:
                piece = self._tokens[start : stop + 1]
                inputs[row, : stop - start] = piece[:-1]
                targets[row, : stop - start] = piece[1:]
                weights[row, : stop - start] = 1
        return Segment(inputs, targets, weights, first=index == 0)

    def _end(self, stream: int) -> int:
        """Position after the last input of a stream."""
        return min(stream * self._stride + self._longest, len(self._tokens) - 1)


def segments(
    tokens: np.ndarray, batch_size: int, seg_len: int, cut: Cut = "every_target"
) -> Iterator[Segment]:
    """The segments of one pass, in order; see :class:`Streams`."""
    return iter(Streams(tokens, batch_size, seg_len, cut))
