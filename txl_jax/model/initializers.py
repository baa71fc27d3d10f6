"""The distributions of initial parameters, which are float32 with ``JAX_ENABLE_X64`` too."""

import flax.linen as nn
import jax.numpy as jnp


def normal(std: float) -> nn.initializers.Initializer:
    """Returns an initializer that draws from N(0, std)."""
    return nn.initializers.normal(std, jnp.float32)


def constant(value: float) -> nn.initializers.Initializer:
    """Returns an initializer that sets every entry to ``value``."""
    return nn.initializers.constant(value, jnp.float32)


zeros = constant(0.0)
