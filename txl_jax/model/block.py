"""One layer: attention and a feed-forward layer, each with a residual sum or gate and LayerNorm."""

import operator
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.config import TransformerXLConfig
from txl_jax.model import initializers, unprojected, wide_products
from txl_jax.model.attention import FORMS
from txl_jax.model.derivatives import with_derivatives
from txl_jax.model.dropout import Dropout
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.model.products import product
from txl_jax.model.ring import KeysValues, Ring
from txl_jax.model.unprojected import States
from txl_jax.parallel.platforms import platform_of
from txl_jax.parallel.shardings import shard_rows


class LayerNorm(nn.Module):
    """LayerNorm over the width, computed in float32.

    Parameters: ``scale`` [D], drawn from N(1, init_std) as in the authors' code, and ``bias`` [D].
    """

    cfg: TransformerXLConfig
    mesh: Mesh | None = None

    def setup(self):
        """Declares the parameters."""
        c, shape = self.cfg, (self.cfg.d_model,)
        around_one = lambda *args: 1.0 + initializers.normal(c.init_std)(*args)
        self.scale = self.param("scale", around_one, shape)
        self.bias = self.param("bias", initializers.zeros, shape)

    def __call__(self, h: jax.Array) -> jax.Array:
        """Normalises states [B,T,D] and applies scale and bias."""
        on_gpu = platform_of(self.mesh) == "gpu"
        static = self.cfg.norm_epsilon, jnp.dtype(self.cfg.dtype), on_gpu
        return _layer_norm(static, (h, self.scale, self.bias), ())

    def normalised(self, h: jax.Array) -> jax.Array:
        """Returns (h - mean) / sqrt(variance + epsilon), float32 [B,T,D]."""
        return _normalised(h, *_moments(h, self.cfg.norm_epsilon))


