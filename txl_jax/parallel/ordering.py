"""Order between the operations of a compiled program that their data does not require.

A compiler may reorder independent operations. It may overwrite an array before all reads, and then
keep a copy for the readers. It may also compute several large arrays at once and hold all of them.
Adding :func:`zero_after` makes a dependency that the compiler cannot remove.
"""

import jax
import jax.numpy as jnp


def zero_after(done: jax.Array, number: jax.Array) -> jax.Array:
    """0, int32 [], which depends on ``done``.

    Args:
      done: floating point, any shape with elements; NaN and infinity are allowed.
      number: int32 [], never negative, unknown to the compiler.
    """
    element = done.reshape(-1)[0].astype(jnp.float32)
    return jax.lax.bitcast_convert_type(element, jnp.int32) & jnp.minimum(number, 0)
