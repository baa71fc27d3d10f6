"""The memory: hidden states of earlier segments, which the model takes and returns explicitly.

Layer n's memory is that layer's *input* in earlier segments (paper, section 3.2). Slots are filled
from the right: slot M-1 has the newest state, and the newest ``filled`` slots have real states.

    M = 5, filled = 3:     [ ·  ·  s1 s2 s3 ]        · is masked
    after two more tokens: [ s1 s2 s3 s4 s5 ]        filled = 5
"""

import functools
import json
from typing import Any

import flax.struct
import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.messages import fields_repr
from txl_jax.model import wide_products
from txl_jax.model.positions import Positions
from txl_jax.model.ring import KeysValues, Ring
from txl_jax.parallel.mesh import ROWS
from txl_jax.parallel.platforms import platform_of
from txl_jax.parallel.shardings import Shardings, zero_after


class Memory(flax.struct.PyTreeNode):
    """The hidden states of earlier segments: a pytree to carry from one segment to the next.

    Example:
      >>> import jax, txl_jax
      >>> cfg = txl_jax.TransformerXLConfig(vocab_size=11, n_layer=2, d_model=8)
      >>> model = txl_jax.TransformerXL(cfg)
      >>> mems, tokens = model.init_mems(batch_size=1, mem_len=4), jax.numpy.array([[3, 1, 4]])
      >>> mems.hidden.shape, mems.filled.tolist()
      ((2, 1, 4, 8), [0])
      >>> variables = model.init(jax.random.key(0), tokens, mems)
      >>> _, mems = model.apply(variables, tokens, mems)
      >>> mems.filled.tolist()  # the oldest slot is not real yet
      [3]

    Attributes:
      hidden: [L,B,M,D] in the compute dtype, the inputs of every layer at earlier positions.
      filled: int32 [B], the number of newest slots that hold real states, 0 to M.
    """

    __repr__ = fields_repr

    hidden: jax.Array
    filled: jax.Array

    @property
    def mem_len(self) -> int:
        """M, the number of slots."""
        return self.hidden.shape[2]


class Slots(flax.struct.PyTreeNode):
    """One ring of keys and values [N,B,R,H] for every layer (ring.py)."""

    __repr__ = fields_repr

    layers: tuple[KeysValues, ...]
    oldest: jax.Array  # int32 [], the slot of the oldest state in every row and layer

    @property
    def count(self) -> int:
        """The number of slots, R."""
        return self.layers[0].keys.shape[2]


class Cache(flax.struct.PyTreeNode):
    """The projected memory for inference, in place of a :class:`Memory`; results are the same.

    A cache holds the keys and values of each layer's memory in rings (ring.py). So a step projects
    only its new tokens, and does not move the states of earlier tokens.

    Example:
      >>> import jax, txl_jax
      >>> cfg = txl_jax.TransformerXLConfig(vocab_size=11, n_layer=2, d_model=8)
      >>> model = txl_jax.TransformerXL(cfg)
      >>> mems, tokens = model.init_mems(batch_size=1, mem_len=4), jax.numpy.array([[3, 1, 4]])
      >>> variables = model.init(jax.random.key(0), tokens, mems)
      >>> cache = model.apply(variables, mems, seg_len=3, method="init_cache")
      >>> logits, cache = model.apply(variables, tokens, cache)
      >>> cache.filled.tolist(), cache.slots  # M, rounded up to whole segments
      ([3], 6)

    Attributes:
      near, far: the rings of the newest states (those within ``clamp_len``), and of older states.
      positions: for each layer, the position terms of the keys of ``near`` and of T new tokens.
      filled, mem_len: int32 [B] and M, as in :class:`Memory`.
      seg_len: T, the most tokens that a segment can have. A segment of exactly T tokens is written
        in place if the caller does not keep the old cache (``donate_argnums``, a carry of
        ``lax.scan``). A shorter segment, or a segment with ``lengths``, moves all slots.
    """

    __repr__ = fields_repr

    near: Slots
    far: Slots | None
    positions: tuple[Positions, ...]
    filled: jax.Array
    mem_len: int = flax.struct.field(pytree_node=False)
    seg_len: int = flax.struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        """The number of slots of both rings together."""
        return self.near.count + (self.far.count if self.far else 0)

    def rings(self, n: int) -> list[Ring]:
        """Returns the near ring of layer n, and its far ring if there is one."""
        return [Ring(*x.layers[n], x.oldest) for x in (self.near, self.far) if x]

    def past(self, n: int) -> KeysValues:
        """Returns copies of the keys and values of layer n [N,B,M,H], oldest first."""
        rings = [x for x in (self.far, self.near) if x]
        in_order = lambda x, slots: jnp.roll(x, -slots.oldest, axis=2)
        first = self.slots - self.mem_len
        newest = lambda *parts: jnp.concatenate(list(map(in_order, parts, rings)), 2)[:, :, first:]
        return jax.tree.map(newest, *(x.layers[n] for x in rings))


for _kind in (Memory, Slots, Cache, Positions):  # exported functions can then take them
    jax.export.register_pytree_node_serialization(
        _kind,
        serialized_name=f"txl_jax.{_kind.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda data: tuple(json.loads(data)),
    )
jax.export.register_namedtuple_serialization(KeysValues, serialized_name="txl_jax.KeysValues")


def memory_shardings(shardings: Shardings) -> Memory:
    """Returns the shardings of a memory: each stream's states are on the devices of its row."""
    return Memory(shardings.rows(leading_axis=True), shardings.rows())  # type: ignore[arg-type]


