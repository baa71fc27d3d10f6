"""Transformer-XL for JAX: train, evaluate, analyse and sample language models with memory."""

from txl_jax.config import ExperimentConfig, TransformerXLConfig, load_config
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL

__all__ = [
    "ExperimentConfig",
    "Memory",
    "TransformerXL",
    "TransformerXLConfig",
    "load_config",
]

__version__ = "0.1.0"
