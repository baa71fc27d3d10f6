"""What heads attend to, read off a forward pass while it runs, and summed by distance at once.

    model.apply ──▶ every call of Attention shows its queries, keys, positions and mask
                         └──▶ scores [N,B,T,K] ──softmax──▶ sums by distance [N,K]

The pass itself is the model's own, untouched: attention weights are computed beside it, from what
a layer was asked with, one layer's [N,B,T,K] at a time inside the compiled program. So no kernel
has to give weights back, and nothing grows with the text.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.model.attention import Attention
from txl_jax.model.masks import AttentionMask
from txl_jax.model.memory import Memory
from txl_jax.model.positions import Positions, relative_shift
from txl_jax.model.ring import KeysValues
from txl_jax.model.scores import content_scores, position_scores, softmax_parts
from txl_jax.model.transformer_xl import TransformerXL


class Asked(NamedTuple):
    """What one layer's attention was asked with.

    Attributes:
      q: [N,B,T,H], divided by sqrt(H).
      k: [N,B,K,H], of memory and segment, oldest first.
      positions: of the distances K-1 .. 0; u, v and b divided by sqrt(H).
      mask: the attention mask.
    """

    q: jax.Array
    k: jax.Array
    positions: Positions
    mask: AttentionMask

    def allowed(self) -> jax.Array:
        """The mask of these queries, bool [B,T,K]."""
        n_queries = self.q.shape[2]
        last = self.mask.seg_len
        return self.mask.allowed(slice(last - n_queries, last))

    def of_last(self, n_queries: int) -> "Asked":
        """The same of the segment's last queries only."""
        return self._replace(q=self.q[:, :, -n_queries:])


@contextlib.contextmanager
def watching() -> Iterator[list[Asked]]:
    """A list that every call of attention in this block adds to, in the order of layers.

    For models whose layers stand one by one and whose memory is a :class:`Memory`; within a
    function that is compiled, all of it must be.
    """
    seen: list[Asked] = []

    def note(call, args, kwargs, context):
        if isinstance(context.module, Attention) and context.method_name == "__call__":
            seen.append(_asked(context.module.cfg.d_head, *args[:5]))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        yield seen


def _asked(
    d_head: int,
    queries: jax.Array,
    present: KeysValues,
    past: KeysValues,
    positions: Positions,
    mask: AttentionMask,
) -> Asked:
    scale = d_head**-0.5  # where the model applies it, and in its dtype: the same scores
    small = lambda x: None if x is None else x.astype(queries.dtype) * scale
    about = positions.replace(u=small(positions.u), v=small(positions.v), b=small(positions.b))
    keys = jnp.concatenate([past.keys, present.keys], axis=2)
    return Asked(queries * scale, keys, about, mask)


def probabilities(asked: Asked) -> jax.Array:
    """What each query gives to each key: float32 [N,B,T,K], each query's sum is 1."""
    p = asked.positions
    scores = content_scores(asked.q, p.u, asked.k)
    if p.r is not None:
        scores = scores + position_scores(asked.q, p.v, p.r, p.b)
    return _softmax(scores, asked.allowed())


def term_probabilities(asked: Asked) -> dict[str, jax.Array]:
    """Each term of the score through a softmax of its own: float32 [N,B,T,K] by letter.

    Letters are those of model/scores.py; b_{i-j} belongs to (d). A form of attention has the
    terms that its positions give it; one of content alone has none that could be told apart.
    """
    p, (n, b, t, _) = asked.positions, asked.q.shape
    if p.r is None:
        return {}
    scores = {
        "a": content_scores(asked.q, None, asked.k),
        "b": position_scores(asked.q, None, p.r),
    }
    if p.u is not None:
        every_query = jnp.broadcast_to(p.u[:, None, None], (n, b, 1, p.u.shape[-1]))
        scores["c"] = content_scores(every_query, None, asked.k)
    if p.v is not None or p.b is not None:
        everywhere = jnp.zeros((n, 1, 1, p.r.shape[-1]), p.r.dtype)
        every_query = everywhere if p.v is None else everywhere + p.v[:, None, None]
        by_distance = jnp.einsum(
            "nbth,nkh->nbtk", every_query, p.r, preferred_element_type=jnp.float32
        )
        if p.b is not None:
            by_distance = by_distance + p.b[:, None, None]
        scores["d"] = relative_shift(jnp.broadcast_to(by_distance, (n, 1, t, p.r.shape[1])))
    allowed = asked.allowed()
    return {letter: _softmax(x, allowed) for letter, x in scores.items()}


def _softmax(scores: jax.Array, allowed: jax.Array) -> jax.Array:
    shape = jnp.broadcast_shapes(scores.shape, allowed.shape)
    (weights,), total = softmax_parts((jnp.broadcast_to(scores, shape), allowed))
    return weights / total


def by_distance(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Numbers of pairs summed over queries: [...,K], entry d for the distance d.

    Query i of the T last of K positions is at distance K-T+i-j from key j.

    Args:
      x: [...,B,T,K], 0 where a key comes after the query.
      weights: [B,T], of the queries.
    """
    summed = jnp.einsum("...btk,bt->...tk", x, weights.astype(x.dtype))
    # Row i moved right by T-1-i, the shift of model/positions.py backwards: what wraps round to
    # the next row is of keys after the query, so 0.
    *lead, t, k = summed.shape
    flat = summed.reshape(*lead, t * k)
    padded = jnp.pad(flat, [(0, 0)] * len(lead) + [(t, 0)])
    nearest_last = padded.reshape(*lead, t, k + 1)[..., 1:]
    return nearest_last.sum(axis=-2)[..., ::-1]


class Sums(flax.struct.PyTreeNode):
    """Attention summed over queries, by distance 0 .. K-1.

    Attributes:
      attention: [L,N,K], sums of probabilities.
      terms: the same of each term's own softmax, by letter.
      seen: [K], queries that saw this distance.
      queries: [], how many there were.
    """

    attention: Any
    terms: dict[str, Any]
    seen: Any
    queries: Any


def sums_of(layers: list[Asked], weights: jax.Array) -> Sums:
    """The sums of all layers over the queries of weight 1, the T last ones of their segment.

    ``weights``: float32 [B,T], 0 or 1.
    """
    layers = [asked.of_last(weights.shape[1]) for asked in layers]
    terms = [term_probabilities(asked) for asked in layers]
    return Sums(
        jnp.stack([by_distance(probabilities(asked), weights) for asked in layers]),
        {
            letter: jnp.stack([by_distance(of_layer[letter], weights) for of_layer in terms])
            for letter in terms[0]
        },
        by_distance(layers[0].allowed().astype(jnp.float32), weights),
        jnp.sum(weights),
    )


def watched_segment(
    model: TransformerXL, params: Any, inputs: jax.Array, mems: Memory, weights: jax.Array
) -> tuple[Sums, jax.Array, Memory]:
    """Sums of a segment, what its last query gives to each key, and memory after it.

    Args:
      model: its layers one by one, not scanned.
      params: of the model.
      inputs: int32 [B,C+T], C tokens that are run and not summed.
      mems: memory before the segment.
      weights: float32 [B,T], 1 for the queries that are summed.

    Returns:
      The sums; float32 [L,N,B,K], oldest key first; the memory.
    """
    with watching() as layers:
        after: Any = model.apply({"params": params}, inputs, mems)[1]
    last = jnp.stack([probabilities(asked.of_last(1))[:, :, 0] for asked in layers])
    return sums_of(layers, weights), last, after
