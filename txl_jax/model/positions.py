"""Relative positions: position terms of scores, sinusoids, clamping, and the relative shift."""

import functools

import flax.struct
import jax
import jax.numpy as jnp


class Positions(flax.struct.PyTreeNode):
    """The position terms of one layer's scores; an absent term is ``None``.

    A subclass can change the softmax over scores. No fused kernel supports a subclass.
    """

    u: jax.Array | None = None  # [N,H], added to queries for the product with keys
    v: jax.Array | None = None  # [N,H], added to queries for the product with r
    r: jax.Array | None = None  # [N,K,H], vectors of the distances K-1 .. 0
    b: jax.Array | None = None  # [N,K], scalars of these distances

    @property
    def of_distances(self) -> bool:
        """Whether scores have a term that depends on the distance."""
        return self.r is not None or self.b is not None

    def softmax(
        self, *parts: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Returns softmax numerators [N,B,T,K], 0 where masked, and their sum [N,B,T,1]: float32.

        The numerators are not divided by their sum here. The caller divides the weighted sums of
        values instead, because these are T x H numbers in place of T x K. On a CPU this saves a
        third of attention's time. ``parts`` are the scores, float32 [N,B,T,K], and the mask, bool
        [B,T,K], of each set of keys. Each query must have at least one allowed key.
        """
        least = jnp.finfo(jnp.float32).min
        masked = [jnp.where(allowed, scores, least) for scores, allowed in parts]
        largest = functools.reduce(jnp.maximum, (x.max(axis=-1, keepdims=True) for x in masked))
        largest = jax.lax.stop_gradient(largest)
        weights = tuple(jnp.exp(x - largest) for x in masked)
        total = functools.reduce(jnp.add, (x.sum(axis=-1, keepdims=True) for x in weights))
        return weights, total

    def nearest(self, n_keys: int) -> "Positions":
        """Returns the terms of the distances n_keys - 1 .. 0."""
        newest = lambda x: None if x is None else x[:, x.shape[1] - n_keys :]
        return self.replace(r=newest(self.r), b=newest(self.b))


def sinusoids(distances: jax.Array, d_model: int) -> jax.Array:
    """Returns the encodings R_d of distances: float32 [..., D], first all sines, then all cosines.

    Frequencies are 10000^(-2k/D) for k = 0 .. D/2-1 (paper, section 3.3; Vaswani et al. 2017,
    section 3.5, which interleaves sines and cosines).
    """
    frequencies = 1.0 / (10000.0 ** (jnp.arange(0, d_model, 2, dtype=jnp.float32) / d_model))
    angles = distances.astype(jnp.float32)[..., None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def clamped(distances: jax.Array, clamp_len: int) -> jax.Array:
    """Limits distances to ``clamp_len``; -1 means no limit."""
    return jnp.minimum(distances, clamp_len) if clamp_len > 0 else distances


def relative_shift(x: jax.Array) -> jax.Array:
    """Moves row i of [...,T,K] left by T-1-i; column j then holds the score of distance M+i-j.

    This needs only padding and reshaping (paper, appendix B). For T = 3 and K = 5 (entries are
    distances; x has no meaning, and the causal mask hides it):

        4 3 2 1 0        2 1 0 x x
        4 3 2 1 0   ->   3 2 1 0 x
        4 3 2 1 0        4 3 2 1 0
    """
    *lead, t, k = x.shape
    padded = jnp.pad(x, [(0, 0)] * len(lead) + [(0, 0), (1, 0)])
    return padded.reshape(*lead, k + 1, t)[..., 1:, :].reshape(*lead, t, k)


def positions_from_end(seg_len: int, lengths: jax.Array | None) -> jax.Array:
    """Returns each position's distance to the last real token, 0 in the padding: [T] or [B,T]."""
    position = jnp.arange(seg_len)
    if lengths is None:
        return seg_len - 1 - position
    return jnp.maximum(lengths[:, None] - 1 - position, 0)
