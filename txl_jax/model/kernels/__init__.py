"""One function for attention to memory and segment, with several implementations.

    reference    all T x K scores at once, in plain JAX
    xla          groups of queries, computed again for the gradient: O(K) memory, any device
    triton       fused, for NVIDIA GPUs
    pallas_tpu   fused, for TPUs

All of them give the same values and gradients, with the same dropout mask (model/dropout.py).
"""

from txl_jax.model.kernels.choice import IMPLEMENTATIONS, attend
from txl_jax.model.kernels.reference import AttentionInputs

__all__ = ["IMPLEMENTATIONS", "AttentionInputs", "attend"]
