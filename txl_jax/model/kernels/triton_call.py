"""``jax_triton.triton_call`` in the versions 0.3 and 0.4 of jax-triton, with JAX 0.10 to 0.12."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def triton_call(
    kernel: Callable[..., Any],
    given: Sequence[Any],
    results: Sequence[Any],
    capability: int,
    options: Mapping[str, Any],
) -> list[jax.Array]:
    """Runs a Triton kernel on the arrays and numbers ``given``; returns arrays like ``results``.

    ``capability`` is the compute capability to compile for, such as 90, since the GPU may not be
    at hand. ``options`` are the grid, the name, launch options and constants.

    jax-triton has no rule for ``jax.vmap``: the kernel then runs once for each index. The wrapper
    that does this also hides the call where JAX 0.12 removes unused results. There, jax-triton
    0.4.1 has a rule of two arguments instead of three, and any gradient would be a TypeError.
    """
    import jax_triton

    shapes = "out_type" if jax_triton.__version_info__ >= (0, 4) else "out_shape"
    named: dict[str, Any] = {"kernel": kernel, "compute_capability": capability, shapes: results}

    @jax.custom_batching.sequential_vmap
    def call(*arrays):
        rest = iter(arrays)
        every = [next(rest) if isinstance(x, jax.Array) else x for x in given]
        return jax_triton.triton_call(*every, **named, **options)

    return call(*(x for x in given if isinstance(x, jax.Array)))
