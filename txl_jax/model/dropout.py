"""Dropout whose mask is a hash of place and seed: nothing is drawn beforehand or kept.

One integer hash an entry, fused with what surrounds it, instead of a block cipher's rounds over
arrays of their own: on a CPU a tenth of the time, and every device of a mesh makes its own part.
The hash is kernels/dropping.py's.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.model.kernels.dropping import mix, threshold


class Dropout(nn.Module):
    """Each entry is zero with probability ``rate``, else divided by 1 - rate.

    Attributes:
      rate: in [0, 1).
      shared: axes along which one mask serves all.
    """

    rate: float
    shared: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """``x`` as it is unless ``train``, which needs the ``dropout`` rng."""
        if not train or self.rate == 0:
            return x
        seed = jax.random.bits(self.make_rng("dropout"), (2,), jnp.uint32)
        shape = [1 if axis in self.shared else n for axis, n in enumerate(x.shape)]
        kept = mix(mix(_number(shape) + seed[0]) ^ seed[1]) >= jnp.uint32(threshold(self.rate))
        return jnp.where(kept, x / (1.0 - self.rate), jnp.zeros_like(x))


def _number(shape: list[int]) -> jax.Array:
    """The number of each entry, counted along the last axis first: uint32 of the shape."""
    number, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
            number = number + place * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return number