def _moments(h: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and 1 / sqrt(variance + epsilon) of each state, float32 [B,T,1]."""
    h = h.astype(jnp.float32)
    mean = jnp.mean(h, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(h - mean), axis=-1, keepdims=True)
    return mean, jax.lax.rsqrt(variance + epsilon)


def _normalised(h, mean, inverse):
    return (h.astype(jnp.float32) - mean) * inverse


def _norm_forward(static, inputs, _):
    (epsilon, dtype, on_gpu), (h, scale, bias) = static, inputs
    moments = _moments(h, epsilon)
    saved = _stored(moments) if on_gpu else moments
    return (_normalised(h, *moments) * scale + bias).astype(dtype), (h, scale, *saved)


def _norm_tangent(static, saved, tangents):
    (h, scale, mean, inverse), (dh, dscale, dbias) = saved, tangents
    normal, dh = _normalised(h, mean, inverse), dh.astype(jnp.float32)
    moved = _without(normal, dh, *_of_moments(normal, dh)) * inverse
    return (moved * scale + normal * dscale + dbias).astype(static[1])


def _norm_gradient(static, saved, gradient):
    (h, scale, mean, inverse), gradient = saved, gradient.astype(jnp.float32)
    normal, rows, x = _normalised(h, mean, inverse), tuple(range(h.ndim - 1)), gradient * scale
    removed = _of_moments(normal, x)
    dh = _without(normal, x, *(_stored(removed) if static[2] else removed)) * inverse
    dscale, dbias = jnp.sum(gradient * normal, rows), jnp.sum(gradient, rows)
    return dh.astype(h.dtype), dscale.astype(scale.dtype), dbias.astype(scale.dtype)


def _of_moments(normal, x):
    """Returns the means of x and of x * normal over the width, as :func:`_without` needs them."""
    along = jnp.mean(x * normal, axis=-1, keepdims=True)
    return jnp.mean(x, axis=-1, keepdims=True), along


def _without(normal, x, mean, along):
    return x - mean - normal * along


def _stored(of_rows):
    """Makes XLA for GPUs store these numbers, two for each row, for several kernels.

    Otherwise each kernel of the gradient computes the numbers again from complete rows. The sums
    over the batch cannot be part of such a kernel, so XLA would write float32 arrays of all states.
    """
    return jax.lax.optimization_barrier(of_rows)


_layer_norm = with_derivatives(_norm_forward, _norm_tangent, _norm_gradient)
"""LayerNorm that saves for its gradient only the states, in their dtype, and their moments."""


def dropout(cfg: TransformerXLConfig, rate: float, width: int | None = None) -> Dropout:
    """Returns dropout for arrays [B,T,...]; see :class:`Dropout` for ``width``.

    If ``dropout_mask`` is ``locked``, all positions of a row have the same mask.
    """
    return Dropout(rate, (1,) if cfg.dropout_mask == "locked" else (), width)


class Dense(nn.Module):
    """The product of rows with a matrix [D,E], plus a bias.

    Parameters: ``kernel`` [D,E], drawn from N(0, init_std), and ``bias`` [E].
    """

    cfg: TransformerXLConfig
    shape: tuple[int, int]
    bias_init: nn.initializers.Initializer = initializers.zeros
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: jax.Array, padded: bool = False) -> jax.Array:
        """Maps rows [S,D] to [S,E]; for ``padded`` see :func:`~products.product`."""
        kernel = self.param("kernel", initializers.normal(self.cfg.init_std), self.shape)
        bias = self.param("bias", self.bias_init, self.shape[1:])
        rows = product(x, kernel.astype(x.dtype), self.mesh, padded)
        if rows.shape[1] > len(bias):
            bias = jnp.pad(bias, (0, rows.shape[1] - len(bias)))
        return wide_products.add_bias(rows, bias, platform_of(self.mesh))


class FeedForward(nn.Module):
    """The feed-forward layer dropout(W2 dropout(f(W1 h + b1)) + b2) with f relu or gelu.

    The biases start as zeros. But b2 is drawn from N(0, init_std) if ``dropout_embedding`` drops
    whole words. Otherwise, the state of a first word that is dropped would be zero in all layers.
    For a zero state, a LayerNorm multiplies the gradient by 1/sqrt(epsilon).
    """

    cfg: TransformerXLConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, h: jax.Array, train: bool = False) -> jax.Array:
        """Maps states [B,T,D] to [B,T,D]."""
        c = self.cfg
        b, t, d = h.shape
        inner = Dense(c, (d, c.d_inner), mesh=self.mesh, name="inner")
        x = inner(h.reshape(-1, d), padded=True).reshape(b, t, -1)
        drop = dropout(c, c.dropout, c.d_inner)
        x = drop.of_relu(x, train) if c.activation == "relu" else drop(nn.gelu(x), train)
        init = initializers.normal(c.init_std) if c.dropout_embedding else initializers.zeros
        outer = Dense(c, (c.d_inner, d), init, self.mesh, name="outer")
        x = outer(x.reshape(b * t, -1))
        return dropout(c, c.dropout)(x.reshape(b, t, d), train)


def feed_forward_flops(c: TransformerXLConfig) -> float:
    """Returns the operations of one layer for one token, without those of attention.

    The feed-forward layer needs 4 D F, and the two GRU gates, if any, need 24 D D.
    """
    return 4.0 * c.d_model * c.d_inner + (24.0 * c.d_model**2 if c.gate else 0.0)


class GRUGate(nn.Module):
    """The GRU gate g(x, y) of a sub-layer's input x and output (Parisotto et al. 2019, 3.2).

        y = relu(output)
        r = sigmoid(W_r y + U_r x)          z = sigmoid(W_z y + U_z x - b)
        h = tanh(W_h y + U_h (r x))         g = (1 - z) x + z h

    Parameters: ``from_output`` [D,3,D] (W of r, z and h), ``from_input`` [D,3,D] (U likewise) and
    ``bias`` [D] (b), which starts as ``gate_bias``.
    """

    cfg: TransformerXLConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: jax.Array, output: jax.Array) -> jax.Array:
        """Returns the gated states [B,T,D] of the input [B,T,D] and the output [B,T,D]."""
        c, d = self.cfg, x.shape[-1]
        init = initializers.normal(c.init_std)
        of_output = self.param("from_output", init, (d, 3, d))
        of_input = self.param("from_input", init, (d, 3, d))
        bias = self.param("bias", initializers.constant(c.gate_bias), (d,))

        def product(states, kernel):
            matrix = kernel.reshape(d, -1).astype(x.dtype)
            flat = wide_products.matmul(states.reshape(-1, d), matrix, platform_of(self.mesh))
            return jnp.split(flat.reshape(*x.shape[:-1], -1), kernel.shape[1], axis=-1)

        y_r, y_z, y_h = product(nn.relu(output), of_output)
        x_r, x_z = product(x, of_input[:, :2])
        r, z = nn.sigmoid(y_r + x_r), nn.sigmoid(y_z + x_z - bias.astype(x.dtype))
        (x_h,) = product(r * x, of_input[:, 2:])
        return (1 - z) * x + z * jnp.tanh(y_h + x_h)


class SharedInputs(flax.struct.PyTreeNode):
    """The inputs that all layers share.

    ``encodings`` [K,D] are the sinusoids of the distances K-1 .. 0. ``places`` [T] or [B,T] are
    positions counted from the end. Of all forms of attention, only ``absolute_per_layer`` reads
    ``places`` in a layer.
    """

    encodings: jax.Array
    mask: AttentionMask
    places: jax.Array
    train: bool = flax.struct.field(pytree_node=False)


class Block(nn.Module):
    """A layer of the model, normalised after each sub-layer (as in the paper) or before it.

    With ``absolute_per_layer``, the layer adds learnt position vectors to its input. They are the
    parameter ``positions`` [R,D] with R = ``n_positions``; the last row is for the last token.
    """

    cfg: TransformerXLConfig
    mesh: Mesh | None = None

    def setup(self):
        """Declares the sub-layers."""
        c = self.cfg
        self.attention = FORMS[c.attention](c, self.mesh)
        self.feed_forward = FeedForward(c, self.mesh)
        self.norm_attention, self.norm_feed_forward = (LayerNorm(c, self.mesh) for _ in range(2))
        gate = lambda: GRUGate(c, self.mesh) if c.gate else operator.add
        self.gate_attention, self.gate_feed_forward = gate(), gate()
        self.drop = dropout(c, c.dropout)
        if self.attention.layer_positions:
            init = initializers.normal(c.init_std)
            self.table = self.param("positions", init, (c.n_positions, c.d_model))

    def project_memory(self, memory: jax.Array) -> KeysValues:
        """Returns the keys and values of this layer's memory [B,M,D], a constant in the gradient.

        With ``pre_lnorm``, the scale and the bias of the LayerNorm are applied to the projection
        matrices instead of the memory. So no gradient has the size of the memory.
        """
        return self.attention.project(*self._normalised_memory(memory))

    def _normalised_memory(self, memory: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the memory, or, with ``pre_lnorm``, (normalised memory, scale, bias)."""
        if not self.cfg.pre_lnorm:
            return (memory,)
        norm = self.norm_attention
        normalised = jax.lax.stop_gradient(norm.normalised(memory)).astype(memory.dtype)
        return normalised, norm.scale, norm.bias

    def step(self, h, memory, biases, shared: SharedInputs) -> tuple[jax.Array, jax.Array]:
        """Returns the layer's output [B,T,D] and its input [B,T,D], which becomes its memory.

        ``memory`` [B,M,D] is a constant in the gradient. ``biases`` are u and v, [N,H] each, for
        ``relative`` attention, and ``None`` twice for other forms.
        """
        h, mask, train, (u, v) = shard_rows(h, self.mesh), shared.mask, shared.train, biases
        positions = self.attention.positions(mask.n_keys, shared.encodings, u, v, train)
        few = unprojected.is_cheaper(mask.seg_len, mask.mem_len, self.cfg.d_head)
        if few and not train and self.cfg.kernel == "auto":
            past: Any = self.attention.unprojected(*self._normalised_memory(memory))
        else:
            past = self.project_memory(memory)
        return self(h, past, positions, mask, shared.places, train)[0], h

    def __call__(
        self,
        h,
        past: KeysValues | States | list[Ring],
        positions: Positions,
        mask,
        places,
        train=False,
    ) -> tuple[jax.Array, KeysValues]:
        """Returns the layer's output [B,T,D], and the segment's keys and values.

        For the arguments see :class:`Attention`, and for ``places`` :class:`SharedInputs`.
        """
        c = self.cfg
        if self.attention.layer_positions:
            row = self.table.shape[0] - 1 - places
            h = h + jnp.asarray(self.table)[row].astype(h.dtype)
        attend = lambda q, present: self.drop(
            self.attention(q, present, past, positions, mask, train), train
        )
        if c.pre_lnorm:
            normal = self.norm_attention(h)
            # Without memory, the authors' PyTorch code normalises only keys and values.
            queries = self.attention.queries(h if c.memory_free else normal)
            present = self.attention.project(normal)
            h = self.gate_attention(h, attend(queries, present))
            fed = self.feed_forward(self.norm_feed_forward(h), train)
            return self.gate_feed_forward(h, fed), present
        queries, present = self.attention.queries(h), self.attention.project(h)
        h = self.norm_attention(self.gate_attention(h, attend(queries, present)))
        fed = self.feed_forward(h, train)
        return self.norm_feed_forward(self.gate_feed_forward(h, fed)), present
