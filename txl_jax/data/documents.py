"""Documents: the parts of a token array that know nothing of each other.

A document is a song, a protein, an episode or an article. Memory is reset where one begins, so no
query attends across a boundary. No target crosses one either: the first token of a document is an
input only. For starts 0, 4 and 6:

    inputs     5 6 7 8 | 2 3 | 4 4 4
    targets    6 7 8 . | 3 . | 4 4            a point has weight 0

A separator ends a document as a target, and begins the next one as an input (``shared``), as in the
sentences of One Billion Word. So every token is a target. For the separator 0:

    inputs     0 5 6 | 0 2 3 | 0 4            starts 0, 3 and 6
    targets    5 6 0 | 2 3 0 | 4 0
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from txl_jax.data.errors import DataError
from txl_jax.data.symbols import chunks
from txl_jax.standard_streams import stderr

STARTS = ".starts.npy"
"""The end of the name of a file that has the positions where documents begin."""


class Documents(Sequence[np.ndarray]):
    """The documents of a token array, which are read lazily by index.

    Example:
      >>> import numpy as np, txl_jax
      >>> songs = txl_jax.Documents(np.array([5, 6, 7, 8, 2, 3]), np.array([0, 4]))
      >>> [song.tolist() for song in songs]
      [[5, 6, 7, 8], [2, 3]]
      >>> (segment,) = txl_jax.segments(songs, batch_size=1, seg_len=5)
      >>> segment.resets.tolist(), segment.weights.tolist()
      ([[True, False, False, False, True]], [[1.0, 1.0, 1.0, 0.0, 1.0]])

    Attributes:
      tokens: 1-D ids of all documents, perhaps memory-mapped.
      starts: int64 [n], the position where each document begins, from 0 on.
      shared: whether the first token of a document is also the last target of the one before it.
    """

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, shared: bool = False):
        self.tokens, self.starts, self.shared = tokens, as_positions(starts, "starts"), shared

    def __len__(self) -> int:
        return len(self.starts)

    def __repr__(self) -> str:
        return f"Documents({len(self):,} documents, {len(self.tokens):,} tokens)"

    def __getitem__(self, index: Any) -> Any:
        """Returns a document as 1-D ids (with the token it shares), or a list of documents."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"document {index}: there are {len(self)}")
        end = self.end(at)
        return self.tokens[int(self.starts[at]) : end + int(self.shared and end < len(self.tokens))]

    @property
    def n_targets(self) -> int:
        """The number of targets: all tokens but the first ones of documents, unless shared."""
        return len(self.tokens) - (1 if self.shared else len(self))

    def end(self, index: int) -> int:
        """Returns the position after the last token that belongs to a document alone."""
        return int(self.starts[index + 1]) if index + 1 < len(self) else len(self.tokens)

    def begins_at(self, positions: np.ndarray) -> np.ndarray:
        """Tells for each position in ``tokens`` whether a document begins there: bool [...]."""
        following = np.searchsorted(self.starts, positions)
        return self.starts.take(following, mode="clip") == positions

    def part(self, first: int, last: int) -> "Documents":
        """Returns the documents ``first`` .. ``last - 1``, which are at least one."""
        start, end = int(self.starts[first]), self.end(last - 1)
        end += int(self.shared and end < len(self.tokens))
        return Documents(self.tokens[start:end], self.starts[first:last] - start, self.shared)


def as_positions(positions: Any, name: str) -> np.ndarray:
    """Returns 1-D integers of any type as int64; raises DataError for another array."""
    array = np.asanyarray(positions)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or not array.size):
        raise DataError(f"{name} has shape {array.shape} and type {array.dtype}: must be integers")
    return array.astype(np.int64, copy=False)


def running_text(split: Any) -> Any:
    """Returns the ids of documents one after another, 1-D; other splits are returned unchanged.

    The first call for documents prints a note, because analyses then attend across boundaries.
    """
    if not isinstance(split, Documents):
        return split
    _note_running_text()
    return split.tokens


@functools.cache
def _note_running_text() -> None:
    what = "this analysis reads documents as one text, and memory is not reset between them"
    print(f"note: {what}", file=stderr(), flush=True)


def separated(tokens: np.ndarray, separator: int, where: str) -> Documents:
    """Returns the documents between separators in tokens [N]; DataError if there is no separator.

    A separator at the end of all begins no document.
    """
    found = [start + np.flatnonzero(part == separator) for start, part in chunks(tokens)]
    starts = np.concatenate(found).astype(np.int64)
    if not len(starts):
        fix = "set data.document_separator to an id that ends each document"
        raise DataError(f"{where}: the separator {separator} does not occur; {fix}")
    starts = starts[starts < len(tokens) - 1]
    starts = starts if len(starts) and starts[0] == 0 else np.insert(starts, 0, 0)
    return Documents(tokens, starts, shared=True)


def separator_ends(ids: np.ndarray, separator: np.ndarray) -> np.ndarray:
    """Returns the positions in ids [n] of the last token of each separator, integers [k]."""
    k = len(separator)
    if not 0 < k <= len(ids):
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, k)
    return np.flatnonzero((windows == separator).all(axis=1)) + k - 1


def check_starts(starts: np.ndarray, n_tokens: int, where: str) -> None:
    """Raises DataError unless starts are integers [n] that rise from 0, of two tokens or more."""
    if starts.ndim != 1 or not np.issubdtype(starts.dtype, np.integer) or not len(starts):
        fault = f"has shape {starts.shape} and type {starts.dtype}"
        raise DataError(f"{where}: {fault}; starts of documents must be 1-D integers")
    if starts[0] != 0:
        raise DataError(f"{where}: the first start is {starts[0]}; it must be 0")
    sizes = np.diff(starts.astype(np.int64), append=n_tokens)
    if (sizes < 2).any():
        at = int(np.argmax(sizes < 2))
        if sizes[at] == 1:
            fault = f"document {at} (token {starts[at]}) has one token, at least 2 are needed"
        elif at + 1 == len(starts):
            fault = f"start {at} is {starts[at]}, and there are {n_tokens} tokens"
        else:
            fault = f"start {at + 1} is {starts[at + 1]} after {starts[at]}; starts must increase"
        raise DataError(f"{where}: {fault}")


def split_edges(
    starts: np.ndarray, total: int, valid_fraction: float, test_fraction: float, where: str
) -> list[int]:
    """Returns the first documents of train, valid and test, nearest to the fractions, and n.

    ``starts`` [n] are the positions of the documents in a text of length ``total``. Every split
    with a fraction above 0 gets at least one document, and another one none. Raises DataError for
    too few documents.
    """
    n, cut = len(starts), [fraction > 0 for fraction in (valid_fraction, test_fraction)]
    if n < (least := 1 + sum(cut)):
        fix = "give more documents, or a file for each split"
        needed = f"at least {least} are needed for {least} splits"
        raise DataError(f"{where}: has {n} documents, {needed}; {fix}")
    nearest = lambda share: int(np.argmin(np.abs(starts - total * (1 - share))))
    valid = int(np.clip(nearest(valid_fraction + test_fraction), 1, n - sum(cut)))
    test = int(np.clip(nearest(test_fraction), valid + cut[0], n - 1)) if cut[1] else n
    return [0, valid, test, n]
