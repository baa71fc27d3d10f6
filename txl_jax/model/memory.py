"""Memory: the hidden states of earlier segments, an explicit argument and result.

Layer n's memory is that layer's *input* in earlier segments (paper, section 3.2). Slots are
filled from the right: slot M-1 is the newest state, and the ``filled`` newest are real.

    M = 5, filled = 3:     [ ·  ·  s1 s2 s3 ]        · is masked, never attended to
    after two more tokens: [ s1 s2 s3 s4 s5 ]        filled = 5
"""

import flax.struct
import jax
import jax.numpy as jnp


class Memory(flax.struct.PyTreeNode):
    """What a model remembers: a pytree to carry from one segment to the next.

    Attributes:
      hidden: [L,B,M,D] in the compute dtype, the input of every layer at earlier positions.
      filled: int32 [B], how many of the newest slots hold real states, 0 to M.
    """

    hidden: jax.Array
    filled: jax.Array

    @property
    def mem_len(self) -> int:
        """M, the number of slots."""
        return self.hidden.shape[2]


def make(n_layer: int, batch_size: int, mem_len: int, d_model: int, dtype) -> Memory:
    """An empty memory: zeros [L,B,M,D], none of them filled."""
    return Memory(
        hidden=jnp.zeros((n_layer, batch_size, mem_len, d_model), dtype),
        filled=jnp.zeros((batch_size,), jnp.int32),
    )


def forget(memory: Memory, streams: jax.Array) -> Memory:
    """The memory with every stream of ``streams`` (bool [B]) emptied; shapes stay."""
    return memory.replace(filled=jnp.where(streams, 0, memory.filled))


def update(
    memory: Memory,
    layer_inputs: list[jax.Array],
    lengths: jax.Array | None = None,
    since_reset: jax.Array | None = None,
) -> Memory:
    """The last M of [memory; layer inputs], gradient stopped.

    Args:
      memory: M slots.
      layer_inputs: L arrays [B,T,D], the input of each layer in this segment.
      lengths: int32 [B], real tokens of each row (padding is on the right); ``None``: T.
      since_reset: int32 [B], real tokens since the row's last reset inside this segment, or
        -1 where there was none; states older than that are no longer real.
    """
    new = jnp.stack(layer_inputs).astype(memory.hidden.dtype)
    m, t = memory.mem_len, new.shape[2]
    if lengths is None:
        grown = memory.filled + t
        hidden = (
            new[:, :, t - m :]
            if m <= t
            else jnp.concatenate([memory.hidden[:, :, t:], new], axis=2)
        )
    else:
        grown = memory.filled + lengths
        both = jnp.concatenate([memory.hidden, new], axis=2)
        slide = lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, m, axis=1)
        hidden = jax.vmap(slide, in_axes=(1, 0), out_axes=1)(both, lengths)
    if since_reset is not None:
        grown = jnp.where(since_reset >= 0, since_reset, grown)
    hidden = jax.lax.stop_gradient(hidden)  # what is carried on is a constant there
    return Memory(hidden=hidden, filled=jnp.minimum(grown, m).astype(jnp.int32))
