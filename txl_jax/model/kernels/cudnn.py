"""Attention by NVIDIA's cuDNN, through ``jax.nn.dot_product_attention``.

The position scores [N,B,T,K] enter as a bias; device memory holds them and their gradient. The
products with keys and the softmax are fused. Dropout of weights and float32 are not supported.
Older versions of cuDNN gave a wrong gradient of the bias for more than one row. So ``auto`` never
chooses cuDNN, and training first compares it with the plain form (parity.py).
"""

import jax
import jax.numpy as jnp

from txl_jax.model.kernels.reference import AttentionInputs
from txl_jax.model.masks import BothWaysMask
from txl_jax.model.scores import position_scores


def supports(x: AttentionInputs) -> str | None:
    """Returns the reason why this kernel cannot compute the form, or ``None`` if it can."""
    (t, h), n_keys, dtype = x.q.shape[2:], x.mask.n_keys, jnp.dtype(x.q.dtype)
    if isinstance(x.mask, BothWaysMask):
        return "it does not support attention in both directions"
    if x.dropout is not None:
        return "it does not support dropout of attention weights (model.dropatt)"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it supports bfloat16 and float16, not {dtype}"
    if h % 8 or h > 256:
        return f"it needs model.d_head to be a multiple of 8 and at most 256, not {h}"
    if t % 2 or n_keys % 2:
        return f"it needs even numbers of queries and keys, not {t} and {n_keys}"
    return None


def attend(x: AttentionInputs) -> jax.Array:
    """Computes :func:`txl_jax.model.kernels.choice.attend` with cuDNN."""
    p, bias = x.positions, None
    if p.of_distances:
        bias = position_scores(x.q, p.v, p.r, p.b).astype(x.q.dtype).swapaxes(0, 1)
    by_row = lambda heads: heads.transpose(1, 2, 0, 3)  # [B,T,N,H]
    q, k, val = by_row(x.biased_queries()[0]), by_row(x.k), by_row(x.val)
    mask = x.mask.allowed()[:, None]
    gathered = jax.nn.dot_product_attention(
        q, k, val, bias, mask, scale=1.0, implementation="cudnn"
    )
    return gathered.transpose(2, 0, 1, 3)
