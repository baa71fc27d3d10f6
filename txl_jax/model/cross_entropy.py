"""Cross entropy against many words without all their logits at once.

Rows are taken a block at a time: a block's logits are made, reduced to one loss each, and
forgotten; the gradient makes them again. The most that is alive is ``LOGITS_AT_ONCE`` logits or
``ROWS_AT_LEAST`` rows of them, whichever is more.
"""

import functools

import jax
import jax.numpy as jnp

LOGITS_AT_ONCE = 2**22  # 16 MiB in float32
ROWS_AT_LEAST = 128  # below that, reading the weights costs more than the products

full_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
"""``einsum`` with sums and result in float32."""


def cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    targets: jax.Array,
    members: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """-log softmax(weight x + bias)[target] in nats, float32 [S].

    Args:
      x: [S,d], compute dtype.
      weight: float32 [V,d].  bias: float32 [V].
      targets: int32 [S], from 0 to V-1.
      members: rows to score, as a permutation int32 [S] that has them first, and how many they
        are, int32 []; the others give 0. The work done is theirs alone, in blocks. ``None``: all.

    Raises:
      TypeError: forward-mode differentiation (``jax.jvp``, ``jax.jacfwd``, ``jax.hessian``) where
        there is more than one block or ``members`` are given. Their gradient is a rule for reverse
        mode (``jax.grad``, ``jax.vjp``), once. For forward mode take ``log_softmax`` of all logits.
    """
    n, v = x.shape[0], weight.shape[0]
    targets = jnp.asarray(targets)  # numpy's own cannot be indexed by a loop's counter
    block = min(n, max(ROWS_AT_LEAST, LOGITS_AT_ONCE // v))
    if members is not None:
        return _blocks(block, x, weight, bias, targets, *members)
    if block == n:
        z = _logits(x, weight.astype(x.dtype), bias)
        chosen = jnp.take_along_axis(z, targets[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(z, axis=-1) - chosen
    return _blocks(block, x, weight, bias, targets, jnp.arange(n), jnp.asarray(n))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocks(block, x, weight, bias, targets, rows, count):
    return _forward(block, x, weight, bias, targets, rows, count)[0]


def _forward(block, x, weight, bias, targets, rows, count):
    low, padded = weight.astype(x.dtype), _pad(rows, block)

    def add(k, totals):
        nll, normaliser = totals
        at, real = _block(padded, k, block, count)
        z = _logits(x[at], low, bias)
        log_sum = jax.nn.logsumexp(z, axis=-1)
        chosen = jnp.take_along_axis(z, targets[at][:, None], axis=-1)[:, 0]
        # Rows beyond the count stand at some real row's place: they add 0 there.
        nll = nll.at[at].add(jnp.where(real, log_sum - chosen, 0.0))
        return nll, normaliser.at[at].add(jnp.where(real, log_sum, 0.0))

    zeros = jnp.zeros(x.shape[0], jnp.float32)
    nll, normaliser = jax.lax.fori_loop(0, _n_blocks(count, block), add, (zeros, zeros))
    return nll, (x, weight, bias, targets, rows, count, normaliser)


def _backward(block, saved, gradient):
    x, weight, bias, targets, rows, count, normaliser = saved
    low, padded = weight.astype(x.dtype), _pad(rows, block)

    def add(k, totals):
        of_x, of_weight, of_bias = totals
        at, real = _block(padded, k, block, count)
        z = _logits(x[at], low, bias)
        p = jnp.exp(z - normaliser[at][:, None])
        here = jnp.arange(z.shape[1]) == targets[at][:, None]
        of_z = (p - here) * jnp.where(real, gradient[at], 0.0)[:, None]
        of_bias = of_bias + of_z.sum(axis=0)
        of_z = of_z.astype(x.dtype)
        of_x = of_x.at[at].add(full_einsum("sv,vd->sd", of_z, low))
        return of_x, of_weight + full_einsum("sv,sd->vd", of_z, x[at]), of_bias

    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros_like(weight), jnp.zeros_like(bias)
    n = _n_blocks(count, block)
    of_x, of_weight, of_bias = jax.lax.fori_loop(0, n, add, zeros)
    return of_x.astype(x.dtype), of_weight, of_bias, None, None, None


_blocks.defvjp(_forward, _backward)


def _logits(x, weight, bias):
    return full_einsum("sd,vd->sv", x, weight) + bias


def _pad(rows, block):
    return jnp.concatenate([rows, jnp.zeros(block, rows.dtype)])


def _block(padded, k, block, count):
    """The k-th block's rows [block], and which of them count."""
    at = jax.lax.dynamic_slice_in_dim(padded, k * block, block)
    return at, k * block + jnp.arange(block) < count


def _n_blocks(count, block):
    return (count + block - 1) // block
