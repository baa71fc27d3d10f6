"""Memory: the hidden states of earlier segments, an explicit argument and result.

Layer n's memory is that layer's *input* in earlier segments (paper, section 3.2). Slots are
filled from the right: slot M-1 is the newest state, and the ``filled`` newest are real.

    M = 5, filled = 3:     [ ·  ·  s1 s2 s3 ]        · is masked, never attended to
    after two more tokens: [ s1 s2 s3 s4 s5 ]        filled = 5

:class:`Cache` is the same memory for inference. It holds the keys and values that each layer
projects its memory to, so that a step projects its new tokens only, in a ring (ring.py), so that a
step moves no other states.
"""

from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.model import ring
from txl_jax.model.positions import Positions
from txl_jax.model.ring import KeysValues
from txl_jax.parallel.mesh import ROWS
from txl_jax.parallel.ordering import zero_after
from txl_jax.parallel.shardings import Shardings


class Memory(flax.struct.PyTreeNode):
    """The hidden states of earlier segments: a pytree to carry from one segment to the next.

    Example:
      >>> import jax, txl_jax
      >>> cfg = txl_jax.TransformerXLConfig(
      ...     vocab_size=11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=16)
      >>> model = txl_jax.TransformerXL(cfg)
      >>> mems = model.init_mems(batch_size=1, mem_len=4)
      >>> mems.hidden.shape, mems.filled.tolist()
      ((2, 1, 4, 8), [0])
      >>> tokens = jax.numpy.array([[3, 1, 4]])
      >>> variables = model.init(jax.random.key(0), tokens, mems)
      >>> _, mems = model.apply(variables, tokens, mems)
      >>> mems.filled.tolist()  # the oldest slot is not real yet
      [3]

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


class Slots(flax.struct.PyTreeNode):
    """A ring of projected states in every layer (ring.py).

    Attributes:
      keys, values: of each layer [N,B,R,H] in the compute dtype.
      oldest: int32 [], the slot of the oldest state in every row and layer.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    oldest: jax.Array

    @property
    def count(self) -> int:
        """R."""
        return self.keys[0].shape[2]

    def ring(self, n: int) -> ring.Ring:
        """Layer n's slots."""
        return ring.Ring(self.keys[n], self.values[n], self.oldest)

    def in_order(self, n: int) -> KeysValues:
        """Keys and values of layer n [N,B,R,H], oldest first (copies)."""
        in_order = lambda x: jnp.roll(x, -self.oldest, axis=2)
        return KeysValues(in_order(self.keys[n]), in_order(self.values[n]))


class Cache(flax.struct.PyTreeNode):
    """Projected memory for inference: replaces a :class:`Memory` and gives the same results.

    Example:
      >>> import jax, txl_jax
      >>> cfg = txl_jax.TransformerXLConfig(
      ...     vocab_size=11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=16)
      >>> model = txl_jax.TransformerXL(cfg)
      >>> mems = model.init_mems(batch_size=1, mem_len=4)
      >>> tokens = jax.numpy.array([[3, 1, 4]])
      >>> variables = model.init(jax.random.key(0), tokens, mems)
      >>> cache = model.apply(variables, mems, seg_len=3, method="init_cache")
      >>> logits, cache = model.apply(variables, tokens, cache)
      >>> cache.filled.tolist(), cache.slots  # M, rounded up to whole segments
      ([3], 6)

    Attributes:
      near: the rings of the newest states: all states, or with a ``clamp_len`` and segments of
        more than a few tokens those that may be within it.
      far: the rings of the older states; ``None`` if there are none.
      positions: for each layer the position terms of the newest keys, those of ``near`` and T.
      filled: int32 [B], as in a memory.
      mem_len: M.
      seg_len: T, the longest segment that may follow. A segment of exactly this length is written
        in place if the caller does not keep the old cache (``donate_argnums``, a carry of
        ``lax.scan``). A shorter segment, or one with ``lengths``, moves all slots.
    """

    near: Slots
    far: Slots | None
    positions: tuple[Positions, ...]
    filled: jax.Array
    mem_len: int = flax.struct.field(pytree_node=False)
    seg_len: int = flax.struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        """R, of both rings together."""
        return self.near.count + (0 if self.far is None else self.far.count)

    def rings(self, n: int) -> ring.Rings:
        """Layer n's slots."""
        return ring.Rings(self.near.ring(n), None if self.far is None else self.far.ring(n))

    def past(self, n: int) -> KeysValues:
        """Keys and values of layer n [N,B,M,H], oldest first (copies)."""
        parts = [x.in_order(n) for x in (self.far, self.near) if x is not None]
        first = self.slots - self.mem_len
        newest = lambda *x: jnp.concatenate(x, axis=2)[:, :, first:]
        return jax.tree.map(newest, *parts)


