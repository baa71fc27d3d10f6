"""Attention with relative positions to memory and segment (paper, section 3.3).

All forms of attention share the computation of kernels/, with the four terms of scores.py. Each
form defines its own u, v, r and b. :class:`RelativeAttention` is the paper's form. The paper's
table 6 compares it with other forms.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from txl_jax.config import AttentionForm, TransformerXLConfig
from txl_jax.model import initializers, ring, unprojected
from txl_jax.model.dropout import AttentionDropout, Dropout
from txl_jax.model.kernels import AttentionInputs, attend
from txl_jax.model.kernels.choice import FUSED, Choice, choose
from txl_jax.model.masks import attention_mask
from txl_jax.model.positions import Positions
from txl_jax.model.precision import product_precision, resolved
from txl_jax.model.products import product, product_apart
from txl_jax.model.ring import KeysValues
from txl_jax.model.unprojected import States
from txl_jax.parallel.platforms import platform_of


class Attention(nn.Module):
    """Multi-head attention of a segment to its memory and itself, without position terms.

    Parameters: ``query``, ``key``, ``value`` [D,N,H] (W_q, W_k,E, W_v) and ``output`` [N,H,D]. The
    setting ``attention_bias`` adds ``value_bias`` [N,H] and ``output_bias`` [D]. Subclasses with
    position terms add parameters of their own. The class attributes say which position terms a
    subclass uses.
    """

    global_biases = False  # uses u and v, which the model gives to each layer
    input_sinusoids = False  # sinusoids are added to the model's input
    layer_positions = False  # learnt vectors are added to each layer's input
    position_vectors = False  # every query is multiplied by the vectors r
    projected_sinusoids = staticmethod(lambda n_keys: 0)  # how many, for model/flops.py

    cfg: TransformerXLConfig
    mesh: Mesh | None = None

    def setup(self):
        """Declares the projections."""
        c = self.cfg
        init = initializers.normal(c.init_std)
        heads = (c.d_model, c.n_head, c.d_head)
        self.query = self.param("query", init, heads)
        of_keys = (c.d_model, c.kv_heads, c.d_head)
        self.key = self.param("key", init, of_keys)
        self.value = self.param("value", init, of_keys)
        self.output = self.param("output", init, (c.n_head, c.d_head, c.d_model))
        if c.attention_bias:
            zeros = initializers.zeros
            self.value_bias = self.param("value_bias", zeros, heads[1:])
            self.output_bias = self.param("output_bias", zeros, (c.d_model,))
        self.drop_heads = Dropout(c.dropout_qkv, shared=(2,))

    def positions(self, n_keys: int, encodings, u, v, train: bool = False) -> Positions:
        """Returns the position terms of the scores, for the distances K-1 .. 0.

        ``encodings`` are the sinusoids of the distances, [K,D]. ``u`` and ``v`` are the model's
        global content and position biases, [N,H] or ``None``. ``train``: see :meth:`__call__`.
        """
        return Positions()

    def project(self, states: jax.Array, scale=None, bias=None) -> KeysValues:
        """Returns the keys and values of states [B,S,D], or of ``scale * states + bias``."""

        def heads(kernel):
            if scale is None:
                return self._heads(states, kernel)
            # (scale x + bias) W = x (scale W) + bias W
            shift = jnp.einsum("d,dnh->nh", bias, kernel).astype(states.dtype)
            return self._heads(states, scale[:, None, None] * kernel) + shift[:, None, None]

        keys, values = heads(self.key), heads(self.value)
        if self.cfg.attention_bias:  # a bias of keys would cancel in the softmax
            values = values + self.value_bias[:, None, None].astype(values.dtype)
        return KeysValues(keys, values)

    def unprojected(self, states: jax.Array, scale=None, bias=None) -> States:
        """Returns what :func:`unprojected.attend` needs in place of :meth:`project`."""
        kernels, shifts = [self.key, self.value], [jnp.zeros(self.key.shape[1:])] * 2
        if scale is not None:
            shifts = [jnp.einsum("d,dnh->nh", bias, kernel) for kernel in kernels]
            kernels = [scale[:, None, None] * kernel for kernel in kernels]
        if self.cfg.attention_bias:
            shifts[1] = shifts[1] + self.value_bias
        return States(states, KeysValues(*kernels), KeysValues(*shifts))

    def queries(self, states: jax.Array) -> jax.Array:
        """Returns the queries [N,B,S,H] of states [B,S,D], divided by sqrt(H)."""
        return self._heads(states, self.query, self.cfg.d_head**-0.5)

    def __call__(
        self, queries, present: KeysValues, past, positions: Positions, mask, train: bool = False
    ) -> jax.Array:
        """Returns the attention output [B,T,D], before dropout, residual and normalisation.

        ``queries`` are [N,B,T,H], as :meth:`queries` returns them, and ``present`` are the
        segment's keys and values. ``past`` are the keys and values of M memory slots, a list of
        rings that hold them, or :class:`States`. ``positions`` are for K = M + T keys; for rings
        see ring.py. ``train`` applies dropout and needs the ``dropout`` rng.
        """
        c, p = self.cfg, self.terms(positions, queries.dtype)
        q = self.drop_heads(queries, train)
        if isinstance(past, list):
            one = may_fuse_cache(c, self.mesh) and len(past) == 1
            inputs = ring.one_ring(q, past, present, p, mask) if one else None
            if inputs and choose("auto", inputs, self.mesh).name in FUSED:
                gathered = self.gather(inputs)
            else:
                gathered = ring.attend(q, past, present, p, mask, platform_of(self.mesh))
        elif isinstance(past, States):
            gathered = unprojected.attend(q, past, present, p, mask)
        else:
            both: Any = zip(past, present, strict=True)
            if train and c.dropout_qkv:  # one dropout mask over memory and segment
                both = (self.drop_heads(jnp.concatenate(x, axis=2), train) for x in both)
            k, val = both
            key = self.make_rng("dropout") if train and c.dropatt else None
            drop = None if key is None else AttentionDropout.draw(key, c.dropatt)
            x = AttentionInputs(q, k, val, p, mask, drop)
            gathered = self.gather(x)
        n, b, t, h = gathered.shape  # projected back to [B,T,D], as one flat matrix product
        kernel = self.output.reshape(n * h, c.d_model).astype(gathered.dtype)
        flat = gathered.transpose(1, 2, 0, 3).reshape(b * t, n * h)
        out = product(flat, kernel, self.mesh).reshape(b, t, c.d_model)
        return out + self.output_bias.astype(out.dtype) if c.attention_bias else out

    def scaled(self, x: jax.Array | None, dtype: Any) -> jax.Array | None:
        """Returns x [N,...], which is u, v or b, divided by sqrt(H)."""
        return None if x is None else x.astype(dtype) * self.cfg.d_head**-0.5

    def terms(self, p: Positions, dtype: Any) -> Positions:
        """Returns the position terms for kernels/: u, v and b in a dtype, divided by sqrt(H)."""
        scaled = lambda x: self.scaled(x, dtype)
        return p.replace(u=scaled(p.u), v=scaled(p.v), b=scaled(p.b))

    def gather(self, x: AttentionInputs) -> jax.Array:
        """Returns the weighted sum of values for each query and head, [N,B,T,H].

        The analysis of attention intercepts calls of this method to record its inputs.
        """
        return attend(x, self.cfg.kernel, self.mesh)

    def _heads(self, x: jax.Array, kernel: jax.Array, scale: float | None = None) -> jax.Array:
        """Projects x [B,S,D] to heads [N,B,S,H] by one flat matrix product, times ``scale``."""
        b, s, d = x.shape
        _, n, h = kernel.shape
        matrix = kernel.reshape(d, n * h).astype(x.dtype)
        # product_apart gives kernels/triton.py an array that needs no copy
        apart = s and s % 128 == 0 and platform_of(self.mesh) == "gpu"
        if apart:
            flat = product_apart(x.reshape(b * s, d), matrix, self.mesh, scale or 1.0)
        else:
            flat = product(x.reshape(b * s, d), matrix, self.mesh)
            flat = flat if scale is None else flat * scale
        return flat.reshape(b, s, n, h).transpose(2, 0, 1, 3)

    def _project_encodings(self, encodings: jax.Array, kernel: jax.Array, train: bool) -> jax.Array:
        """Projects encodings [K,D] to heads [N,K,H], and applies the dropout of heads."""
        return self.drop_heads(self._heads(encodings[None], kernel), train)[:, 0]


class RelativeAttention(Attention):
    """The paper's form, in which r_d is the projected sinusoid of distance d.

    Parameters: those of :class:`Attention` and ``position`` [D,N,H] (W_k,R). The biases u and v are
    parameters of the whole model, not of this module.
    """

    global_biases = True
    position_vectors = True
    projected_sinusoids = staticmethod(lambda n_keys: n_keys)

    def setup(self):
        """Declares the projections."""
        super().setup()
        init = initializers.normal(self.cfg.init_std)
        self.position = self.param("position", init, self.query.shape)

    def positions(self, n_keys, encodings, u, v, train=False):
        """See :meth:`Attention.positions`."""
        return Positions(u, v, self._project_encodings(encodings, self.position, train))


class ShawAttention(Attention):
    """Each layer learns a vector a_d and a scalar b_d for each distance d (Shaw et al. 2018).

    The form is that of the authors' PyTorch code. Scores are (q.k + q.a_d + u.k + b_d) / sqrt(H).
    Distances beyond the table use its last row. With ``clamp_len`` c > 0, only the rows of the c
    smallest distances are used.

    Parameters: those of :class:`Attention`, ``u`` [N,H], ``distance`` [R,N,H] (a) and
    ``distance_bias`` [R,N] (b). Row d is for distance d, and R is ``n_positions``.
    """

    position_vectors = True

    def setup(self):
        """Declares the projections and tables."""
        super().setup()
        c, init, zeros = self.cfg, initializers.normal(self.cfg.init_std), initializers.zeros
        self.u = self.param("u", init, (c.n_head, c.d_head))
        self.distance = self.param("distance", init, (c.n_positions, c.n_head, c.d_head))
        self.distance_bias = self.param("distance_bias", zeros, (c.n_positions, c.n_head))

    def positions(self, n_keys, encodings, u, v, train=False):
        """See :meth:`Attention.positions`; the model's u and v are not used."""
        c, rows = self.cfg, self.distance.shape[0]
        if c.clamp_len > 0:
            rows = min(rows, c.clamp_len)
        row = jnp.minimum(jnp.arange(n_keys - 1, -1, -1), rows - 1)
        r = jnp.asarray(self.distance)[row].astype(c.dtype).transpose(1, 0, 2)
        r = self.drop_heads(r[:, None], train)[:, 0]
        return Positions(u=self.u, r=r, b=jnp.asarray(self.distance_bias)[row].T)


