"""Memory: the hidden states of earlier segments, an explicit argument and result.

Layer n's memory is that layer's *input* in earlier segments (paper, section 3.2). Slots are
filled from the right: slot M-1 is the newest state, and the ``filled`` newest are real.

    M = 5, filled = 3:     [ ·  ·  s1 s2 s3 ]        · is masked, never attended to
    after two more tokens: [ s1 s2 s3 s4 s5 ]        filled = 5

:class:`Cache` is the same memory for inference: what each layer projects its memory to, kept
instead of the states, so that a step projects its new tokens only.
"""

from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.model.attention import KeysValues, Positions


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


class Cache(flax.struct.PyTreeNode):
    """Projected memory, for inference: goes where a :class:`Memory` goes and gives the same.

    Attributes:
      keys, values: [L,N,B,M,H] in the compute dtype, of the same slots as in a memory.
      positions: for each layer what positions add to its scores, for the newest M + T keys; T is
        the longest segment that may follow.
      filled: int32 [B], as in a memory.
    """

    keys: jax.Array
    values: jax.Array
    positions: tuple[Positions, ...]
    filled: jax.Array
    seg_len: int = flax.struct.field(pytree_node=False)

    @property
    def mem_len(self) -> int:
        """M, the number of slots."""
        return self.keys.shape[3]

    def past(self, n: int) -> KeysValues:
        """Keys and values of layer n."""
        return KeysValues(self.keys[n], self.values[n])


AnyMemory = TypeVar("AnyMemory", Memory, Cache)


def make(n_layer: int, batch_size: int, mem_len: int, d_model: int, dtype) -> Memory:
    """An empty memory: zeros [L,B,M,D], none of them filled."""
    return Memory(
        hidden=jnp.zeros((n_layer, batch_size, mem_len, d_model), dtype),
        filled=jnp.zeros((batch_size,), jnp.int32),
    )


def forget(memory: AnyMemory, streams: jax.Array) -> AnyMemory:
    """The memory with every stream of ``streams`` (bool [B]) emptied; shapes stay."""
    return memory.replace(filled=jnp.where(streams, 0, memory.filled))


def update(
    memory: Memory,
    layer_inputs: jax.Array,
    lengths: jax.Array | None = None,
    since_reset: jax.Array | None = None,
) -> Memory:
    """The last M of [memory; layer inputs], gradient stopped.

    Args:
      memory: M slots.
      layer_inputs: [L,B,T,D], the input of each layer in this segment.
      lengths: int32 [B], real tokens of each row (padding is on the right); ``None``: T.
      since_reset: int32 [B], real tokens since the row's last reset inside this segment, or
        -1 where there was none; states older than that are no longer real.
    """
    new = layer_inputs.astype(memory.hidden.dtype)
    hidden = jax.lax.stop_gradient(_newest(memory.hidden, new, lengths, rows=1))  # a constant there
    return Memory(hidden, _filled(memory, new.shape[2], lengths, since_reset))


def update_cache(
    cache: Cache,
    layers: list[KeysValues],
    lengths: jax.Array | None = None,
    since_reset: jax.Array | None = None,
) -> Cache:
    """The last M of what is cached and what each layer projected, [N,B,T,H]; see :func:`update`."""
    keys, values = (jnp.stack(x).astype(cache.keys.dtype) for x in zip(*layers, strict=True))
    return cache.replace(
        keys=_newest(cache.keys, keys, lengths, rows=2),
        values=_newest(cache.values, values, lengths, rows=2),
        filled=_filled(cache, keys.shape[3], lengths, since_reset),
    )


def _newest(old: jax.Array, new: jax.Array, lengths: jax.Array | None, rows: int) -> jax.Array:
    """The last M real slots of [old; new] along the axis after ``rows``, row by row."""
    time = rows + 1
    m, t = old.shape[time], new.shape[time]
    if lengths is None:
        if m <= t:
            return jax.lax.slice_in_dim(new, t - m, t, axis=time)
        return jnp.concatenate([jax.lax.slice_in_dim(old, t, m, axis=time), new], axis=time)
    both = jnp.concatenate([old, new], axis=time)
    slide = lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, m, axis=rows)
    return jax.vmap(slide, in_axes=(rows, 0), out_axes=rows)(both, lengths)


def _filled(memory, seg_len: int, lengths, since_reset) -> jax.Array:
    grown = memory.filled + (seg_len if lengths is None else lengths)
    if since_reset is not None:
        grown = jnp.where(since_reset >= 0, since_reset, grown)
    return jnp.minimum(grown, memory.mem_len).astype(jnp.int32)
