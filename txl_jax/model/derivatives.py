"""Functions whose derivatives are given by hand, in reverse mode and in forward mode.

``jax.custom_vjp`` has no forward mode. Here the derivative is a linear primitive of JAX. Forward
mode evaluates the primitive. Reverse mode transposes it, which calls the given gradient function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from txl_jax.parallel.shardings import vary_alike


def with_derivatives(forward: Callable, tangent: Callable, gradient: Callable) -> Callable:
    """Returns a differentiable function of (static, inputs, constants).

    Only the arrays ``inputs`` are differentiated, ``constants`` are other arrays, and ``static`` is
    hashable. Results are pytrees. A second derivative differentiates the given functions. Inside of
    ``jax.shard_map``, all arrays are first made to vary over the same axes.

    The given functions compute matrix products at the precision that is set where the returned
    function is called. JAX calls ``tangent`` and ``gradient`` later, when its setting can differ.

    Args:
      forward: (static, inputs, constants) -> (outputs, saved arrays for the derivatives).
      tangent: (static, saved, tangents of inputs) -> tangents of outputs. It must be linear in the
        tangents, and is called only in forward mode.
      gradient: (static, saved, gradients of outputs) -> gradients of inputs, in reverse mode.
    """

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
    def function(static, precision, inputs, constants):
        with jax.default_matmul_precision(precision):
            return forward(static, inputs, constants)[0]

    @function.defjvp
    def _(static, precision, primals, tangents):
        with jax.default_matmul_precision(precision):
            outputs, saved = forward(static, *primals)
        arrays, trees = zip(*map(jax.tree.flatten, (saved, tangents[0], outputs)), strict=True)
        (known, moved, results), (of_saved, of_inputs, of_outputs) = arrays, trees
        n = len(known)

        def flat_tangent(*given):
            pair = of_saved.unflatten(given[:n]), of_inputs.unflatten(given[n:])
            with jax.default_matmul_precision(precision):
                return jax.tree.leaves(tangent(static, *pair))

        def flat_gradient(known, gradients):
            pair = of_saved.unflatten(known), of_outputs.unflatten(gradients)
            with jax.default_matmul_precision(precision):
                return jax.tree.leaves(gradient(static, *pair))

        options: Any = {"n_saved": n, "types": tuple(map(jax.typeof, results))}
        options |= {"function": flat_tangent, "gradient": flat_gradient}
        return outputs, of_outputs.unflatten(_call.bind(*known, *moved, **options))

    def at_current_precision(static, inputs, constants):
        return function(static, current_precision(), *vary_alike((inputs, constants)))

    return at_current_precision


def current_precision() -> str | None:
    """Returns JAX's current setting for the precision of matrix products, or ``None`` if unset."""
    settings: Any = jax.config
    return settings.jax_default_matmul_precision


def opaque(forward: Callable) -> Callable:
    """Returns the same function of (static, inputs, constants), whose loops JAX leaves unchanged.

    When JAX differentiates a loop, it moves constant computations out of the loop. XLA then keeps
    their results in memory: a softmax over 40,000 words took 1.6 times the memory.
    """

    def function(static, inputs, constants):
        of_arrays = functools.partial(forward, static)
        jaxpr, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(inputs, constants)
        arrays, types = jax.tree.leaves((inputs, constants)), tuple(jaxpr.out_avals)
        options: Any = {"n_saved": len(arrays), "types": types, "gradient": None}
        results = _call.bind(*arrays, function=core.jaxpr_as_fun(jaxpr), **options)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return function


_call = core.Primitive("call_with_derivative")
"""Calls ``function`` on ``n_saved`` saved arrays, and on inputs in which it is linear.

``gradient`` maps the saved arrays and the gradients of the results to the gradients of the inputs.
``types`` are the types of the results.
"""
_call.multiple_results = True


@_call.def_impl
def _evaluate(*args, function, **_):
    return function(*args)


@_call.def_abstract_eval
def _types(*_, types, **__):
    return types


def _differentiate(primals, tangents, *, function, **_):
    return jax.jvp(function, primals, tuple(map(ad.instantiate_zeros, tangents)))


def _transpose(gradients, *args, n_saved: int, gradient, **_):
    found = gradient(tuple(args[:n_saved]), list(map(ad.instantiate_zeros, gradients)))
    kept = zip(args[n_saved:], found, strict=True)
    return [None] * n_saved + [g if ad.is_undefined_primal(x) else None for x, g in kept]


def _batch(args, axes: Sequence[int | None], *, n_saved: int, function, gradient, types):
    """Adds the axis of ``jax.vmap`` to each differentiated array, and so to its gradient too."""
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)

    def with_axis(x, axis):
        rows = (size, *x.shape)
        return jnp.broadcast_to(x, rows) if axis is None else jnp.moveaxis(x, axis, 0)

    saved, moved = tuple(axes[:n_saved]), map(with_axis, args[n_saved:], axes[n_saved:])
    results = _call.bind(
        *args[:n_saved],
        *moved,
        n_saved=n_saved,
        function=jax.vmap(function, (*saved, *[0] * (len(args) - n_saved))),
        gradient=gradient and jax.vmap(gradient, (saved, 0)),
        types=tuple(core.unmapped_aval(size, 0, kind) for kind in types),
    )
    return results, [0] * len(results)


ad.primitive_jvps[_call] = _differentiate
ad.primitive_transposes[_call] = _transpose
batching.primitive_batchers[_call] = _batch
mlir.register_lowering(_call, mlir.lower_fun(_evaluate, multiple_results=True))
