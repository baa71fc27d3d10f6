"""Averages of attention by distance: spans of heads, mass by distance, and the files of both."""

import dataclasses
import io
import itertools
import os
from typing import Any

import numpy as np

from txl_jax.analysis.attention_weights import Sums
from txl_jax.files import atomic_write, write_csv, write_json


@dataclasses.dataclass(frozen=True, eq=False)
class Averages:
    """Attention of every head, averaged over queries, by distance 0 .. K-1 in tokens.

    Attributes:
      attention: [L,N,K], the mean probability at a distance, of the queries that see it.
      terms: the same of each term's own softmax, by letter; empty where attention has no terms.
      seen: [K], queries that see the distance, all above 0.
      queries: how many were averaged.
      spans: [L,N], the mean distance that a head attends to, in tokens.
    """

    attention: np.ndarray
    terms: dict[str, np.ndarray]
    seen: np.ndarray
    queries: int
    spans: np.ndarray

    @classmethod
    def of(cls, sums: Sums) -> "Averages":
        """From sums over at least one query; distances beyond a window are cut off."""
        k = int(np.count_nonzero(sums.seen))
        seen = np.asarray(sums.seen, np.float64)[:k]
        mean = lambda x: np.asarray(x, np.float64)[..., :k] / seen
        attention, queries = mean(sums.attention), int(sums.queries)
        spans = attention * seen @ np.arange(k) / queries
        terms = {letter: mean(x) for letter, x in sums.terms.items()}
        return cls(attention, terms, seen, queries, spans)

    @property
    def n_keys(self) -> int:
        """K."""
        return len(self.seen)

    def widest(self, count: int) -> list[tuple[int, int]]:
        """(layer, head) of the largest mean distances, the widest first; no more than there are."""
        order = np.argsort(-self.spans, axis=None, kind="stable")[:count]
        return [divmod(int(i), self.spans.shape[1]) for i in order]

    def shares(self, edges: np.ndarray) -> np.ndarray:
        """[L,N,bins]: a query's attention to the distances edges[i] .. edges[i+1]-1, on average.

        They sum to 1 over bins from 0 to K.
        """
        return np.add.reduceat(self.attention * self.seen, edges[:-1], axis=-1) / self.queries

    def binned(self, x: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """[...,bins]: the mean of x [...,K] over what was seen of each bin's distances."""
        total = np.add.reduceat(x * self.seen, edges[:-1], axis=-1)
        return total / np.add.reduceat(self.seen, edges[:-1])


def doubling_edges(n_keys: int) -> np.ndarray:
    """0, 1, 2, 4, 8, .. K: bins of distances, each as long as all before it."""
    powers = 2 ** np.arange(max(n_keys - 1, 0).bit_length())
    return np.array([0, *powers, n_keys])


def write_numbers(
    workdir: str, about: dict[str, str], averages: Averages, position: dict[str, Any]
) -> None:
    """Writes ``attention.json``, ``attention.csv`` (a row per head) and ``attention.npz``.

    The arrays in ``attention.npz`` are float32: ``attention`` [L,N,K], ``term_a`` .. ``term_d``
    [L,N,K] where there are terms, ``seen`` [K].
    """
    edges = doubling_edges(averages.n_keys)
    shares = averages.shares(edges)
    n_layer, n_head = averages.spans.shape
    heads = [(layer, head) for layer in range(n_layer) for head in range(n_head)]
    names = [_range(a, b) for a, b in itertools.pairwise(edges)]
    rows = [
        [layer, head, averages.spans[layer, head], *shares[layer, head]] for layer, head in heads
    ]
    result = {
        **about,
        "queries": averages.queries,
        "distances": averages.n_keys,
        "terms": sorted(averages.terms) or "left out: this form of attention is of one term",
        "heads": [
            {
                "layer": layer,
                "head": head,
                "mean_distance": round(float(span), 3),
                "share_by_distance": {
                    name: round(float(x), 6) for name, x in zip(names, parts, strict=True)
                },
            }
            for layer, head, span, *parts in rows
        ],
        "position": position,
    }
    write_json(os.path.join(workdir, "attention.json"), result)
    columns = ("mean_distance", *(f"share_{name}" for name in names))
    figures = [
        {"layer": layer, "head": head}
        | {name: f"{x:.6g}" for name, x in zip(columns, values, strict=True)}
        for layer, head, *values in rows
    ]
    write_csv(os.path.join(workdir, "attention.csv"), figures)
    data = io.BytesIO()
    terms = {f"term_{letter}": x for letter, x in averages.terms.items()}
    found = {"attention": averages.attention, **terms, "seen": averages.seen}
    arrays: dict[str, Any] = {name: x.astype(np.float32) for name, x in found.items()}
    np.savez(data, **arrays)
    atomic_write(os.path.join(workdir, "attention.npz"), data.getvalue())


def _range(first: int, end: int) -> str:
    return f"{first}" if end == first + 1 else f"{first}-{end - 1}"
