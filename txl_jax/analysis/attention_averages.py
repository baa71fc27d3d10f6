"""Averages of attention by distance: the spans of heads and the shares of ranges of distance."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from txl_jax.analysis.attention_weights import Sums


@dataclasses.dataclass(frozen=True, eq=False)
class Averages:
    """Attention of every head, averaged over queries, by distance 0 .. K-1 in tokens.

    Attributes:
      attention: [L,N,K], the mean probability over the queries that can attend to the distance.
      terms: the same of each term's own softmax, by letter; empty where attention has no terms.
      seen: [K], queries that can attend to the distance, all above 0.
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
        """From sums over at least one query; drops the distances beyond a window."""
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
        """(layer, head) of the largest mean distances, the widest first; at most ``count``."""
        order = np.argsort(-self.spans, axis=None, kind="stable")[:count]
        return [divmod(int(i), self.spans.shape[1]) for i in order]

    def shares(self, edges: np.ndarray) -> np.ndarray:
        """[L,N,bins]: a query's mean attention to the distances edges[i] .. edges[i+1]-1.

        They sum to 1 over bins from 0 to K.
        """
        return np.add.reduceat(self.attention * self.seen, edges[:-1], axis=-1) / self.queries

    def binned(self, x: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """[...,bins]: the mean of x [...,K] over the queries and distances of each bin."""
        total = np.add.reduceat(x * self.seen, edges[:-1], axis=-1)
        return total / np.add.reduceat(self.seen, edges[:-1])

    def rows(self) -> list[dict[str, Any]]:
        """Per head: ``layer``, ``head``, ``mean_distance``, and ``share_by_distance`` by range."""
        edges = doubling_edges(self.n_keys)
        names = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in itertools.pairwise(edges)]
        shares = self.shares(edges)
        return [
            {
                "layer": layer,
                "head": head,
                "mean_distance": float(span),
                "share_by_distance": dict(zip(names, shares[layer, head].tolist(), strict=True)),
            }
            for (layer, head), span in np.ndenumerate(self.spans)
        ]

    def arrays(self) -> dict[str, np.ndarray]:
        """float32 arrays: ``attention`` [L,N,K], ``term_a`` .. ``term_d`` [L,N,K], ``seen`` [K]."""
        terms = {f"term_{letter}": x for letter, x in self.terms.items()}
        arrays = {"attention": self.attention, **terms, "seen": self.seen}
        return {name: x.astype(np.float32) for name, x in arrays.items()}


def doubling_edges(n_keys: int) -> np.ndarray:
    """0, 1, 2, 4, 8, .. K: bins of distances, each as long as all before it."""
    powers = 2 ** np.arange(max(n_keys - 1, 0).bit_length())
    return np.array([0, *powers, n_keys])
