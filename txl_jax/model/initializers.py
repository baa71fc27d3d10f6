"""The distributions of initial parameters, which are float32 with ``JAX_ENABLE_X64`` too."""

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
    """Lowers draws on NVIDIA GPUs to calls of one kernel, with the same values.

    Else XLA compiles a kernel for each parameter of each layer: 7 s a layer on two busy cores.
    """
    settings: Any = jax.config
    before = settings.jax_threefry_gpu_kernel_lowering
    settings.update("jax_threefry_gpu_kernel_lowering", True)
    try:
        yield
    finally:
        settings.update("jax_threefry_gpu_kernel_lowering", before)
