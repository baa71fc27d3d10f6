"""Attention with relative positions over memory and segment (paper, section 3.3).

One computation serves every form: the scores are

    ( q_i.k_j  +  q_i.r_{i-j}  +  u.k_j  +  v.r_{i-j}  +  b_{i-j} ) / sqrt(H)
        (a)          (b)           (c)        (d)

and a form decides what u, v, r and b are (:class:`Positions`). :class:`RelativeAttention` is the
paper's; the others are in variants.py.
"""

from typing import NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import TransformerXLConfig
from txl_jax.model.positions import relative_shift


class KeysValues(NamedTuple):
    """What attention reads: keys and values, [N,B,S,H] each, of S positions."""

    keys: jax.Array
    values: jax.Array


class Positions(flax.struct.PyTreeNode):
    """What positions add to the scores of one layer; ``None``: that term is not there.

    Attributes:
      u, v: [N,H], added to the query against keys and against distances.
      r: [N,K,H], of the distances K-1 .. 0.
      b: [N,K], of the distances K-1 .. 0.
    """

    u: jax.Array | None = None
    v: jax.Array | None = None
    r: jax.Array | None = None
    b: jax.Array | None = None

    def nearest(self, n_keys: int) -> "Positions":
        """Those of the distances n_keys - 1 .. 0."""
        cut = lambda x: None if x is None else x[:, x.shape[1] - n_keys :]
        return self.replace(r=cut(self.r), b=cut(self.b))


def content_scores(q: jax.Array, u: jax.Array | None, k: jax.Array) -> jax.Array:
    """Terms (a) q.k and (c) u.k, content and global content: float32 [N,B,T,K].

    Args:
      q: [N,B,T,H].  u: [N,H].  k: [N,B,K,H].
    """
    if u is not None:
        q = q + u[:, None, None, :]
    return jnp.einsum("nbth,nbkh->nbtk", q, k, preferred_element_type=jnp.float32)


def position_scores(
    q: jax.Array, v: jax.Array | None, r: jax.Array, b: jax.Array | None = None
) -> jax.Array:
    """Terms (b) q.r and (d) v.r, content-dependent and global position: float32 [N,B,T,K].

    Args:
      q: [N,B,T,H].  v: [N,H].  r: [N,K,H], projections of the distances K-1 .. 0.
      b: [N,K], a learnt scalar for each of these distances.
    """
    if v is not None:
        q = q + v[:, None, None, :]
    scores = jnp.einsum("nbth,nkh->nbtk", q, r, preferred_element_type=jnp.float32)
    if b is not None:
        scores = scores + b[:, None, None, :]
    return relative_shift(scores)


