"""Dependencies that force an order on the operations of a compiled program.

A compiler may overwrite an array before all reads and keep a copy for the readers, or compute
several large arrays at once. Adding :func:`zero_after` makes a dependency that the
compiler cannot remove.
"""

import jax
import jax.numpy as jnp


def zero_after(done: jax.Array, number: jax.Array) -> jax.Array:
    """Returns an int32 zero that depends on ``done`` (floats, not empty, maybe NaN).

    ``number`` is int32 [], not negative, and unknown to the compiler.
    """
    element = done.reshape(-1)[0].astype(jnp.float32)
    return jax.lax.bitcast_convert_type(element, jnp.int32) & jnp.minimum(number, 0)
