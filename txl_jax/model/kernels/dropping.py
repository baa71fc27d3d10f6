"""Which attention weights dropout drops: a hash of seed and place, the same for every kernel.

Nothing of size T x K is drawn or kept: a kernel computes the bits of its tile, forward and again
backward. The hash is two rounds of a 32-bit mixing function (Wellons' ``lowbias32``).
"""

import flax.struct
import jax
import jax.numpy as jnp

ROW = 65_536
"""More rows than a batch has: what lies between two heads in the number of a row."""


class Dropping(flax.struct.PyTreeNode):
    """Dropout of attention weights: each is zero with probability ``rate``, else over 1 - rate.

    Attributes:
      seed: uint32 [2].
      rate: static, in [0, 1).
    """

    seed: jax.Array
    rate: float = flax.struct.field(pytree_node=False)

    @property
    def threshold(self) -> int:
        """A weight is kept where its 32 bits are at least this."""
        return threshold(self.rate)


def threshold(rate: float) -> int:
    """The number of the 2^32 values of a hash that are dropped."""
    return min(round(rate * 2**32), 2**32 - 1)


def dropping(key: jax.Array, rate: float) -> Dropping:
    """Dropout whose seed is drawn from a key."""
    return Dropping(jax.random.bits(key, (2,), jnp.uint32), rate)


def mix(x: jax.Array) -> jax.Array:
    """32 bits from 32 bits, one to one, every bit of the result depends on all."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def bits(seed0, seed1, row, query, key) -> jax.Array:
    """The 32 bits of a weight: uint32 of the arguments' broadcast shape.

    Args:
      seed0, seed1: uint32 [], of :class:`Dropping`.
      row: n * ROW + b, of head n and row b of the batch, uint32. (A device that holds heads from
        n0 and rows from b0 on gets the same bits with seed0 + n0 * ROW + b0.)
      query: i in 0 .. T-1, uint32.
      key: j in 0 .. K-1, uint32, counted from the memory's oldest slot.
    """
    line = mix(mix(seed0 + row) ^ query)
    return mix(mix(line ^ seed1) + key * jnp.uint32(0x9E3779B9))


def kept(d: Dropping, shape: tuple[int, ...], query0: int = 0, key0: int = 0):
    """What weights are multiplied by: float32 [N,B,T,K], 0 or 1 / (1 - rate).

    ``query0``, ``key0``: where the part begins that is asked for.
    """
    place = lambda n, axis: jax.lax.broadcasted_iota(jnp.uint32, n, axis)
    n, b, t, k = shape
    row = place((n, b, 1, 1), 0) * jnp.uint32(ROW) + place((n, b, 1, 1), 1)
    query = place((1, 1, t, 1), 2) + jnp.uint32(query0)
    key = place((1, 1, 1, k), 3) + jnp.uint32(key0)
    drawn = bits(d.seed[0], d.seed[1], row, query, key)
    return jnp.where(drawn >= jnp.uint32(d.threshold), 1.0 / (1.0 - d.rate), 0.0)
