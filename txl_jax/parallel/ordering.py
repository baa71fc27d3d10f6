"""Dependencies that force an order on the operations of a compiled program.

A compiler may overwrite an array before all reads and keep a copy for the readers, or compute
several large arrays at once. Adding :func:`zero_after` makes a dependency that the
compiler cannot remove.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from txl_jax.parallel.shardings import Shardings


def zero_after(
    done: jax.Array, number: jax.Array, mesh: Mesh | None = None, axes: tuple[Any, ...] = ()
) -> jax.Array:
    """Returns an int32 zero that depends on ``done`` (floats, not empty, maybe NaN).

    ``number`` is int32 [], not negative, and unknown to the compiler. ``done`` is sharded over
    ``axes`` of ``mesh``. Each device waits only for its own part, without a collective operation.
    """
    if mesh is None or mesh.size == 1:
        return _zero_after(done, number)
    parts, whole = Shardings(mesh).sharded(axes, done.shape).spec, PartitionSpec()
    specs: Any = {"in_specs": (parts, whole), "out_specs": whole}
    return jax.shard_map(_zero_after, mesh=mesh, **specs, check_vma=False)(done, number)


def _zero_after(done: jax.Array, number: jax.Array) -> jax.Array:
    element = done.reshape(-1)[0].astype(jnp.float32)
    return jax.lax.bitcast_convert_type(element, jnp.int32) & jnp.minimum(number, 0)
