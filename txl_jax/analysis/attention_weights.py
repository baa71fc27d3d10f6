"""Captures attention weights during a forward pass, and averages them by distance.

    model.apply ──▶ queries, keys, positions and mask of each call of Attention
                         └──▶ scores [N,B,T,K] ──softmax──▶ sums by distance [N,K]

The forward pass of the model is unchanged. The attention weights of each layer are computed again
from the inputs of its attention, so that kernels need not return weights.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.model.attention import Attention
from txl_jax.model.kernels import AttentionInputs
from txl_jax.model.memory import Memory
from txl_jax.model.positions import Positions, relative_shift
from txl_jax.model.scores import content_scores, position_scores, position_scores_by_distance
from txl_jax.model.transformer_xl import TransformerXL


@contextlib.contextmanager
def capture_attention() -> Iterator[list[AttentionInputs]]:
    """Yields a list to which each layer's attention adds its inputs during this context.

    The layers must not be scanned, and the memory must be a :class:`Memory`.
    """
    captured: list[AttentionInputs] = []

    def intercept(call, args, kwargs, context):
        if isinstance(context.module, Attention) and context.method_name == "gather":
            captured.append(args[0].joined())
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        yield captured


def allowed(layer: AttentionInputs) -> jax.Array:
    """Returns the attention mask of the queries, bool [B,T,K]."""
    end = layer.mask.seg_len
    return layer.mask.allowed(slice(end - layer.q.shape[2], end))


def probabilities(layer: AttentionInputs) -> jax.Array:
    """Computes the attention weights, float32 [N,B,T,K], which sum to 1 over the keys."""
    p = layer.positions
    scores = content_scores(layer.q, p.u, layer.k)
    if p.of_distances:
        scores = scores + position_scores(layer.q, p.v, p.r, p.b)
    return _softmax(p, scores, allowed(layer))


def term_probabilities(layer: AttentionInputs) -> dict[str, jax.Array]:
    """Computes the softmax of each term of the scores by itself: float32 [N,B,T,K] for each letter.

    The letters are those of model/scores.py. Term (d) includes the bias b_{i-j}. Attention without
    position scores has no terms.
    """
    p, q, r = layer.positions, layer.q, layer.positions.r
    if r is None:
        return {}
    scores = {"a": content_scores(q, None, layer.k), "b": position_scores(q, None, r)}
    no_query = jnp.zeros_like(q[:, :, :1])
    if p.u is not None:
        scores["c"] = content_scores(no_query, p.u, layer.k)
    if p.v is not None or p.b is not None:
        by_distance = position_scores_by_distance(no_query[:, :1], p.v, r, p.b)
        size = (len(r), 1, q.shape[2], r.shape[1])
        scores["d"] = relative_shift(jnp.broadcast_to(by_distance, size))
    mask = allowed(layer)
    return {letter: _softmax(Positions(), x, mask) for letter, x in scores.items()}


def _softmax(p: Positions, scores: jax.Array, mask: jax.Array) -> jax.Array:
    shape = jnp.broadcast_shapes(scores.shape, mask.shape)
    (weights,), total = p.softmax((jnp.broadcast_to(scores, shape), mask))
    return weights / total


def sum_by_distance(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums values of query-key pairs over queries: [...,K], where entry d is for distance d.

    ``x`` is [...,B,T,K], and 0 for keys after the query. ``weights`` [B,T] has one for each query.
    Query i of the last T of K positions has distance K-T+i-j to key j.
    """
    summed = jnp.einsum("...btk,bt->...tk", x, weights.astype(x.dtype))
    # Row i moves right by T-1-i. This is the inverse of the shift in model/positions.py. Only keys
    # after the query wrap around to the next row, and their values are 0.
    *lead, t, k = summed.shape
    padded = jnp.pad(summed.reshape(*lead, t * k), [(0, 0)] * len(lead) + [(t, 0)])
    nearest_last = padded.reshape(*lead, t, k + 1)[..., 1:]
    return nearest_last.sum(axis=-2)[..., ::-1]


class Sums(flax.struct.PyTreeNode):
    """Sums of attention over queries, by distance 0 .. K-1."""

    attention: Any  # sums of probabilities, [L,N,K]
    terms: dict[str, Any]  # sums of the softmax of each single term by letter, [L,N,K]
    seen: Any  # the number of queries that can attend to each distance in some layer, [K]
    queries: Any  # the number of all queries, []


