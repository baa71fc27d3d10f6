"""``jax_triton.triton_call`` in the versions 0.3 and 0.4 of jax-triton, with JAX 0.10 to 0.12."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval


def triton_call(
    kernel: Callable[..., Any],
    given: Sequence[Any],
    results: Sequence[Any],
    capability: int,
    options: Mapping[str, Any],
) -> list[jax.Array]:
    """Runs a Triton kernel on the arrays and numbers ``given``; returns arrays like ``results``.

    ``capability`` is the compute capability to compile for, such as 90, since the GPU may not be
    at hand. ``options`` are the grid, the name, launch options and constants. Under ``jax.vmap``
    the kernel runs once for each index, since jax-triton has no rule for it.
    """
    import jax_triton

    mend_rule_for_unused_results()
    shapes = "out_type" if jax_triton.__version_info__ >= (0, 4) else "out_shape"
    named: dict[str, Any] = {"kernel": kernel, "compute_capability": capability, shapes: results}

    @jax.custom_batching.sequential_vmap
    def call(*arrays):
        rest = iter(arrays)
        every = [next(rest) if isinstance(x, jax.Array) else x for x in given]
        return jax_triton.triton_call(*every, **named, **options)

    return call(*(x for x in given if isinstance(x, jax.Array)))


@functools.cache
def mend_rule_for_unused_results() -> None:
    """Makes JAX 0.12 able to differentiate the calls of jax-triton 0.4.1.

    JAX 0.12 gives three arguments to the rule that removes unused results, and that version has a
    rule of two (used results, equation), so that any gradient is a TypeError. A newer jax-triton
    with a rule of three keeps its own.
    """
    import jax_triton

    rules: dict[Any, Any] = partial_eval.dce_rules
    call = jax_triton.triton_lib.triton_kernel_call_p
    rule = rules.get(call)
    if rule and jax.__version_info__ >= (0, 12) and len(inspect.signature(rule).parameters) == 2:

        def mended(used, live, equation):
            return rule(used, equation)

        rules[call] = mended
