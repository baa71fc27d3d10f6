"""Cross entropy over many words, without all logits in memory at once.

Rows are processed in blocks, and the gradient computes the logits of each block again. A block has
at most ``MAX_LOGITS`` logits, or ``MIN_ROWS`` rows if these have more logits.
"""

import functools

import jax
import jax.numpy as jnp

MAX_LOGITS = 2**22  # 16 MiB in float32
MIN_ROWS = 128  # in smaller blocks, reading the weights costs more than the products

full_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    targets: jax.Array,
    members: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Returns -log softmax(weight x + bias)[target] in nats, float32 [S].

    Args:
      x: inputs [S,d] in the compute dtype.
      weight, bias: float32 [V,d] and [V].
      targets: int32 [S], from 0 to V-1.
      members: the rows to score, as a permutation int32 [S] that starts with them, and their
        number, int32 []. The other rows have loss 0 and cost nothing. ``None`` scores all rows.

    Raises TypeError for forward-mode differentiation (``jax.jvp``) of more than one block or with
    ``members``. Use reverse mode, at most once, or ``log_softmax`` of all logits.
    """
    n, v = x.shape[0], weight.shape[0]
    targets = jnp.asarray(targets)  # a traced index cannot index a NumPy array
    block = min(n, max(MIN_ROWS, MAX_LOGITS // v))
    if members is None and block == n:
        z = _logits(x, weight.astype(x.dtype), bias)
        chosen = jnp.take_along_axis(z, targets[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(z, axis=-1) - chosen
    rows, count = members or (jnp.arange(n), jnp.asarray(n))
    return _blocks(block, x, weight, bias, targets, rows, count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocks(block, x, weight, bias, targets, rows, count):
    return _forward(block, x, weight, bias, targets, rows, count)[0]


def _forward(block, x, weight, bias, targets, rows, count):
    low, padded = weight.astype(x.dtype), jnp.concatenate([rows, jnp.zeros(block, rows.dtype)])

    def add(k, totals):
        nll, normaliser = totals
        at, real = _block(padded, k, block, count)
        z = _logits(x[at], low, bias)
        log_sum = jax.nn.logsumexp(z, axis=-1)
        chosen = jnp.take_along_axis(z, targets[at][:, None], axis=-1)[:, 0]
        # A row of padding has the index of some real row, and adds 0 to it.
        nll = nll.at[at].add(jnp.where(real, log_sum - chosen, 0.0))
        return nll, normaliser.at[at].add(jnp.where(real, log_sum, 0.0))

    zeros = jnp.zeros(x.shape[0], jnp.float32)
    nll, normaliser = jax.lax.fori_loop(0, (count + block - 1) // block, add, (zeros, zeros))
    return nll, (x, weight, bias, targets, rows, count, normaliser)


def _backward(block, saved, gradient):
    x, weight, bias, targets, rows, count, normaliser = saved
    low, padded = weight.astype(x.dtype), jnp.concatenate([rows, jnp.zeros(block, rows.dtype)])

    def add(k, totals):
        dx, dweight, dbias = totals
        at, real = _block(padded, k, block, count)
        z = _logits(x[at], low, bias)
        p = jnp.exp(z - normaliser[at][:, None])
        here = jnp.arange(z.shape[1]) == targets[at][:, None]
        dz = (p - here) * jnp.where(real, gradient[at], 0.0)[:, None]
        dbias = dbias + dz.sum(axis=0)
        dz = dz.astype(x.dtype)
        dx = dx.at[at].add(full_einsum("sv,vd->sd", dz, low))
        return dx, dweight + full_einsum("sv,sd->vd", dz, x[at]), dbias

    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros_like(weight), jnp.zeros_like(bias)
    n = (count + block - 1) // block
    dx, dweight, dbias = jax.lax.fori_loop(0, n, add, zeros)
    return dx.astype(x.dtype), dweight, dbias, None, None, None


_blocks.defvjp(_forward, _backward)


def _logits(x, weight, bias):
    return full_einsum("sd,vd->sv", x, weight) + bias


def _block(padded, k, block, count):
    """Returns the k-th block's row indices [block], and which of them are not padding."""
    at = jax.lax.dynamic_slice_in_dim(padded, k * block, block)
    return at, k * block + jnp.arange(block) < count
