"""GTrXL in plain Flax with a memory of hidden states; benchmarks/acting.py compares it with ours.

At every step this model projects all M states of its memory to keys and values again, as the
program transformerXL_PPO_JAX does. The parameters have the same names as in that program, so
``params_from_ppo_jax`` can convert them for txl_jax. The benchmark checks that this model and
txl_jax give the same outputs.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


def sinusoids(count: int, width: int) -> jax.Array:
    """Returns sinusoids [count,D] for distances from ``count`` (oldest key) to 1 (newest key)."""
    distance = jnp.arange(count, 0, -1.0)[:, None]
    angles = distance / 10000.0 ** (jnp.arange(0, width, 2) / width)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Attention(nn.Module):
    """Attention of T queries [B,T,D] to K = M + T normalised states [B,K,D]."""

    heads: int

    @nn.compact
    def __call__(self, queries, states, mask):
        """Returns [B,T,D]; a query sees the keys for which ``mask``, bool [B,T,K], is True."""
        (_, t, d), k = queries.shape, states.shape[1]
        shape = (self.heads, d // self.heads)
        dense = lambda name, **kwargs: nn.DenseGeneral(shape, name=name, **kwargs)
        q = dense("query")(queries)
        key, value = dense("key")(states), dense("value")(states)
        r = dense("pos_embed_mat", use_bias=False)(sinusoids(k, d).astype(queries.dtype))
        u, v = (self.param(f"r_{x}_bias", nn.initializers.zeros, shape) for x in "wr")
        by_distance = jnp.einsum("btnh,knh->bntk", q + v, r)
        if t > 1:  # moves the scores of query i left by T-1-i keys
            padded = jnp.pad(by_distance, [(0, 0), (0, 0), (0, 0), (1, 0)])
            b, n = padded.shape[:2]
            by_distance = padded.reshape(b, n, k + 1, t)[:, :, 1:].reshape(b, n, t, k)
        scores = jnp.einsum("btnh,bknh->bntk", q + u, key) + by_distance
        scores = jnp.where(mask[:, None], scores / shape[1] ** 0.5, -1e30)
        gathered = jnp.einsum("bntk,bknh->btnh", jax.nn.softmax(scores), value)
        return nn.DenseGeneral(d, axis=(-2, -1), name="out")(gathered)


class Gate(nn.Module):
    """The GRU gate of Parisotto et al. (2019)."""

    bias: float

    @nn.compact
    def __call__(self, x, y):
        """Combines the input x and the output y of a sub-layer."""
        dense = lambda z: nn.Dense(x.shape[-1], use_bias=False)(z)
        bias = self.param("gating_bias", nn.initializers.constant(self.bias), x.shape[-1:])
        y = nn.relu(y)
        r = nn.sigmoid(dense(y) + dense(x))
        z = nn.sigmoid(dense(y) + dense(x) - bias)
        return (1 - z) * x + z * jnp.tanh(dense(y) + dense(r * x))


class Layer(nn.Module):
    """Attention and a feed-forward layer, each with LayerNorm before it and a gate after it."""

    heads: int
    bias: float

    @nn.compact
    def __call__(self, h, memory, mask):
        """Returns the states [B,T,D] after the layer; its memory is [B,M,D]."""
        d, m = h.shape[-1], memory.shape[1]
        states = nn.LayerNorm(name="ln1")(jnp.concatenate([memory, h], axis=1))
        attended = Attention(self.heads, name="attention1")(states[:, m:], states, mask)
        h = Gate(self.bias, name="gate1")(h, attended)
        x = nn.gelu(nn.Dense(d, name="dense1")(nn.LayerNorm(name="ln2")(h)))
        return Gate(self.bias, name="gate2")(h, nn.Dense(d, name="dense2")(x))


class PlainGTrXL(nn.Module):
    """All layers of the model; the memory is [B,M,L,D]."""

    layers: int
    heads: int
    gate_bias: float

    @nn.compact
    def __call__(self, h, memory, mask):
        """Returns the outputs [B,T,D], and the input of every layer [B,T,L,D]."""
        inputs = []
        for n in range(self.layers):
            inputs.append(h)
            layer = Layer(self.heads, self.gate_bias, name=f"tf_layers_{n}")
            h = layer(h, jax.lax.stop_gradient(memory[:, :, n]), mask)
        return h, jnp.stack(inputs, axis=2)