def cache_shardings(shardings: Shardings, abstract: Cache) -> Cache:
    """Returns the shardings of a cache like ``abstract``: heads over ``tensor``, rows over ROWS."""
    heads = lambda *axes: lambda leaf: shardings.sharded(("tensor", *axes), leaf.shape)
    everywhere: Any = shardings.replicated()
    slots = lambda x: x and Slots(jax.tree.map(heads(ROWS), x.layers), everywhere)
    return abstract.replace(
        near=slots(abstract.near),
        far=slots(abstract.far),
        positions=jax.tree.map(heads(), abstract.positions),
        filled=shardings.rows(),
    )


def update(
    memory: Memory,
    layer_inputs: jax.Array,
    lengths: jax.Array | None = None,
    since_reset: jax.Array | None = None,
) -> Memory:
    """Returns a memory of the last M states of [memory; layer inputs], with the gradient stopped.

    Args:
      memory: the memory before the segment, with M slots.
      layer_inputs: the input of each layer in this segment, [L,B,T,D].
      lengths: int32 [B], the number of real tokens of each row, before the padding; ``None``: T.
      since_reset: int32 [B], the number of real tokens since the row's last reset in this segment,
        or -1 without a reset. States from before the reset are no longer real.
    """
    new = layer_inputs.astype(memory.hidden.dtype)
    hidden = jax.lax.stop_gradient(_newest(memory.hidden, new, lengths))  # paper, section 3.2
    return Memory(hidden, _filled(memory, new.shape[2], lengths, since_reset))


def in_slots(past: list[KeysValues], slots: tuple[int, int]) -> tuple[Slots, Slots | None]:
    """Puts each layer's states [N,B,M,H], oldest first, into a near and a far ring of given sizes.

    The oldest slot of each ring is slot 0. If the far size is 0, the far ring is ``None``.
    """
    (near, far), mem_len = slots, past[0].keys.shape[2]

    def part(start: int, stop: int) -> Slots:
        pad = lambda x: jnp.pad(x, [(0, 0), (0, 0), (near + far - mem_len, 0), (0, 0)])
        layers = jax.tree.map(lambda x: pad(x)[:, :, start:stop], tuple(past))
        return Slots(layers, jnp.zeros((), jnp.int32))

    return part(far, far + near), part(0, far) if far else None


def update_cache(
    cache: Cache,
    layers: list[KeysValues],
    done: jax.Array,
    lengths: jax.Array | None = None,
    since_reset: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> Cache:
    """Returns the cache after a segment with keys and values ``layers``; see :func:`update`.

    ``done`` [B,...] is any array that depends on all reads of the cache; the writes wait for it.
    Rows and heads are split over the devices of ``mesh`` as in :func:`cache_shardings`.
    """
    seg_len = layers[0].keys.shape[2]
    filled = _filled(cache, seg_len, lengths, since_reset)
    if not cache.mem_len:
        return cache.replace(filled=filled)
    if seg_len == cache.seg_len and lengths is None:
        near, far = _advanced(cache, layers, done, mesh)
    else:
        newest = lambda old, new: _newest(old, new.astype(old.dtype), lengths)
        past = [jax.tree.map(newest, cache.past(n), new) for n, new in enumerate(layers)]
        near, far = in_slots(past, (cache.near.count, cache.slots - cache.near.count))
    return cache.replace(near=near, far=far, filled=filled)


def _advanced(
    cache: Cache, layers: list[KeysValues], done: jax.Array, mesh: Mesh | None
) -> tuple[Slots, Slots | None]:
    """Returns the rings after a segment of T tokens overwrites the near ring's oldest states."""
    near, far, seg_len = cache.near, cache.far, layers[0].keys.shape[2]

    def write(slots: Slots, states, read, axes) -> Slots:
        after = lambda read: slots.oldest + zero_after(read, slots.oldest, mesh, axes)
        oldest = ((slots.oldest + seg_len) % slots.count).astype(jnp.int32)

        def place(*layer: KeysValues) -> KeysValues:
            turned = wide_products.is_reading_rows(), False
            put = lambda x, new, read, turned: _written(
                x, new.astype(x.dtype), after(read), mesh, turned
            )
            return KeysValues(*map(put, *layer, turned))

        return Slots(tuple(map(place, slots.layers, states, read)), oldest)

    axes: tuple[Any, ...] = (ROWS,)
    read = jax.tree.map(lambda _: done, near.layers)
    if far:
        oldest = lambda x: jax.lax.dynamic_slice_in_dim(x, near.oldest, seg_len, axis=2)
        far = write(far, jax.tree.map(oldest, near.layers), read, axes)
        read, axes = far.layers, ("tensor", ROWS)
    return write(near, tuple(layers), read, axes), far


def _written(
    slots: jax.Array, states: jax.Array, start: jax.Array, mesh: Mesh | None, turned: bool = False
) -> jax.Array:
    """Returns slots [.,.,R,.], of which T slots from ``start`` on are replaced by states [.,.,T,.].

    On a CPU, 16-bit numbers are written as integers, since XLA would otherwise convert all slots to
    float32. If ``turned``, they are written into the transpose of the slots, because a loop carries
    this transpose (wide_products.py). In all other cases, the states are written directly.
    """
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start)
    if slots.dtype.itemsize != 2 or platform_of(mesh) != "cpu":
        return write(slots, states, axis=2)
    bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16)
    if turned:
        written = write(bits(slots).mT, bits(states).mT, axis=3).mT
    else:
        written = write(bits(slots), bits(states), axis=2)
    return jax.lax.bitcast_convert_type(written, slots.dtype)


def _newest(old: jax.Array, new: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Returns each row's last M slots of old [.,B,M,.] and new [.,B,T,.], without its padding."""
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
