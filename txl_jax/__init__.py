"""Transformer-XL for JAX: train, evaluate, analyse and sample language models with memory."""

from txl_jax.config import ExperimentConfig, TransformerXLConfig, load_config
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL

__version__ = "0.1.0"
