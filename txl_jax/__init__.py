"""Transformer-XL for JAX: train, evaluate, analyse and sample language models with memory."""

from txl_jax import interrupts

if interrupts.is_command():  # before the imports below, which take seconds
    interrupts.exit_on_interrupt()

from txl_jax import convert
from txl_jax.checkpoint.saving import push
from txl_jax.config import ConfigError, ExperimentConfig, TransformerXLConfig, load_config
from txl_jax.convert import save
from txl_jax.data.corpus import Corpus, DataError, load_corpus
from txl_jax.data.documents import Documents
from txl_jax.data.sentences import Sentences, segments
from txl_jax.data.streams import Segment
from txl_jax.library import LanguageModel, load, train
from txl_jax.model.memory import Cache, Memory
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.training.events import Logger

__all__ = [
    "Cache",
    "ConfigError",
    "Corpus",
    "DataError",
    "Documents",
    "ExperimentConfig",
    "LanguageModel",
    "Logger",
    "Memory",
    "Segment",
    "Sentences",
    "TransformerXL",
    "TransformerXLConfig",
    "convert",
    "load",
    "load_config",
    "load_corpus",
    "push",
    "save",
    "segments",
    "train",
]

__version__ = "0.1.0"