AnyMemory = TypeVar("AnyMemory", Memory, Cache)


def constant(hidden: jax.Array) -> jax.Array:
    """SG(hidden), section 3.2: memory is a constant for the gradient, when read and when kept."""
    return jax.lax.stop_gradient(hidden)


def memory_shardings(shardings: Shardings) -> Memory:
    """Shardings of a memory: each stream's states are on the devices of its row."""
    hidden, filled = shardings.rows(leading_axis=True), shardings.rows()
    return Memory(hidden, filled)  # type: ignore[arg-type]


def cache_shardings(shardings: Shardings, abstract: Cache) -> Cache:
    """Shardings of a cache, given its shapes: heads over ``tensor``, streams by their rows."""
    heads = lambda *axes: lambda leaf: shardings.sharded(("tensor", *axes), leaf.shape)
    slots = lambda x: Slots(
        jax.tree.map(heads(ROWS), x.keys),
        jax.tree.map(heads(ROWS), x.values),
        shardings.replicated(),  # type: ignore[arg-type]
    )
    return abstract.replace(
        near=slots(abstract.near),
        far=None if abstract.far is None else slots(abstract.far),
        positions=jax.tree.map(heads(), abstract.positions),
        filled=shardings.rows(),
    )


def reset_streams(memory: AnyMemory, reset: jax.Array) -> AnyMemory:
    """The memory with the streams of ``reset`` (bool [B]) emptied; shapes stay."""
    return memory.replace(filled=jnp.where(reset, 0, memory.filled))


def update(
    memory: Memory,
    layer_inputs: jax.Array,
    lengths: jax.Array | None = None,
    since_reset: jax.Array | None = None,
) -> Memory:
    """The last M states of [memory; layer inputs], as a constant for the gradient.

    Args:
      memory: M slots.
      layer_inputs: [L,B,T,D], the input of each layer in this segment.
      lengths: int32 [B], real tokens of each row (padding is on the right); ``None``: T.
      since_reset: int32 [B], real tokens since the row's last reset inside this segment, or
        -1 where there was none; states older than that are no longer real.
    """
    new = layer_inputs.astype(memory.hidden.dtype)
    hidden = constant(_newest(memory.hidden, new, lengths))
    return Memory(hidden, _filled(memory, new.shape[2], lengths, since_reset))


def make_cache(
    past: list[KeysValues],
    positions: tuple[Positions, ...],
    filled: jax.Array,
    slots: tuple[int, int],
    seg_len: int,
) -> Cache:
    """A cache of each layer's M projected states, oldest first.

    Args:
      past: [N,B,M,H] of each layer.
      positions: for the keys of the near ring and of a segment.
      filled: int32 [B].
      slots: of the near ring and of the far one, see ring.py.
      seg_len: T.
    """
    near, far = _in_slots(past, slots)
    return Cache(near, far, positions, filled, mem_len=past[0].keys.shape[2], seg_len=seg_len)