class SharedProjectionAttention(Attention):
    """Sinusoids are projected with W_q and W_k, so positions have no parameters of their own.

    Scores are (W_q h_i + W_q R_0).(W_k h_j + W_k R_{i-j}) / sqrt(H), so u and v are both W_q R_0
    (the authors' later code for Penn Treebank).
    """

    position_vectors = True
    projected_sinusoids = staticmethod(lambda n_keys: n_keys + 1)  # distance 0 twice, once for u, v

    def positions(self, n_keys, encodings, u, v, train=False):
        """See :meth:`Attention.positions`; the model's u and v are not used."""
        here = self._project_encodings(encodings[-1:], self.query, train)[:, 0]
        return Positions(here, here, self._project_encodings(encodings, self.key, train))


class AbsoluteAttention(Attention):
    """Attention of a vanilla model: sinusoids of positions are added to the embeddings."""

    input_sinusoids = True


class AbsolutePerLayerAttention(Attention):
    """Attention of a vanilla model in which each layer adds learnt positions (Al-Rfou 2018)."""

    layer_positions = True


FORMS: dict[AttentionForm, type[Attention]] = {
    "relative": RelativeAttention,
    "shaw": ShawAttention,
    "absolute": AbsoluteAttention,
    "absolute_per_layer": AbsolutePerLayerAttention,
    "shared_projection": SharedProjectionAttention,
}


