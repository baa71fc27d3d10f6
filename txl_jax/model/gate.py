"""The gate around a sub-layer, in place of a sum (GTrXL, Parisotto et al. 2019)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import TransformerXLConfig


class GRUGate(nn.Module):
    """The GRU gate g(x, y) of a sub-layer's input x and output (Parisotto et al. 2019, 3.2).

        y = relu(output)
        r = sigmoid(W_r y + U_r x)          z = sigmoid(W_z y + U_z x - b)
        h = tanh(W_h y + U_h (r x))         g = (1 - z) x + z h

    Parameters: ``from_output`` [D,3,D] (W of r, z and h), ``from_input`` [D,3,D] (U likewise) and
    ``bias`` [D] (b), which starts as ``gate_bias``.
    """

    cfg: TransformerXLConfig

    @nn.compact
    def __call__(self, x: jax.Array, output: jax.Array) -> jax.Array:
        """Returns the gated states [B,T,D] of the input [B,T,D] and the output [B,T,D]."""
        c, d = self.cfg, x.shape[-1]
        init = nn.initializers.normal(c.init_std)
        of_output = self.param("from_output", init, (d, 3, d))
        of_input = self.param("from_input", init, (d, 3, d))
        bias = self.param("bias", nn.initializers.constant(c.gate_bias), (d,))

        def product(states, kernel):
            flat = states.reshape(-1, d) @ kernel.reshape(d, -1).astype(x.dtype)
            return jnp.split(flat.reshape(*x.shape[:-1], -1), kernel.shape[1], axis=-1)

        y_r, y_z, y_h = product(nn.relu(output), of_output)
        x_r, x_z = product(x, of_input[:, :2])
        r, z = nn.sigmoid(y_r + x_r), nn.sigmoid(y_z + x_z - bias.astype(x.dtype))
        (x_h,) = product(r * x, of_input[:, 2:])
        return (1 - z) * x + z * jnp.tanh(y_h + x_h)
