"""Transformer-XL as people write it in plain Flax; train_speed.py times it beside ours.

The code follows the paper's equations. It uses ``nn.DenseGeneral`` for the projections of
attention, one einsum for each other matrix product of attention, ``nn.Dropout``, logits of the
complete segment at once, and one jitted update with donated arguments. The losses equal those of
txl_jax (tests/benchmarks/test_peers.py). Axes have the letters of txl_jax/model/__init__.py.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from txl_jax.config import ExperimentConfig, TransformerXLConfig


def sinusoids(distances: jax.Array, width: int) -> jax.Array:
    """Returns [K,D]: for each of K distances, ``width / 2`` sines and then as many cosines."""
    angles = distances[:, None] / 10000.0 ** (jnp.arange(0, width, 2) / width)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Attention(nn.Module):
    """Relative attention of a segment [B,T,D] to its memory [B,M,D] and to itself."""

    cfg: TransformerXLConfig

    @nn.compact
    def __call__(self, h, memory, r, u, v):
        """Returns the outputs of attention, [B,T,D].

        ``r`` [K,D] has the sinusoids of the distances K - 1 .. 0, where K = M + T. ``u`` and ``v``
        [N,H] are the biases of the paper, for N heads of width H.
        """
        c, (b, t, d), m = self.cfg, h.shape, memory.shape[1]
        heads = lambda name: nn.DenseGeneral((c.n_head, c.d_head), use_bias=False, name=name)
        states = jnp.concatenate([memory, h], axis=1)
        q, k, value = heads("query")(h), heads("key")(states), heads("value")(states)
        by_distance = jnp.einsum("btnh,knh->bntk", q + v, heads("position")(r))
        padded = jnp.pad(by_distance, [(0, 0), (0, 0), (0, 0), (1, 0)])
        shifted = padded.reshape(b, c.n_head, m + t + 1, t)[:, :, 1:]
        scores = jnp.einsum("btnh,bknh->bntk", q + u, k) + shifted.reshape(by_distance.shape)
        causal = jnp.arange(m + t) <= m + jnp.arange(t)[:, None]
        scores = jnp.where(causal, scores * c.d_head**-0.5, -1e30)
        gathered = jnp.einsum("bntk,bknh->btnh", jax.nn.softmax(scores), value)
        return nn.DenseGeneral(d, axis=(-2, -1), use_bias=False, name="output")(gathered)


class PlainTransformerXL(nn.Module):
    """The model with LayerNorm after each residual sum.

    The softmax has the embedding as its weights. Attention weights have no dropout.
    """

    cfg: TransformerXLConfig

    @nn.compact
    def __call__(self, inputs, targets, mems, train: bool = False):
        """Returns the losses [B,T] in nats, and the new memory [L,B,M,D].

        Every query attends to all M slots of memory, also to those that no token has filled yet.
        """
        c, (_, t), m = self.cfg, inputs.shape, mems.shape[2]
        assert c.vocab_size is not None
        drop = nn.Dropout(c.dropout, deterministic=not train)
        norm = lambda name: nn.LayerNorm(epsilon=1e-5, name=name)
        bias = lambda name: self.param(name, nn.initializers.zeros, (c.n_head, c.d_head))
        u, v = bias("u"), bias("v")
        embed = nn.Embed(c.vocab_size, c.d_model, name="embedding")
        h = drop(embed(inputs) * c.d_model**0.5)
        r = drop(sinusoids(jnp.arange(m + t - 1, -1, -1.0), c.d_model))
        kept = []
        for n in range(c.n_layer):
            kept.append(jnp.concatenate([mems[n], h], axis=1)[:, -m:] if m else mems[n])
            attended = Attention(c, name=f"attention_{n}")(h, mems[n], r, u, v)
            h = norm(f"norm_attention_{n}")(h + drop(attended))
            inner = drop(nn.relu(nn.Dense(c.d_inner, name=f"inner_{n}")(h)))
            h = norm(f"norm_feed_forward_{n}")(
                h + drop(nn.Dense(c.d_model, name=f"outer_{n}")(inner))
            )
        words = self.param("softmax_bias", nn.initializers.zeros, (c.vocab_size,))
        logits = embed.attend(drop(h)) + words
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return nll, jax.lax.stop_gradient(jnp.stack(kept))


def training(exp: ExperimentConfig) -> tuple[Any, Any]:
    """Returns the initial state, and ``update(state, inputs, targets) -> (state, loss)``."""
    c, t = exp.model, exp.train
    model = PlainTransformerXL(c)
    clip = optax.clip_by_global_norm(exp.optimizer.clip_norm)
    optimizer = optax.chain(clip, optax.adam(exp.optimizer.learning_rate))
    mems = jnp.zeros((c.n_layer, t.batch_size, t.mem_len, c.d_model))
    tokens = jnp.zeros((t.batch_size, t.seg_len), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens, tokens, mems)

    def update(state, inputs, targets):
        params, opt_state, mems, key = state
        key, drop = jax.random.split(key)

        def loss_of(params):
            rngs = {"dropout": drop}
            nll, new_mems = model.apply(params, inputs, targets, mems, train=True, rngs=rngs)
            return nll.mean(), new_mems

        (loss, new_mems), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, updates), opt_state, new_mems, key), loss

    return (params, optimizer.init(params), mems, jax.random.key(1)), jax.jit(
        update, donate_argnums=0
    )