def segment_attention(
    model: TransformerXL, params: Any, inputs: jax.Array, mems: Memory, weights: jax.Array
) -> tuple[Sums, jax.Array, Memory]:
    """Returns a segment's sums, its last query's attention (float32 [L,N,B,K]) and the new memory.

    The layers are not scanned. ``inputs`` is int32 [B,C+T]. ``weights`` is float32 [B,T], 1 for
    queries in the sums and 0 for other queries. The sums exclude the C tokens of context.
    """
    projected = dataclasses.replace(model.cfg, kernel="xla")  # "auto" can skip projecting memory
    model = TransformerXL(projected, model.mesh)
    with capture_attention() as captured:
        after: Any = model.apply({"params": params}, inputs, mems)[1]
    last_queries = lambda count: [x.replace(q=x.q[:, :, -count:]) for x in captured]
    last = jnp.stack([probabilities(layer)[:, :, 0] for layer in last_queries(1)])
    layers = last_queries(weights.shape[1])
    terms = [term_probabilities(layer) for layer in layers]
    stacked = lambda xs: jnp.stack([sum_by_distance(x, weights) for x in xs])
    sums = Sums(
        stacked(probabilities(layer) for layer in layers),
        {letter: stacked(term[letter] for term in terms) for letter in terms[0]},
        jnp.max(stacked(allowed(x).astype(jnp.float32) for x in layers), axis=0),
        jnp.sum(weights),
    )
    return sums, last, after


@dataclasses.dataclass(frozen=True, eq=False)
class Averages:
    """Attention of every head, averaged over queries, by distance 0 .. K-1 in tokens."""

    attention: np.ndarray  # mean probability over queries that can attend this far, [L,N,K]
    terms: dict[str, np.ndarray]  # mean softmax of each single term by letter, [L,N,K]
    seen: np.ndarray  # positive number of queries that can attend to each distance, [K]
    queries: int  # number of all queries
    spans: np.ndarray  # mean distance of each head's attention in tokens, [L,N]

    @classmethod
    def of(cls, sums: Sums) -> "Averages":
        """Returns the averages of ``sums``, which include at least one query.

        Distances to which no query can attend are left out.
        """
        k = int(np.count_nonzero(sums.seen))
        seen = np.asarray(sums.seen, np.float64)[:k]
        mean = lambda x: np.asarray(x, np.float64)[..., :k] / seen
        attention, queries = mean(sums.attention), int(sums.queries)
        spans = attention * seen @ np.arange(k) / queries
        terms = {letter: mean(x) for letter, x in sums.terms.items()}
        return cls(attention, terms, seen, queries, spans)

    @property
    def n_keys(self) -> int:
        """The number K of distances."""
        return len(self.seen)

    def widest(self, count: int) -> list[tuple[int, int]]:
        """Returns (layer, head) of ``count`` heads, in the order of falling mean distance."""
        order = np.argsort(-self.spans, axis=None, kind="stable")[:count]
        return [divmod(int(i), self.spans.shape[1]) for i in order]

    def binned(self, x: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """Averages x [...,K] over the distances of each bin: [...,bins].

        A distance has the weight ``seen``, its number of queries. Bin i starts at ``edges[i]``.
        """
        total = np.add.reduceat(x * self.seen, edges[:-1], axis=-1)
        return total / np.add.reduceat(self.seen, edges[:-1])

    def rows(self) -> list[dict[str, Any]]:
        """Returns a JSON object for each head.

        It has the layer, the head, the mean distance, and for each range of distances the share of
        the head's attention.
        """
        edges = doubling_edges(self.n_keys)
        names = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in itertools.pairwise(edges)]
        shares = np.add.reduceat(self.attention * self.seen, edges[:-1], axis=-1) / self.queries
        return [
            {"layer": layer, "head": head, "mean_distance": float(span)}
            | {"share_by_distance": dict(zip(names, shares[layer, head].tolist(), strict=True))}
            for (layer, head), span in np.ndenumerate(self.spans)
        ]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns float32 arrays: ``attention``, ``term_a`` .. ``term_d`` [L,N,K], ``seen`` [K]."""
        arrays = {"attention": self.attention, "seen": self.seen}
        arrays |= {f"term_{letter}": x for letter, x in self.terms.items()}
        return {name: x.astype(np.float32) for name, x in arrays.items()}


def doubling_edges(n_keys: int) -> np.ndarray:
    """Returns the bounds 0, 1, 2, 4, 8, .. K of bins of distances, which double in width."""
    return np.array([0, *(2 ** np.arange(max(n_keys - 1, 0).bit_length())), n_keys])
