"""The distributions of initial parameters, which are float32 even with ``JAX_ENABLE_X64``."""

import contextlib
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def normal(std: float) -> nn.initializers.Initializer:
    """Returns an initializer that draws from N(0, std)."""
    return nn.initializers.normal(std, jnp.float32)


def constant(value: float) -> nn.initializers.Initializer:
    """Returns an initializer that sets every entry to ``value``."""
    return nn.initializers.constant(value, jnp.float32)


zeros = constant(0.0)


@contextlib.contextmanager
def shared_draws() -> Iterator[None]:
    """Makes all random draws on NVIDIA GPUs call one kernel, which gives the same values.

    Otherwise XLA compiles a kernel for each parameter of each layer, which took 7 s for each layer
    on two busy CPU cores.
    """
    settings: Any = jax.config
    before = settings.jax_threefry_gpu_kernel_lowering
    settings.update("jax_threefry_gpu_kernel_lowering", True)
    try:
        yield
    finally:
        settings.update("jax_threefry_gpu_kernel_lowering", before)
