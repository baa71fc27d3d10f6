"""Other forms of attention, by name: what a position is to them (paper, table 6)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import AttentionForm
from txl_jax.model.attention import Attention, RelativeAttention
from txl_jax.model.positions import Positions


class ShawAttention(Attention):
    """Learnt vectors and scalars of distances (Shaw et al. 2018, as PT has it), per layer.

    Scores are (q.k + q.a_d + u.k + b_d) / sqrt(H). Distances beyond the table use its farthest
    row; with ``clamp_len`` c > 0 only its c nearest rows are used.

    Parameters: those of :class:`Attention`, ``u`` [N,H], ``distance`` [R,N,H] (a) and
    ``distance_bias`` [R,N] (b), row d for distance d, R = ``n_positions``.
    """

    def setup(self):
        """Declares projections and tables."""
        super().setup()
        c = self.cfg
        init = nn.initializers.normal(c.init_std)
        self.u = self.param("u", init, (c.n_head, c.d_head))
        self.distance = self.param("distance", init, (c.n_positions, c.n_head, c.d_head))
        zeros = nn.initializers.zeros
        self.distance_bias = self.param("distance_bias", zeros, (c.n_positions, c.n_head))

    def positions(self, n_keys, encodings, u, v, train=False):
        """See :meth:`Attention.positions`; nothing of the model's own is used."""
        c = self.cfg
        rows = self.distance.shape[0]
        if c.clamp_len > 0:
            rows = min(rows, c.clamp_len)
        row = jnp.minimum(jnp.arange(n_keys - 1, -1, -1), rows - 1)
        r = jnp.asarray(self.distance)[row].astype(c.dtype).transpose(1, 0, 2)
        r = self.drop_heads(r[:, None], train)[:, 0]
        return Positions(u=self.u, r=r, b=jnp.asarray(self.distance_bias)[row].T)


class SharedProjectionAttention(Attention):
    """Sinusoids through the projections of content: no parameters of their own.

    Scores are (W_q h_i + W_q R_0).(W_k h_j + W_k R_{i-j}) / sqrt(H): u and v are both W_q R_0
    (the authors' later Penn Treebank release).
    """

    def positions(self, n_keys, encodings, u, v, train=False):
        """See :meth:`Attention.positions`; nothing of the model's own is used."""
        here = self._project_encodings(encodings[-1:], self.query, train)[:, 0]
        return Positions(here, here, self._project_encodings(encodings, self.key, train))


FORMS: dict[AttentionForm, type[Attention]] = {
    "relative": RelativeAttention,
    "shaw": ShawAttention,
    "absolute": Attention,  # the model adds sinusoids to the embedding
    "absolute_per_layer": Attention,  # the block adds learnt vectors to its input
    "shared_projection": SharedProjectionAttention,
}


def places(seg_len: int, lengths: jax.Array | None) -> jax.Array:
    """Positions counted from the end, the last real token has 0: int32 [T], or [B,T] by lengths.

    Padding after it has 0 as well.
    """
    position = jnp.arange(seg_len)
    if lengths is None:
        return seg_len - 1 - position
    return jnp.maximum(lengths[:, None] - 1 - position, 0)
