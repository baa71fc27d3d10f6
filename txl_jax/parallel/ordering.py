"""Order between the operations of a compiled program that their data does not require.

A compiler may overwrite an array before all reads and keep a copy for the readers, or compute
several large arrays at once. Adding :func:`zero_after` makes a dependency that it cannot remove.
"""

import jax
import jax.numpy as jnp


def zero_after(done: jax.Array, number: jax.Array) -> jax.Array:
    """0, int32 [], which depends on ``done`` (floats with at least one element, maybe NaN).

    ``number``: int32 [], never negative, unknown to the compiler.
    """
    element = done.reshape(-1)[0].astype(jnp.float32)
    return jax.lax.bitcast_convert_type(element, jnp.int32) & jnp.minimum(number, 0)
