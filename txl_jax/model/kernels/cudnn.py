"""Attention by NVIDIA's cuDNN, through ``jax.nn.dot_product_attention``.

Positions enter as a bias: their scores [N,B,T,K] and the gradient of them are kept in device
memory, the products with keys and the softmax are fused. No dropout of weights, half precision
only. Older versions gave a wrong gradient of the bias for more than one row, so it is used by name
only, and training compares it with the plain form before it starts (parity.py).
"""

import jax
import jax.numpy as jnp

from txl_jax.model.kernels.dropping import Dropping
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.model.scores import position_scores


def supports(q_shape, n_keys: int, positions: Positions, dropping, dtype) -> str | None:
    """Why this form cannot be computed here, in words; ``None``: it can."""
    t, h = q_shape[2:]
    if dropping is not None:
        return "it has no dropout of attention weights (model.dropatt)"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it is for bfloat16 and float16, not {jnp.dtype(dtype)}"
    if h % 8 or h > 256:
        return f"it has heads of a multiple of 8 up to 256, not of {h}"
    if t % 2 or n_keys % 2:
        return f"it has even numbers of queries and keys, not {t} and {n_keys}"
    return None


def attend(
    q: jax.Array,
    k: jax.Array,
    val: jax.Array,
    positions: Positions,
    visible: AttentionMask,
    dropping: Dropping | None = None,
) -> jax.Array:
    """See :func:`txl_jax.model.kernels.choice.attend`."""
    bias = None
    if positions.r is not None:
        scores = position_scores(q, positions.v, positions.r, positions.b)
        bias = scores.astype(q.dtype).swapaxes(0, 1)
    if positions.u is not None:
        q = q + positions.u[:, None, None, :]
    theirs = lambda x: x.transpose(1, 2, 0, 3)  # [B,T,N,H]
    mask = visible.allowed()[:, None]
    gathered = jax.nn.dot_product_attention(
        theirs(q), theirs(k), theirs(val), bias, mask, scale=1.0, implementation="cudnn"
    )
    return gathered.transpose(2, 0, 1, 3)