def may_fuse_cache(c: TransformerXLConfig, mesh: Mesh | None) -> bool:
    """Tells whether the settings and the devices allow a fused kernel to read a cache.

    Whether a kernel supports the model's attention is not checked here, but in :func:`fuses_cache`.
    """
    return c.kernel == "auto" and platform_of(mesh) == "gpu"


def fuses_cache(
    c: TransformerXLConfig, rows: int, seg_len: int, mem_len: int, mesh: Mesh | None
) -> bool:
    """Tells whether a fused kernel reads a cache of ``rows`` streams with ``mem_len`` slots.

    ``seg_len`` is the number of tokens of a segment.
    """
    sizes = rows, seg_len, mem_len
    return may_fuse_cache(c, mesh) and planned_attention(c, *sizes, False, mesh).name in FUSED


def projection_flops(c: TransformerXLConfig, queries: int, keys: int) -> float:
    """Returns the operations of one layer's attention projections for one row of a batch.

    A query has two projections (query and output), and a key also has two (key and value). Each
    projection needs 2 D H for each head.
    """
    return 4.0 * (queries * c.n_head + keys * c.kv_heads) * c.d_model * c.d_head


def planned_attention(
    c: TransformerXLConfig, rows: int, seg_len: int, mem_len: int, train: bool, mesh: Mesh | None
) -> Choice:
    """Returns the implementation of attention that a program of these sizes uses.

    ``rows`` is the number of rows on all devices of ``mesh`` together, and ``seg_len`` is T plus
    the tokens of context. No array is computed. Programs with a cache use ring.py instead, unless
    :func:`may_fuse_cache` allows a fused kernel. Programs with few tokens use unprojected.py.
    """
    x = planned_inputs(resolved(c, mesh), rows, seg_len, mem_len, train)
    with product_precision(c.matmul_precision):
        return choose(c.kernel, x, mesh)


