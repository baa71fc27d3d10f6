"""The mixture of softmaxes: K distributions over words, with new weights at every position.

    pi = softmax(W_pi h)                              prior [K], no bias
    x_k = tanh(W_k h + b_k)                           latents [K,d]; d is the width of embeddings
    p(w) = sum_k pi_k softmax(E x_k + bias)_w

(Yang et al. 2018, "Breaking the softmax bottleneck", section 2.4.) The matrix of one softmax's
log-probabilities (contexts by words) has rank at most d + 2. A mixture has no such bound.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.model.cross_entropy import cross_entropy, full_einsum
from txl_jax.parallel.shardings import vary_alike

Table = tuple[jax.Array, jax.Array]  # weights [V,d] and bias [V] of the words


class Mixture(NamedTuple):
    """The mixture at each position: log pi, float32 [...,K], and x_k [...,K,d], compute dtype."""

    log_prior: jax.Array
    latents: jax.Array


def mixture(h: jax.Array, prior: jax.Array, latent: jax.Array, bias: jax.Array) -> Mixture:
    """Returns the mixture of states [...,D]; prior is [D,K], latent [D,K,d] and bias [K,d]."""
    scores = full_einsum("...D,Dk->...k", h, prior.astype(h.dtype))
    x = jnp.tanh(full_einsum("...D,Dkd->...kd", h, latent.astype(h.dtype)) + bias)
    return Mixture(jax.nn.log_softmax(scores), x.astype(h.dtype))


def mixture_nll(
    latents: jax.Array,
    log_prior: jax.Array,
    targets: jax.Array,
    table: Table,
    platform: str = "",
) -> jax.Array:
    """Returns -log p(target) in nats, float32 [S].

    ``latents`` are [S,K,d], ``log_prior`` is [S,K], and ``targets`` are int32 [S].
    """
    k, d = latents.shape[1:]
    rows, words = latents.reshape(-1, d), jnp.repeat(targets, k)
    each = cross_entropy(rows, *table, words, platform=platform)
    return -jax.nn.logsumexp(log_prior - each.reshape(-1, k), axis=1)


def mixture_log_probs(m: Mixture, table: Table) -> jax.Array:
    """Returns log p of every word, float32 [...,V]; the gradient stores K arrays of this size."""
    m, table = vary_alike((m, table))
    weight, bias = table[0].astype(m.latents.dtype), table[1]

    @jax.checkpoint
    def add(log_p, component):
        x, log_pi = component
        scores = full_einsum("...d,vd->...v", x, weight) + bias
        return jnp.logaddexp(log_p, log_pi[..., None] + jax.nn.log_softmax(scores)), None

    components = jnp.moveaxis(m.latents, -2, 0), jnp.moveaxis(m.log_prior, -1, 0)
    shape = (*m.log_prior.shape[:-1], weight.shape[0])
    none = jnp.full_like(m.log_prior, -jnp.inf, jnp.float32, shape)
    return jax.lax.scan(add, none, components)[0]