def softmax_parts(scores: jax.Array, allowed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the allowed keys as numerator and denominator, for the division to come last.

    Dividing T x H sums instead of T x K weights saves passes over the largest array (a third of
    attention's time on a CPU).

    Args:
      scores: float32 [N,B,T,K].  allowed: bool [B,T,K], at least one key for each query.

    Returns:
      float32 [N,B,T,K], 0 where not allowed, and float32 [N,B,T,1].
    """
    scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - largest)
    return weights, jnp.sum(weights, axis=-1, keepdims=True)


class Attention(nn.Module):
    """Multi-head attention of a segment to its memory and itself; by content alone as it stands.

    Parameters: ``query``, ``key``, ``value`` [D,N,H] (W_q, W_k,E, W_v), ``output`` [N,H,D]; no
    biases. Forms that know positions add their own.
    """

    cfg: TransformerXLConfig

    def setup(self):
        """Declares the projections."""
        c = self.cfg
        init = nn.initializers.normal(c.init_std)
        heads = (c.d_model, c.n_head, c.d_head)
        self.query = self.param("query", init, heads)
        self.key = self.param("key", init, heads)
        self.value = self.param("value", init, heads)
        self.output = self.param("output", init, (c.n_head, c.d_head, c.d_model))
        self.drop_attention = nn.Dropout(c.dropatt)
        self.drop_heads = nn.Dropout(c.dropout_qkv, broadcast_dims=(2,))

    def positions(self, n_keys: int, encodings, u, v, train: bool = False) -> Positions:
        """What positions add to the scores, for the distances n_keys - 1 .. 0.

        Args:
          n_keys: K.
          encodings: [K,D], sinusoids of these distances.
          u, v: [N,H], the global content and position biases of the model, if it has them.
          train: with dropout (needs the ``dropout`` rng).
        """
        return Positions()

    def project(self, states: jax.Array) -> KeysValues:
        """Keys and values of [B,S,D] states."""
        return KeysValues(self._heads(states, self.key), self._heads(states, self.value))

    def __call__(
        self,
        queries: jax.Array,
        present: KeysValues,
        past: KeysValues,
        positions: Positions,
        allowed: jax.Array,
        train: bool = False,
    ) -> jax.Array:
        """What each position gathers: [B,T,D], before dropout, residual and normalisation.

        Args:
          queries: [B,T,D], the states that ask.
          present: of the segment, T positions.
          past: of the memory, M positions; the model stopped its gradient.
          positions: for K = M + T keys.
          allowed: bool [B,T,K].
          train: with dropout (needs the ``dropout`` rng).
        """
        drop = lambda x: self.drop_heads(x, deterministic=not train)
        q = drop(self._heads(queries, self.query))
        k = drop(jnp.concatenate([past.keys, present.keys], axis=2))
        val = drop(jnp.concatenate([past.values, present.values], axis=2))
        scale = self.cfg.d_head**-0.5  # of the short sides, not of the T x K scores
        small = lambda x: None if x is None else x.astype(q.dtype) * scale
        q, u, v, b = q * scale, small(positions.u), small(positions.v), small(positions.b)
        scores = content_scores(q, u, k)
        if positions.r is not None:
            scores = scores + position_scores(q, v, positions.r, b)
        weights, total = softmax_parts(scores, allowed)
        weights = self.drop_attention(weights.astype(val.dtype), deterministic=not train)
        gathered = jnp.einsum("nbtk,nbkh->nbth", weights, val) / total.astype(val.dtype)
        return self._merge(gathered.transpose(1, 2, 0, 3))

    def _heads(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Projection of x [B,S,D] to heads [N,B,S,H], as one flat matrix product."""
        b, s, d = x.shape
        n, h = self.cfg.n_head, self.cfg.d_head
        flat = x.reshape(b * s, d) @ kernel.reshape(d, n * h).astype(x.dtype)
        return flat.reshape(b, s, n, h).transpose(2, 0, 1, 3)

    def _merge(self, x: jax.Array) -> jax.Array:
        """Projection of heads [B,T,N,H] back to [B,T,D]."""
        b, t, n, h = x.shape
        kernel = self.output.reshape(n * h, self.cfg.d_model).astype(x.dtype)
        return (x.reshape(b * t, n * h) @ kernel).reshape(b, t, self.cfg.d_model)

    def _project_encodings(self, encodings: jax.Array, kernel: jax.Array, train: bool) -> jax.Array:
        """Projection of encodings [K,D] to [N,K,H], with the heads' own dropout."""
        heads = self._heads(encodings[None], kernel)
        return self.drop_heads(heads, deterministic=not train)[:, 0]


class RelativeAttention(Attention):
    """The paper's: r_d is a projection of the sinusoid of distance d, u and v are the model's.

    Parameters: those of :class:`Attention` and ``position`` [D,N,H] (W_k,R).
    """

    def setup(self):
        """Declares the projections."""
        super().setup()
        c = self.cfg
        init = nn.initializers.normal(c.init_std)
        self.position = self.param("position", init, (c.d_model, c.n_head, c.d_head))

    def positions(self, n_keys, encodings, u, v, train=False):
        """See :meth:`Attention.positions`."""
        return Positions(u, v, self._project_encodings(encodings, self.position, train))
