"""Attention with relative positions over memory and segment (paper, section 3.3)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import TransformerXLConfig
from txl_jax.model.positions import relative_shift


def content_scores(q: jax.Array, u: jax.Array, k: jax.Array) -> jax.Array:
    """Terms (a) q.k and (c) u.k, content and global content: float32 [N,B,T,K].

    Args:
      q: [N,B,T,H].  u: [N,H].  k: [N,B,K,H].
    """
    q = q + u[:, None, None, :]
    return jnp.einsum("nbth,nbkh->nbtk", q, k, preferred_element_type=jnp.float32)


def position_scores(q: jax.Array, v: jax.Array, r: jax.Array) -> jax.Array:
    """Terms (b) q.r and (d) v.r, content-dependent and global position: float32 [N,B,T,K].

    Args:
      q: [N,B,T,H].  v: [N,H].  r: [N,K,H], projections of the distances K-1 .. 0.
    """
    q = q + v[:, None, None, :]
    scores = jnp.einsum("nbth,nkh->nbtk", q, r, preferred_element_type=jnp.float32)
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


class RelativeAttention(nn.Module):
    """Multi-head attention of a segment to its memory and itself.

    Parameters: ``query``, ``key``, ``value``, ``position`` [D,N,H] (W_q, W_k,E, W_v, W_k,R),
    ``output`` [N,H,D]; no biases. u and v belong to the model, which may share them.
    """

    cfg: TransformerXLConfig

    def setup(self):
        """Declares the five projections."""
        c = self.cfg
        init = nn.initializers.normal(c.init_std)
        heads = (c.d_model, c.n_head, c.d_head)
        self.query = self.param("query", init, heads)
        self.key = self.param("key", init, heads)
        self.value = self.param("value", init, heads)
        self.position = self.param("position", init, heads)
        self.output = self.param("output", init, (c.n_head, c.d_head, c.d_model))
        self.drop_attention = nn.Dropout(c.dropatt)

    def __call__(self, h, memory, r, u, v, allowed, train: bool = False) -> jax.Array:
        """What each position gathers: [B,T,D], before dropout, residual and normalisation.

        Args:
          h: [B,T,D], the segment.
          memory: [B,M,D], older states; the model stopped their gradient.
          r: [K,D], encodings of the distances K-1 .. 0.
          u, v: [N,H], the global content and position biases.
          allowed: bool [B,T,K].
          train: with dropout on the probabilities (needs the ``dropout`` rng).
        """
        q = self._heads(h, self.query)
        k = jnp.concatenate([self._heads(memory, self.key), self._heads(h, self.key)], axis=2)
        val = jnp.concatenate([self._heads(memory, self.value), self._heads(h, self.value)], axis=2)
        r = self._heads(r[None], self.position)[:, 0]
        scale = self.cfg.d_head**-0.5
        u, v = u.astype(q.dtype), v.astype(q.dtype)
        scores = content_scores(q * scale, u * scale, k) + position_scores(q * scale, v * scale, r)
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
