"""Attention with the paper's relative positions, as a function for models of your own."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.messages import UserError
from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.kernels.choice import attend
from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.model.masks import AttentionMask, BothWaysMask
from txl_jax.model.positions import Positions


def relative_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    r: jax.Array,
    u: jax.Array | None = None,
    v_bias: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    lengths: jax.Array | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Returns attention with relative positions, [B,T,N,H] in the dtype of q; differentiable.

    Query i is at position M+i of the K keys, with M = K - T, and its score with key j is

        ( (q_i + u).k_j  +  (q_i + v_bias).r_d ) scale,        d = M + i - j

    (Dai et al. 2019, section 3.3). The output is the sum of the values v_j, weighted by the softmax
    over the keys that the query sees. A fused kernel computes it on TPUs and on NVIDIA GPUs from
    compute capability 8.0 for segments of 128 queries or more, otherwise XLA.

    Args:
      q: queries [B,T,N,H], not scaled.
      k, v: keys and values [B,K,N,H], K >= T; the first M = K - T are memory, such as the keys of
        an earlier segment.
      r: vectors of distances [R,N,H], of which row c is for the distance K-1-c: K rows if
        ``causal``, else K+T-1 rows, down to the distance -(T-1).
      u, v_bias: biases of the queries [N,H]; ``None`` means 0.
      causal: queries see no later keys.
      window: the largest distance, either way, that a query sees; ``None`` means all.
      lengths: int32 [B], the numbers of real tokens among the T; no query sees the others, and
        their outputs are 0. ``None`` means T.
      scale: ``None`` means 1 / sqrt(H).
      dropout_rate: the probability that a weight is dropped; needs ``dropout_key``.
      implementation: ``auto``, or one by name (the setting ``model.kernel``). ``cudnn`` and
        ``pallas_tpu`` do not support ``causal=False``.
      mesh: the devices over which rows and heads are split, if there are several.

    Raises UserError if shapes do not fit together.

    >>> import jax, jax.numpy as jnp, txl_jax
    >>> from txl_jax.model.positions import sinusoids
    >>> draw = lambda i, *sides: jax.random.normal(jax.random.key(i), sides)
    >>> heads = lambda i, x: jnp.einsum("...d,dnh->...nh", x, draw(i, 64, 4, 16) / 8)
    >>> speech = draw(0, 2, 100, 64)  # the frames of two utterances, the second padded
    >>> q, k, v = (heads(i, speech) for i in (1, 2, 3))
    >>> r = heads(4, sinusoids(jnp.arange(99, -100, -1), 64))
    >>> lengths = jnp.array([100, 70])
    >>> txl_jax.relative_attention(q, k, v, r, causal=False, lengths=lengths).shape
    (2, 100, 4, 16)
    """
    (b, t, n, h), n_keys = q.shape, k.shape[1]
    mem_len, reach = n_keys - t, n_keys - 1 if window is None else min(window, n_keys - 1)
    mask = AttentionMask(jnp.full(b, mem_len, jnp.int32), None, t, mem_len, reach)
    real = jnp.full(b, t, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    if not causal:
        mask = BothWaysMask(real, None, t, mem_len, reach)
    expected = {"k": (b, n_keys, n, h), "v": (b, n_keys, n, h), "r": (mask.n_distances, n, h)}
    expected |= {"u": (n, h), "v_bias": (n, h)}
    for name, given in {"k": k, "v": v, "r": r, "u": u, "v_bias": v_bias}.items():
        if given is not None and given.shape != expected[name]:
            why = f"q {q.shape}, {n_keys} keys and causal={causal} need {expected[name]}"
            raise UserError(f"relative_attention: {name} has the shape {given.shape}, and {why}")
    if mem_len < 0:
        raise UserError(f"relative_attention: {n_keys} keys are fewer than the {t} queries")
    if reach < 0:
        raise UserError(f"relative_attention: window = {window}: must be at least 0")
    dropout = None
    if dropout_rate:
        if dropout_key is None:
            raise UserError("relative_attention: dropout_rate needs a dropout_key")
        dropout = AttentionDropout.draw(dropout_key, dropout_rate)
    scaled = lambda x: x * jnp.asarray(h**-0.5 if scale is None else scale, x.dtype)
    scaled_bias = lambda x: None if x is None else scaled(x.astype(q.dtype))
    by_head = lambda x: x.astype(q.dtype).transpose(2, 0, 1, 3)
    positions = Positions(scaled_bias(u), scaled_bias(v_bias), by_head(r[None])[:, 0])
    x = AttentionInputs(scaled(by_head(q)), by_head(k), by_head(v), positions, mask, dropout)
    out = attend(x, implementation, mesh).transpose(1, 2, 0, 3)
    if lengths is None:
        return out
    is_real = jnp.arange(t) < real[:, None]
    return jnp.where(is_real[:, :, None, None], out, jnp.zeros_like(out))
