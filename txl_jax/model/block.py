"""One layer: attention, then a feed-forward layer, each with residual and normalisation."""

import flax.linen as nn
import jax

from txl_jax.config import TransformerXLConfig
from txl_jax.model.attention import RelativeAttention


def layer_norm(cfg: TransformerXLConfig, name: str) -> nn.LayerNorm:
    """LayerNorm as the authors have it: epsilon 1e-5, gain drawn N(1, init_std)."""

    def gain(key, shape, dtype):
        return 1.0 + nn.initializers.normal(cfg.init_std)(key, shape, dtype)

    return nn.LayerNorm(
        epsilon=1e-5, dtype=cfg.dtype, scale_init=gain, use_fast_variance=False, name=name
    )


class FeedForward(nn.Module):
    """dropout(W2 dropout(relu(W1 h + b1)) + b2), the same at every position."""

    cfg: TransformerXLConfig

    @nn.compact
    def __call__(self, h: jax.Array, train: bool = False) -> jax.Array:
        """[B,T,D] to [B,T,D]."""
        c = self.cfg
        init = nn.initializers.normal(c.init_std)
        b, t, d = h.shape
        x = nn.Dense(c.d_inner, dtype=c.dtype, kernel_init=init, name="inner")(h.reshape(-1, d))
        x = nn.Dropout(c.dropout)(nn.relu(x), deterministic=not train)
        x = nn.Dense(c.d_model, dtype=c.dtype, kernel_init=init, name="outer")(x)
        return nn.Dropout(c.dropout)(x, deterministic=not train).reshape(b, t, d)


class Block(nn.Module):
    """A layer of the model, normalised after each sub-layer (the paper's) or before."""

    cfg: TransformerXLConfig

    @nn.compact
    def __call__(self, h, memory, r, u, v, allowed, train: bool = False) -> jax.Array:
        """[B,T,D] to [B,T,D]; arguments as in :class:`RelativeAttention`."""
        c = self.cfg
        attention = RelativeAttention(c, name="attention")
        feed_forward = FeedForward(c, name="feed_forward")
        norm_1, norm_2 = layer_norm(c, "norm_attention"), layer_norm(c, "norm_feed_forward")
        drop = nn.Dropout(c.dropout, deterministic=not train)
        if c.pre_lnorm:
            h = h + drop(attention(norm_1(h), norm_1(memory), r, u, v, allowed, train))
            return h + feed_forward(norm_2(h), train)
        h = norm_1(h + drop(attention(h, memory, r, u, v, allowed, train)))
        return norm_2(h + feed_forward(h, train))