def planned_inputs(
    c: TransformerXLConfig,
    rows: int,
    seg_len: int,
    mem_len: int,
    train: bool,
    episodes: bool = False,
    cached: bool = False,
) -> AttentionInputs:
    """Returns the shapes of attention's inputs in a program of these sizes.

    ``episodes`` tells whether memory is reset within segments, and ``cached`` whether the memory is
    the ring of a cache. The dtype of ``c`` must not be ``auto``.
    """
    n_keys = mem_len + seg_len
    shape = lambda *sides: jax.ShapeDtypeStruct(sides, c.dtype)
    form = FORMS[c.attention](c, parent=None)  # no parent, even within a model
    biases = (shape(c.n_head, c.d_head) if form.global_biases else None,) * 2

    def inputs(key, encodings, u, v, q, k) -> AttentionInputs:
        made = lambda form, *about: form.terms(form.positions(*about), c.dtype)
        terms, _ = form.init_with_output(key, n_keys, encodings, u, v, method=made)
        window = c.same_length if mem_len else False
        reset = jnp.zeros((rows, seg_len), bool) if episodes else None
        mask = attention_mask(seg_len, jnp.zeros(rows, jnp.int32), mem_len, window, reset)
        drop = AttentionDropout.draw(key, c.dropatt) if train and c.dropatt else None
        return AttentionInputs(q, k, k, terms, mask, drop, jnp.int32(0) if cached else None)

    key = jax.eval_shape(lambda: jax.random.key(0))
    arrays = (shape(c.n_head, rows, length, c.d_head) for length in (seg_len, n_keys))
    return jax.eval_shape(inputs, key, shape(n_keys, c.d_model), *biases, *arrays)
