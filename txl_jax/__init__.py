"""Transformer-XL for JAX: train, evaluate, analyse and sample language models with memory.

A public name is imported when it is first used, because jax, flax and orbax take most of a second
and ``txl --help`` needs none of them.
"""

from etils import epy as _epy

from txl_jax import interrupts, standard_streams

if interrupts.is_command():  # before the slow imports
    standard_streams.open_standard_streams()
    interrupts.exit_on_interrupt()

with _epy.lazy_api_imports(globals()):
    from txl_jax import convert
    from txl_jax.checkpoint.saving import push
    from txl_jax.config import ConfigError, ExperimentConfig, TransformerXLConfig, load_config
    from txl_jax.convert import save
    from txl_jax.data.corpus import Corpus, DataError, load_corpus
    from txl_jax.data.pieces import Pieces
    from txl_jax.data.streams import Segment, segments
    from txl_jax.library import LanguageModel, load, sweep, train
    from txl_jax.model.memory import Cache, Memory
    from txl_jax.model.relative_attention import relative_attention
    from txl_jax.model.transformer_xl import TransformerXL
    from txl_jax.training.events import Logger

__version__ = "0.1.0"
__all__ = [
    "Cache",
    "ConfigError",
    "Corpus",
    "DataError",
    "ExperimentConfig",
    "LanguageModel",
    "Logger",
    "Memory",
    "Pieces",
    "Segment",
    "TransformerXL",
    "TransformerXLConfig",
    "convert",
    "load",
    "load_config",
    "load_corpus",
    "push",
    "relative_attention",
    "save",
    "segments",
    "sweep",
    "train",
]
