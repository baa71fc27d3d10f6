"""Attention to memory and segment behind one function, computed as a name says.

    reference    plainly: all T x K scores at once
    xla          some queries at a time, computed again for the gradient: O(K) memory; anywhere
    triton       fused, for NVIDIA GPUs
    pallas_tpu   fused, for TPUs
    cudnn        fused by NVIDIA's library, the position term handed to it as a bias

All give the same, gradients included, with the same dropout mask (dropping.py).
"""

from txl_jax.model.kernels.choice import IMPLEMENTATIONS, attend

__all__ = ["IMPLEMENTATIONS", "attend"]