def _in_slots(past: list[KeysValues], slots: tuple[int, int]) -> tuple[Slots, Slots | None]:
    """[N,B,M,H] of each layer, oldest first, as rings whose oldest slot is 0."""
    (near, far), mem_len = slots, past[0].keys.shape[2]

    def part(start: int, stop: int) -> Slots:
        pad = lambda x: jnp.pad(x, [(0, 0), (0, 0), (near + far - mem_len, 0), (0, 0)])
        keys, values = zip(*jax.tree.map(lambda x: pad(x)[:, :, start:stop], past), strict=True)
        return Slots(keys, values, jnp.zeros((), jnp.int32))

    return part(far, far + near), part(0, far) if far else None


def update_cache(
    cache: Cache,
    layers: list[KeysValues],
    done: jax.Array,
    lengths: jax.Array | None = None,
    since_reset: jax.Array | None = None,
) -> Cache:
    """The cache after a segment, of which each layer projected [N,B,T,H]; see :func:`update`.

    ``done``: any result of all reads of the cache, so that nothing is overwritten before them.
    """
    seg_len = layers[0].keys.shape[2]
    filled = _filled(cache, seg_len, lengths, since_reset)
    if not cache.mem_len:
        return cache.replace(filled=filled)
    if seg_len == cache.seg_len and lengths is None:
        near, far = _advanced(cache, layers, done)
    else:
        newest = lambda old, new: _newest(old, new.astype(old.dtype), lengths)
        past = [jax.tree.map(newest, cache.past(n), new) for n, new in enumerate(layers)]
        near, far = _in_slots(past, (cache.near.count, cache.slots - cache.near.count))
    return cache.replace(near=near, far=far, filled=filled)


def _advanced(
    cache: Cache, layers: list[KeysValues], done: jax.Array
) -> tuple[Slots, Slots | None]:
    """The rings after a segment of T tokens, which overwrites the oldest states of the near ring.

    The writes wait for all reads: otherwise the compiler keeps a copy of every ring.
    """
    near, far = cache.near, cache.far
    seg_len = layers[0].keys.shape[2]
    after = lambda done, slots: slots.oldest + zero_after(done, slots.oldest)

    def write(new, near_slots, far_slots):
        if far_slots is None:
            return ring.write(near_slots, new, after(done, near)), None
        leaving = ring.read(near_slots, near.oldest, seg_len)
        far_slots = ring.write(far_slots, leaving, after(done, far))
        moved = far_slots[:1, :1, :1, :1]
        return ring.write(near_slots, new, after(moved, near)), far_slots

    def write_all(new, near_slots, far_slots):
        far_slots = far_slots or (None,) * len(new)
        return zip(*map(write, new, near_slots, far_slots), strict=True)

    keys, values = zip(*layers, strict=True)
    near_keys, far_keys = write_all(keys, near.keys, far and far.keys)
    near_values, far_values = write_all(values, near.values, far and far.values)
    oldest = lambda slots: ((slots.oldest + seg_len) % slots.count).astype(jnp.int32)
    return (
        Slots(near_keys, near_values, oldest(near)),
        None if far is None else Slots(far_keys, far_values, oldest(far)),
    )


def _newest(old: jax.Array, new: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """The last M real slots of [old; new], [.,B,M,.] and [.,B,T,.], row by row."""
    m, t = old.shape[2], new.shape[2]
    if lengths is None:
        if m <= t:
            return jax.lax.slice_in_dim(new, t - m, t, axis=2)
        return jnp.concatenate([jax.lax.slice_in_dim(old, t, m, axis=2), new], axis=2)
    both = jnp.concatenate([old, new], axis=2)
    slide = lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, m, axis=1)
    return jax.vmap(slide, in_axes=(1, 0), out_axes=1)(both, lengths)


def _filled(memory, seg_len: int, lengths, since_reset) -> jax.Array:
    grown = memory.filled + (seg_len if lengths is None else lengths)
    if since_reset is not None:
        grown = jnp.where(since_reset >= 0, since_reset, grown)
    return jnp.minimum(grown, memory.mem_len).astype(jnp.int32)
