"""Pieces of a token array: the documents of a text, or its sentences.

A document is, for example, a song, a protein, an episode or an article. Memory is reset where a
document begins, so no query attends across a boundary. No target crosses a boundary either: the
first token of a document is only an input. For starts 0, 4 and 6:

    inputs     5 6 7 8 | 2 3 | 4 4 4
    targets    6 7 8 . | 3 . | 4 4            a point has weight 0

A separator is shared by two documents (``shared=True``): as a target it ends a document, and as an
input it begins the next. Every token but the first is then a target. For the separator 0:

    inputs     0 5 6 | 0 2 3 | 0 4            starts 0, 3 and 6
    targets    5 6 0 | 2 3 0 | 4 0

Sentences (One Billion Word) share the ``<S>`` between them, and memory is carried over to the next
sentence. In TF's stream (protocol ``double``) there are two ``<S>`` between sentences, and a
sentence is ``<S> it rained <S> <S>``.

    <S> the cat sat <S> it rained <S> yes <S>        6 words, 3 sentences, 9 targets
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from txl_jax.data.errors import DataError
from txl_jax.data.symbols import chunks
from txl_jax.standard_streams import say

STARTS = ".starts.npy"
"""The suffix of a file that has the positions where documents begin."""


class Pieces(Sequence[np.ndarray]):
    """The documents or sentences of a token array, which are read lazily by index.

    Example:
      >>> import numpy as np, txl_jax
      >>> songs = txl_jax.Pieces(np.array([5, 6, 7, 8, 2, 3]), np.array([0, 4]))
      >>> [song.tolist() for song in songs]
      [[5, 6, 7, 8], [2, 3]]
      >>> (segment,) = txl_jax.segments(songs, batch_size=1, seg_len=5)
      >>> segment.resets.tolist(), segment.weights.tolist()
      ([[True, False, False, False, True]], [[1.0, 1.0, 1.0, 0.0, 1.0]])
      >>> text = txl_jax.Pieces(np.array([0, 5, 6, 0, 7, 0]), np.array([0, 3]), True, "sentences")
      >>> [sentence.tolist() for sentence in text]
      [[0, 5, 6, 0], [0, 7, 0]]

    Attributes:
      ids: 1-D ids of all pieces, perhaps memory-mapped.
      starts: int64 [n], the position where each piece begins, from 0 on.
      shared: whether the first token of a piece is also the last target of the piece before it.
      kind: ``documents``, ``sentences`` (shared, and memory is carried to the next sentence), or
        ``tokens``, a plain text, which is one piece.
    """

    def __init__(
        self,
        ids: np.ndarray,
        starts: np.ndarray,
        shared: bool = False,
        kind: Literal["documents", "sentences", "tokens"] = "documents",
    ):
        self.ids, self.starts = ids, as_positions(starts, "starts")
        self.shared, self.kind = shared, kind

    def __len__(self) -> int:
        return len(self.starts)

    def __repr__(self) -> str:
        return f"Pieces({len(self):,} {self.kind}, {len(self.ids):,} tokens)"

    def __getitem__(self, index: Any) -> Any:
        """Returns the 1-D ids of the piece ``index``, or the pieces of a slice.

        The ids of a piece include the token that it shares with the next piece, if any.
        """
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step == 1:
                return self.part(first, last)
            return [self[i] for i in range(first, last, step)]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"{self.kind[:-1]} {index}: there are {len(self)} {self.kind}")
        return self.part(at, at + 1).ids

    def part(self, first: int, last: int) -> "Pieces":
        """Returns the pieces ``first`` .. ``last - 1``."""
        starts = self.starts[first:last]
        if not len(starts):
            return Pieces(self.ids[:0], starts, self.shared, self.kind)
        begin, end = self.edges(np.array([first, last])).tolist()
        ids = self.ids[begin : end + self.shared]
        return Pieces(ids, starts - begin, self.shared, self.kind)

    def with_ids(self, ids: np.ndarray) -> "Pieces":
        """Returns pieces that begin at the same positions in another array of ids."""
        return Pieces(ids, self.starts, self.shared, self.kind)

    @property
    def n_targets(self) -> int:
        """The number of targets: all tokens but the first token of each piece.

        If pieces share tokens, it is all tokens but the first token of the first piece.
        """
        return len(self.ids) - (1 if self.shared else len(self))

    def edges(self, index: np.ndarray) -> np.ndarray:
        """Returns the positions where the pieces ``index`` begin: int64 [...].

        If an index is the number of pieces, its position is where the last piece ends. The last
        ``<S>`` of a text begins no sentence, so the last sentence ends before this ``<S>``.
        """
        end = len(self.ids) - (self.kind == "sentences")
        return np.where(index < len(self), self.starts.take(index, mode="clip"), end)

    def begins_at(self, positions: np.ndarray) -> np.ndarray:
        """Tells for each position in ``ids`` whether a piece begins there: bool [...]."""
        following = np.searchsorted(self.starts, positions)
        return self.starts.take(following, mode="clip") == positions


Split = np.ndarray | Pieces
"""The tokens of a split."""


def as_pieces(split: Split, name: str = "tokens") -> Pieces:
    """Returns a split as pieces; a plain text is one piece.

    Raises DataError unless the ids are 1-D integers.
    """
    if not isinstance(split, Pieces):
        split = Pieces(np.asanyarray(split), np.zeros(1, np.int64), True, "tokens")
    ids = split.ids
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"{name} has shape {ids.shape} and type {ids.dtype}: must be 1-D integers")
    return split


def as_positions(positions: Any, name: str) -> np.ndarray:
    """Returns 1-D integers of any type as int64; raises DataError for any other array."""
    array = np.asanyarray(positions)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or not array.size):
        shape = f"{name} has shape {array.shape} and type {array.dtype}"
        raise DataError(f"{shape}: must be 1-D integers")
    return array.astype(np.int64, copy=False)


def flat_tokens(split: Split) -> np.ndarray:
    """Returns all ids of a split in order, 1-D, with those that are not targets."""
    return as_pieces(split).ids


def running_text(split: Split) -> Any:
    """Returns documents joined as 1-D ids; a split without documents is returned unchanged.

    The first call for documents prints a note, because attention then crosses their boundaries.
    """
    if as_pieces(split).kind != "documents":
        return split
    _note_running_text()
    return flat_tokens(split)


@functools.cache
def _note_running_text() -> None:
    what = "this analysis reads documents as one text, and memory is not reset between them"
    say(f"note: {what}")


def separated(tokens: np.ndarray, separator: int, where: str) -> Pieces:
    """Returns the documents between separators in tokens [N]; raises DataError without separators.

    A separator at the end of the tokens begins no document.
    """
    found = [start + np.flatnonzero(part == separator) for start, part in chunks(tokens)]
    ends = np.concatenate(found).astype(np.int64)
    if not len(ends):
        fix = "set data.document_separator to an id that ends each document"
        raise DataError(f"{where}: the separator {separator} does not occur; {fix}")
    return ended_at(tokens, ends)


def ended_at(ids: np.ndarray, ends: np.ndarray) -> Pieces:
    """Returns the documents in ``ids`` that end at the positions ``ends``.

    The token at each of these positions also begins the next document.
    """
    starts = ends[(ends > 0) & (ends < len(ids) - 1)]
    return Pieces(ids, np.insert(starts, 0, 0), shared=True)


def separator_ends(ids: np.ndarray, separator: np.ndarray) -> np.ndarray:
    """Returns the positions in ids [n] where the m separators end: int64 [m].

    ``separator`` has the ids of one separator. Separators do not overlap: three line ends contain
    only one separator of two line ends.
    """
    k, ends = len(separator), list[int]()
    if not 0 < k <= len(ids):
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, k)
    for begin in np.flatnonzero((windows == separator).all(axis=1)).tolist():
        if not ends or begin > ends[-1]:
            ends.append(begin + k - 1)
    return np.array(ends, np.int64)


def check_starts(starts: np.ndarray, n_tokens: int, where: str) -> None:
    """Raises DataError unless starts [n] begin with 0 and every document has 2 or more tokens."""
    as_positions(starts, f"{where}: the array")
    if not len(starts) or starts[0] != 0:
        raise DataError(f"{where}: the first start of a document must be 0")
    sizes = np.diff(starts.astype(np.int64), append=n_tokens)
    if (sizes < 2).any():
        at = int(np.argmax(sizes < 2))
        end = f"of {n_tokens} tokens" if at + 1 == len(starts) else f"before start {starts[at + 1]}"
        fault = f"document {at} begins at {starts[at]} {end}; it needs at least 2 tokens"
        raise DataError(f"{where}: {fault}")


def split_edges(
    starts: np.ndarray, total: int, valid_fraction: float, test_fraction: float, where: str
) -> list[int]:
    """Returns the index of the first document of train, valid and test, and n, the number of all.

    ``starts`` [n] are the positions of the documents in a text of length ``total``. The text is cut
    between documents, as near to the fractions as possible. The valid or test split gets at least
    one document if its fraction is above 0, and otherwise none. Raises DataError for too few
    documents.
    """
    n, cut = len(starts), [fraction > 0 for fraction in (valid_fraction, test_fraction)]
    if n <= sum(cut):
        fix = "give more documents, or a file for each split"
        raise DataError(f"{where}: has {n} documents for {1 + sum(cut)} splits; {fix}")
    nearest = lambda share: int(np.argmin(np.abs(starts - total * (1 - share))))
    valid = int(np.clip(nearest(valid_fraction + test_fraction), 1, n - sum(cut)))
    test = int(np.clip(nearest(test_fraction), valid + cut[0], n - 1)) if cut[1] else n
    return [0, valid, test, n]
