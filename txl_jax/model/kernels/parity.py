"""Whether an implementation gives what the plain form gives, on the devices at hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.model.kernels import choice, reference
from txl_jax.model.kernels.choice import KernelError
from txl_jax.model.kernels.dropping import Dropping, dropping
from txl_jax.model.masks import AttentionMask, attention_mask
from txl_jax.model.positions import Positions

Inputs = tuple[jax.Array, jax.Array, jax.Array, Positions]


def random_inputs(
    n_head: int, rows: int, seg_len: int, mem_len: int, d_head: int, dtype: Any, seed: int = 0
) -> Inputs:
    """Queries, keys, values and positions of the size that attention has."""
    keys = jax.random.split(jax.random.key(seed), 6)
    draw = lambda key, *shape: jax.random.normal(keys[key], shape).astype(dtype)
    n_keys, scale = mem_len + seg_len, jnp.asarray(d_head**-0.5, dtype)
    return (
        draw(0, n_head, rows, seg_len, d_head) * scale,
        draw(1, n_head, rows, n_keys, d_head),
        draw(2, n_head, rows, n_keys, d_head),
        Positions(
            u=draw(3, n_head, d_head) * scale,
            v=draw(4, n_head, d_head) * scale,
            r=draw(5, n_head, n_keys, d_head),
        ),
    )


def values_and_gradients(
    attend, inputs: Inputs, who: AttentionMask, dropped: Dropping | None
) -> Any:
    """What is gathered, and the gradient of a random projection of it for every input."""
    direction = jax.random.normal(jax.random.key(9), inputs[0].shape)

    def loss(inputs):
        gathered = attend(*inputs, who, dropped)
        return jnp.sum(gathered.astype(jnp.float32) * direction), gathered

    gradients, gathered = jax.grad(loss, has_aux=True)(inputs)
    return gathered, gradients


def largest_difference(found: Any, expected: Any) -> float:
    """The largest of |found - expected| over each array's largest |expected|, of all arrays."""

    def of(a, b):
        a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))

    differences = jax.tree.leaves(jax.tree.map(of, found, expected))
    return float(jnp.max(jnp.stack(differences)))


def difference(implementation: str, d_head: int, dtype: Any, dropatt: float = 0.0) -> float:
    """:func:`largest_difference` of an implementation from the plain form in float32.

    Two heads, three rows (one with an empty memory, one with a part of it), 200 queries of which
    one begins a new episode, a memory of 150, a window.
    """
    inputs = random_inputs(2, 3, 200, 150, d_head, dtype)
    reset = jnp.zeros((3, 200), bool).at[1, 60].set(True)
    who = attention_mask(200, jnp.array([0, 150, 70]), 150, "tf", reset)
    dropped = dropping(jax.random.key(1), dropatt) if dropatt else None
    run = functools.partial(choice.attend, implementation=implementation)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(values_and_gradients, static_argnums=0)(
            reference.attend, exact, who, dropped
        )
        found = jax.jit(values_and_gradients, static_argnums=0)(run, inputs, who, dropped)
    return largest_difference(found, expected)


TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 1e-2}
"""Of :func:`difference`: rounding of the dtype. A kernel that is wrong is wrong by about 1."""


def require_parity(implementation: str, d_head: int, dtype: str, dropatt: float) -> None:
    """Does nothing where a fused implementation would run and gives what it should.

    Raises:
      KernelError: it gives something else.
    """
    form: Any = ((2, 3, 200, d_head), 350, Positions(r=jnp.zeros(())), dropatt or None, dtype)
    name = choice.chosen(implementation, form)
    if name not in choice.FUSED:
        return
    found = difference(name, d_head, jnp.dtype(dtype), dropatt)
    if not found <= TOLERANCE[dtype]:
        raise KernelError(
            f"model.kernel = {implementation!r}: attention by {name!r} differs from the plain form"
            f" by {found:.2g} of the largest entry on this device (limit {TOLERANCE[dtype]:.2g});"
            " use --config.model.kernel=xla, and please report this"
        )
