"""The memories that benchmarks/memory_tasks.py compares, each as the torso of a memorax network.

The torso is the part of the network between the encoder of inputs and the output heads.

    gru         a GRU cell in memorax's RNN
    attention   memorax's attention with ALiBi, segment recurrence and gates, as in its README
    txl         txl_jax.agents.SequenceModel without gates
    gtrxl       txl_jax.agents.SequenceModel with GRU gates (GTrXL)

The attention of memorax keeps the keys and values of the last ``window`` steps, and its segment
recurrence keeps the outputs of ``mem_len`` steps. Each layer here has its own parameters, unlike
blocks that are repeated by ``(attention, ffn) * n``. In memorax 1.0.1, ALiBi adds slope x distance
to a score, so heads prefer old steps. RoPE is not used here, because memorax 1.0.1 stores rotated
keys and rotates them again at the next step. Even with ALiBi, acting and learning give different
outputs from the second rollout on. In learning, a window attends to the memory at the start of the
window. In acting, a step attends to the memory after the previous step.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from memorax.networks import (
    FFN,
    RNN,
    ALiBi,
    GatedResidual,
    PreNorm,
    SegmentRecurrence,
    SelfAttention,
    Stack,
)

import txl_jax
from txl_jax import agents

LAYERS, WIDTH, HEADS = 2, 64, 4
INNER = {"txl": 480, "gtrxl": 96}
"""Widths of the feed-forward layers; they give all four memories 166,000 parameters (+- 1%)."""
GRU_WIDTH, EXPANSION = 205, 7


def gru(width: int) -> nn.Module:
    """Returns a GRU with ``width`` units."""
    return RNN(nn.GRUCell(width))


def attention(width: int, window: int, mem_len: int, expansion: int, layers=LAYERS) -> nn.Module:
    """Returns ``layers`` layers of memorax's attention, each followed by a feed-forward layer.

    Attention keeps ``window`` steps, and its segment recurrence ``mem_len`` steps.
    """
    blocks: list[Any] = []
    for _ in range(layers):
        own = SelfAttention(
            features=width,
            num_heads=HEADS,
            context_length=window,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            kernel_init=nn.initializers.lecun_normal(),
            bias_init=nn.initializers.zeros_init(),
            positional_embedding=ALiBi(HEADS),
        )
        recurrent = SegmentRecurrence(own, mem_len, width, dtype=jnp.float32)
        blocks.append(GatedResidual(PreNorm(recurrent)))
        blocks.append(GatedResidual(PreNorm(FFN(width, expansion))))
    return Stack(tuple(blocks))


def txl(width: int, mem_len: int, inner: int, gated: bool, layers=LAYERS) -> nn.Module:
    """Returns txl_jax's model: GTrXL if ``gated``, else the same model without gates."""
    cfg = txl_jax.TransformerXLConfig(
        n_layer=layers, d_model=width, n_head=HEADS, d_head=width // HEADS, d_inner=inner,
        pre_lnorm=True, final_norm=not gated, untie_r=True, activation="gelu",
        attention_bias=True, init_std=width**-0.5, same_length="tf",
        gate="gru" if gated else None, gate_bias=2.0 if gated else 0.0,
    )  # fmt: skip
    return agents.SequenceModel(cfg, mem_len)


def torso(name: str, window: int, mem_len: int) -> nn.Module:
    """Returns the memory module called ``name``, for inputs of WIDTH numbers."""
    if name == "gru":
        return gru(GRU_WIDTH)
    if name == "attention":
        return attention(WIDTH, window, mem_len, EXPANSION)
    return txl(WIDTH, mem_len, INNER[name], name == "gtrxl")


def parameters(module: Any, width: int) -> int:
    """Returns the number of parameters of a torso."""
    carry = module.initialize_carry(jax.random.key(0), (1, width))
    init = lambda: module.init(
        jax.random.key(0), jnp.zeros((1, 1, width)), mask=jnp.zeros((1, 1)), initial_carry=carry
    )
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(init)))
