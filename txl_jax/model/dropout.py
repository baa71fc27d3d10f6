"""Dropout whose mask is a hash of seed and position; no mask is drawn in advance or stored.

An entry's hash is two rounds of a 32-bit mixing function (Wellons' ``lowbias32``). XLA fuses the
hash with the surrounding operations, and each device of a mesh hashes its own entries. On a CPU,
hashing takes a tenth of the time of a block cipher. Every attention kernel computes the same bits
for its tile, in the forward pass and again in the backward pass.
"""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.model.derivatives import opaque, with_derivatives

HEAD_STRIDE = 65_536
"""Dropout of attention numbers row b of head n as n * HEAD_STRIDE + b.

A batch has fewer rows than HEAD_STRIDE, so all numbers differ.
"""


FACTORS = 0x7FEB352D, 0x846CA68B
"""The factors of :func:`mix`."""
GOLDEN = 0x9E3779B9
"""The factor by which a hash multiplies the index of an attention key: 2^32 / golden ratio."""
OF_FOUR = 0x846CA68B, 0x9E3779B1, 0xC2B2AE35, 0x27D4EB2F
"""The factors of the keys j, j^1, j^8 and j^9 (XOR), by which their shared hash is multiplied."""


def threshold(rate: float) -> int:
    """Returns how many of the 2^32 hash values mean that an entry is dropped."""
    return min(round(rate * 2**32), 2**32 - 1)


def mix(x: jax.Array) -> jax.Array:
    """Maps 32 bits to 32 bits, one to one; each result bit depends on all bits of the argument."""
    x = (x ^ (x >> 16)) * jnp.uint32(FACTORS[0])
    x = (x ^ (x >> 15)) * jnp.uint32(FACTORS[1])
    return x ^ (x >> 16)


class Dropout(nn.Module):
    """Zeroes each activation with probability ``rate`` in [0, 1), else divides it by 1 - rate.

    ``shared`` are the axes along which all entries share one mask. If ``width`` is given, entries
    of the last axis from ``width`` on are padding, which does not change the mask of other entries.
    """

    rate: float
    shared: tuple[int, ...] = ()
    width: int | None = None

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Applies dropout to ``x`` if ``train``, which needs the ``dropout`` rng."""
        if not train or self.rate == 0:
            return x
        return _dropped((self.rate, self.shared, self.width), x, self._seed())

    def of_relu(self, x: jax.Array, train: bool) -> jax.Array:
        """Applies dropout to relu(x); results and gradient equal ``self(relu(x))`` bit for bit.

        Only the result is saved for the gradient: it is positive where x is positive and kept.
        """
        if not train or self.rate == 0:
            return nn.relu(x)
        return _dropped_relu((self.rate, self.shared, self.width), x, self._seed())

    def _seed(self) -> jax.Array:
        return jax.random.bits(self.make_rng("dropout"), (2,), jnp.uint32)


def _drop(static: tuple[float, tuple[int, ...], int | None], x: jax.Array, seed: jax.Array):
    """Applies dropout to an array, to its tangent or to its gradient, with the mask of a seed."""
    rate, shared, width = static
    shape = [1 if axis in shared else n for axis, n in enumerate(x.shape)]
    number = _numbered(shape, width or shape[-1])
    kept = mix(mix(number + seed[0]) ^ seed[1]) >= jnp.uint32(threshold(rate))
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))


_dropped = with_derivatives(
    lambda static, x, seed: (opaque(_drop)(static, x, seed), seed),
    lambda static, seed, tangent: _drop(static, tangent, seed),
    lambda static, seed, gradient: _drop(static, gradient, seed),
)
"""The gradient computes the mask again; otherwise a loop over layers would store every mask."""


def _drop_relu(static, x, seed):
    return _drop(static, jax.nn.relu(x), seed)


def _of_kept(static, result, x):
    """Returns a tangent or gradient x divided by 1 - rate where the result is positive, else 0."""
    return jnp.where(result > 0, x / (1.0 - static[0]), jnp.zeros_like(x))


def _relu_forward(static, x, seed):
    result = opaque(_drop_relu)(static, x, seed)
    return result, result


_dropped_relu = with_derivatives(_relu_forward, _of_kept, _of_kept)


def _numbered(shape: list[int], width: int) -> jax.Array:
    """Returns each entry's row-major index, as if the last axis had ``width`` entries: uint32."""
    number, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
            number = number + place * jnp.uint32(stride % 2**32)
        stride *= width if axis == len(shape) - 1 else shape[axis]
    return number


class AttentionDropout(flax.struct.PyTreeNode):
    """Dropout of attention weights, like :class:`Dropout`, from a seed uint32 [2]."""

    seed: jax.Array
    rate: float = flax.struct.field(pytree_node=False)

    @classmethod
    def draw(cls, key: jax.Array, rate: float) -> "AttentionDropout":
        """Returns dropout whose seed is drawn from a key."""
        return cls(jax.random.bits(key, (2,), jnp.uint32), rate)

    @property
    def scale(self) -> float:
        """The factor of a weight that is kept."""
        return 1.0 / (1.0 - self.rate)

    def factors(self, row: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the factor of each weight, 0 or ``scale``: float32 of the broadcast shape.

        The arguments are uint32. ``row`` is n * HEAD_STRIDE + b for head n and row b of the batch.
        ``query`` is an index from 0 to T-1. ``key`` is an index from 0 to K-1, counted from the
        oldest slot of memory. A device whose heads start at n0 and rows at b0 gets the same bits if
        n0 * HEAD_STRIDE + b0 is added to its first seed.

        The keys j, j^1, j^8 and j^9 of a query share one hash, and each key multiplies it by a
        factor of its own. One thread of an NVIDIA GPU has the weights of all four keys, so it
        computes only one hash for them.
        """
        line = mix(mix(self.seed[0] + row) ^ query) ^ self.seed[1]
        x = line + (key & jnp.uint32(0xFFFFFFF6)) * jnp.uint32(GOLDEN)
        x = (x ^ (x >> 16)) * jnp.uint32(FACTORS[0])
        x = x ^ (x >> 15)
        even, odd, even_8, odd_8 = map(jnp.uint32, OF_FOUR)
        first = jnp.where(key & 8 == 0, even, even_8)
        own = jnp.where(key & 1 == 0, first, jnp.where(key & 8 == 0, odd, odd_8))
        kept = x * own >= jnp.uint32(threshold(self.rate))
        return jnp.where(kept, np.float32(self.scale), np.float32(0))

    def mask(self, shape: tuple[int, ...], query0: int = 0, key0: int = 0) -> jax.Array:
        """Returns :meth:`factors` of weights [N,B,T,K], whose first entry is (query0, key0)."""
        place = lambda n, axis: jax.lax.broadcasted_iota(jnp.uint32, n, axis)
        n, b, t, k = shape
        row = place((n, b, 1, 1), 0) * jnp.uint32(HEAD_STRIDE) + place((n, b, 1, 1), 1)
        query = place((1, 1, t, 1), 2) + jnp.uint32(query0)
        key = place((1, 1, 1, k), 3) + jnp.uint32(key0)
        return self.factors(row, query, key)
