"""Making a compiled program do one thing after another, where its data alone would not say so.

A compiler may begin what it likes: write over an array before all has been read, and keep a copy
for the readers; or compute several large things at once, and hold all of them. A sum with
:func:`zero_after` is a dependency that it cannot see through.
"""

import jax
import jax.numpy as jnp


def zero_after(done: jax.Array, number: jax.Array) -> jax.Array:
    """0, int32 [], known only when ``done`` is.

    Args:
      done: floating point, any shape with elements; NaN or infinite does no harm.
      number: int32 [], never negative, which the compiler does not know.
    """
    element = done.reshape(-1)[0].astype(jnp.float32)
    return jax.lax.bitcast_convert_type(element, jnp.int32) & jnp.minimum(number, 0)
