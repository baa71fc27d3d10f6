"""What every implementation of attention is given, as one value."""

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions


class AttentionInputs(flax.struct.PyTreeNode):
    """Queries, keys and values, and what decides the weights between them.

    Attributes:
      q: [N,B,T,H]; q and the positions' u, v and b are divided by sqrt(H).
      k, val: [N,B,K,H], of memory and segment, oldest first; K = M + T.
      mask: every query may attend at least to itself.
    """

    q: jax.Array
    k: jax.Array
    val: jax.Array
    positions: Positions
    mask: AttentionMask
    dropout: AttentionDropout | None = None

    def biased_queries(self) -> tuple[jax.Array, jax.Array]:
        """q + u and q + v, [N,B,T,H] each: what keys and distances are multiplied by."""
        biased = lambda x: self.q if x is None else (self.q + x[:, None, None]).astype(self.q.dtype)
        return biased(self.positions.u), biased(self.positions.v)

    def unsupported_by_fused(self) -> str | None:
        """Why the fused kernels for GPUs and TPUs cannot compute this form; ``None``: they can."""
        dtype = jnp.dtype(self.q.dtype)
        if self.positions.r is None:
            return "it is for attention with vectors of distances (r), and this form has none"
        if self.positions.b is not None:
            return "it has no learnt scalars of distances (b)"
        if dtype not in (jnp.bfloat16, jnp.float32):
            return f"it is for bfloat16 and float32, not {dtype.name}"
        return None
