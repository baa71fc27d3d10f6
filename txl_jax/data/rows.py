"""Lays a text out as the rows of a batch: each row is a range of one array of ids.

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

Without ``drop_remainder``, documents and sentences are not cut: each row has complete documents or
sentences, and all rows have about the same number of tokens. With ``drop_remainder``, documents are
cut like a plain text, as in training, and memory is also reset where a row begins. Sentences are
then laid out as in the authors' code: when a row needs more tokens, it takes the next sentence of
the text. Reading ends with the last segment that is full in all rows.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from txl_jax.data.errors import DataError
from txl_jax.data.pieces import Pieces
from txl_jax.data.symbols import check_ids


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The texts of B streams, as ranges of one array of ids."""

    ids: np.ndarray  # 1-D ids, in which each row is a range
    first: np.ndarray  # int64 [B], the position of each row's first token
    ends: np.ndarray  # int64 [B], the number of targets of each row, from its second token on
    documents: Pieces | None = None  # the documents in ``ids``
    has_past: bool = True  # whether a row's memory may hold the tokens before the row

    @property
    def n_targets(self) -> int:
        """The number of targets, without targets that would cross a boundary of documents."""
        n = int(self.ends.sum())
        if self.documents is None or self.documents.shared:
            return n
        edges = np.stack([self.first, self.first + self.ends]) + 1
        before = np.searchsorted(self.documents.starts, edges)
        return n - int((before[1] - before[0]).sum())


def lay_out(
    pieces: Pieces,
    batch_size: int,
    seg_len: int,
    drop_remainder: bool,
    name: str,
    vocab_size: int | None,
    key: str = "batch_size",
) -> Rows:
    """Returns the rows of a text, or raises DataError if the text is too short or has a wrong id.

    A right id is from 0 to ``vocab_size`` - 1, or, if this is ``None``, any int32 from 0 on. Errors
    call the text ``name``, and the setting of the batch size ``key``.
    """
    n, even = len(pieces.ids), drop_remainder or pieces.kind == "tokens"
    most, what = n // 2 if drop_remainder else n - 1, f"{n:,} tokens"
    if pieces.kind == "sentences":
        most, what = len(pieces), f"{len(pieces)} sentences"
    if (even or pieces.kind == "sentences") and batch_size > most:
        fault = f"{name} has {what}, too few for a target in each stream"
        fix = (
            f"use a batch of at most {most:,}, or a longer text"
            if most > 0
            else "use a longer text"
        )
        raise DataError(f"{key} = {batch_size}: {fault}; {fix}")
    if pieces.n_targets < 1:
        fault = "has no target, because no document has two tokens"
        raise DataError(f"{name} {fault}; give longer documents")
    check_ids(name, pieces.ids, vocab_size)
    if not even:
        return _whole_rows(pieces, batch_size)
    if pieces.kind != "sentences":
        return _even_rows(pieces, batch_size, drop_remainder)
    rows = _rows_in_turn(pieces, batch_size, seg_len)
    if not rows.n_targets:
        fault = f"{name} does not fill one segment of {seg_len} tokens in every stream"
        raise DataError(f"{key} = {batch_size}: {fault}; use a smaller batch or shorter segments")
    return rows


def separate_rows(texts: Sequence[np.ndarray], batch_size: int) -> Rows:
    """Returns B rows, one for each of up to B independent texts; the other rows are empty."""
    sizes = np.array([len(text) for text in texts] + [1] * (batch_size - len(texts)))
    first = np.minimum(np.cumsum(sizes) - sizes, sum(map(len, texts)))
    return Rows(np.concatenate(texts), first, sizes - 1, has_past=False)


def _even_rows(pieces: Pieces, batch_size: int, drop_remainder: bool) -> Rows:
    n = len(pieces.ids) - 1
    stride = len(pieces.ids) // batch_size if drop_remainder else -(-n // batch_size)
    first = np.arange(batch_size) * stride
    ends = np.clip(n - first, 0, stride - int(drop_remainder))
    return Rows(pieces.ids, first, ends, pieces if pieces.kind == "documents" else None)


def _whole_rows(pieces: Pieces, batch_size: int) -> Rows:
    """Returns rows of complete pieces; if there are fewer documents than rows, some are empty."""
    edges = pieces.edges(row_bounds(pieces, batch_size))
    stops = np.minimum(edges[1:], len(pieces.ids) - 1) if pieces.shared else edges[1:] - 1
    ends = np.maximum(stops - edges[:-1], 0)
    if pieces.kind == "documents":  # no past, so losses do not depend on the number of rows
        return Rows(pieces.ids, edges[:-1], ends, pieces, has_past=False)
    return Rows(pieces.ids, edges[:-1], ends)


def row_bounds(pieces: Pieces, batch_size: int) -> np.ndarray:
    """Divides pieces into B rows of nearly equal length; returns their bounds: int64 [B+1].

    Row b has the pieces ``bounds[b]`` .. ``bounds[b + 1] - 1``.
    """
    n, rows = len(pieces), np.arange(batch_size + 1)
    even = rows * int(pieces.edges(np.array(n))) // batch_size
    after = np.clip(np.searchsorted(pieces.starts, even), 1, n)
    nearer_before = even - pieces.edges(after - 1) < pieces.edges(after) - even
    bounds = np.where(nearer_before, after - 1, after)
    if pieces.kind == "sentences":  # each row gets at least one sentence
        bounds = np.maximum.accumulate(bounds - rows) + rows
        bounds = np.minimum(bounds, n - batch_size + rows)
    bounds[0], bounds[-1] = 0, n
    return bounds


def _rows_in_turn(sentences: Pieces, batch_size: int, seg_len: int) -> Rows:
    """Returns rows that take the next sentence when they need one; copies all ids to memory."""
    rows: list[list[np.ndarray]] = [[] for _ in range(batch_size)]
    filled, following = [0] * batch_size, iter(sentences)
    with contextlib.suppress(StopIteration):
        for full in itertools.count(0, seg_len):  # the number of targets that every row has
            for row in range(batch_size):
                while filled[row] < full + seg_len:
                    rows[row].append(next(following)[:-1])
                    filled[row] += len(rows[row][-1])
    texts = [np.concatenate([*row, sentences[0][:1]]) for row in rows]
    return dataclasses.replace(separate_rows(texts, batch_size), ends=np.full(batch_size, full))
