"""Cuts streams into segments of random lengths, as in the Penn Treebank recipe.

With fixed segments, the gradient of some tokens' loss never reaches far back. Merity et al. 2018
(variable length backpropagation) therefore draw a length for each segment. The limits of the
lengths are those of the published Transformer-XL code. For T = 70 and s = 5:

    length   N(T, s), or one time in twenty N(T/2, s); truncated to an integer in 5 .. T+3s
    arrays   T + 3s positions, a shorter segment is right padded
    epoch 0  |------ 68 ------|------- 73 -------|-- 33 --|------ 71 ------| ..

The lengths of an epoch are drawn from (seed, epoch). Epochs have different numbers of segments,
since the last segment of each ends at the end of the streams.
"""

import bisect
import functools
import threading

import numpy as np

from txl_jax.config import longest_segment
from txl_jax.data.streams import Segment, Streams

MIN_LENGTH = 5
HALF = 0.05  # the probability that a length is drawn around T/2
_LENGTHS = 0x1E57  # makes these random numbers independent of others with the same seed


def drawn_lengths(seed: int, epoch: int, n: int, seg_len: int, std: float) -> np.ndarray:
    """Draws the first n lengths of segments of an epoch, int64 [n]."""
    rng = np.random.default_rng([seed, _LENGTHS, epoch])
    mean = np.where(rng.random(n) < HALF, seg_len / 2, seg_len)
    lengths = rng.normal(mean, std).astype(np.int64)
    return np.clip(lengths, MIN_LENGTH, longest_segment(seg_len, std))


class DrawnLengths:
    """Streams in segments of random lengths, padded to ``max_len``; ``std`` is s > 0, in tokens."""

    def __init__(self, streams: Streams, std: float, seed: int):
        self._streams, self._std, self._seed = streams, std, seed
        self.batch_size, self.seg_len = streams.batch_size, streams.seg_len
        self.context_len, self.n_targets = streams.context_len, streams.n_targets
        self.max_len = longest_segment(streams.seg_len, std)
        self.stream_tokens, self.shifts = streams.stream_tokens, streams.shifts
        self.stream_begins, self.documents = streams.stream_begins, streams.documents
        self.bounds = functools.lru_cache(maxsize=2)(self._draw_bounds)
        self.n_segments = len(self.bounds(0)) - 1
        self._first_steps = [0]  # of each epoch counted so far, and of the next
        self._lock = threading.Lock()  # the prefetch thread and the log both look up steps

    def _draw_bounds(self, epoch: int) -> np.ndarray:
        """Returns the starts of an epoch's n segments, and the end of the last one, int64 [n+1]."""
        end = self._streams.targets_per_stream
        most = -(-end // MIN_LENGTH)
        ends = np.cumsum(drawn_lengths(self._seed, epoch, most, self.seg_len, self._std))
        return np.concatenate([[0], ends[ends < end], [end]])

    def at_step(self, step: int, rows: slice = slice(None)) -> Segment:
        """Returns the segment of a training step; steps are counted from 0 over all epochs."""
        start, n, epoch = self.span_at(step)
        return self._streams.window(start, n, self.max_len, rows, epoch)

    def span_at(self, step: int) -> tuple[int, int, int]:
        """Returns the first target, the number of targets and the epoch of a step's segment."""
        epoch, index = self._find(step)
        start, stop = self.bounds(epoch)[index : index + 2].tolist()
        return start, stop - start, epoch

    def epochs(self, step: int) -> float:
        """Returns the number of passes over the text after a number of steps, by tokens."""
        epoch, index = self._find(step)
        bounds = self.bounds(epoch)
        return epoch + int(bounds[index]) / int(bounds[-1])

    def _find(self, step: int) -> tuple[int, int]:
        """Returns the epoch of a step, and the index of its segment in that epoch."""
        with self._lock:
            while self._first_steps[-1] <= step:
                n_segments = len(self.bounds(len(self._first_steps) - 1)) - 1
                self._first_steps.append(self._first_steps[-1] + n_segments)
            epoch = bisect.bisect_right(self._first_steps, step) - 1
            return epoch, step - self._first_steps[epoch]
