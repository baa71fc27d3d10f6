"""What is minimised: negative log-likelihood over the scored targets."""

from typing import cast

import jax
import jax.numpy as jnp

from txl_jax.data.batch import Batch
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL


def batch_loss(
    params, model: TransformerXL, batch: Batch, mems: Memory, dropout_key: jax.Array, count
) -> tuple[jax.Array, tuple[jax.Array, Memory]]:
    """Sum of the batch's weighted nll over ``count``; the plain sum and new memory beside it.

    Args:
      params: the model's parameters.
      batch: [B,T] arrays.
      mems: memory before the segment.
      dropout_key: of this step and micro-batch.
      count: targets to divide by, those of the whole step: the parts of a step add up.

    Returns:
      loss in nats per target, float32 []; (sum of nll in nats, float32 []; memory after).
    """
    nll, after = model.apply(
        {"params": params},
        batch.inputs,
        batch.targets,
        mems,
        method="nll",
        train=True,
        reset=batch.reset,
        rngs={"dropout": dropout_key},
    )
    nll_sum = jnp.sum(nll * batch.weights)
    return nll_sum / count, (nll_sum, cast(Memory, after))
