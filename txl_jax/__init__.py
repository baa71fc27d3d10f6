"""Transformer-XL for JAX: train, evaluate, analyse and sample language models with memory.

A public name is imported when it is first used, because jax, flax and orbax take most of a second
and ``txl --help`` needs none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from txl_jax import interrupts, standard_streams

if interrupts.is_command():  # before the slow imports
    standard_streams.open_standard_streams()
    interrupts.exit_on_interrupt()

if TYPE_CHECKING:
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

__version__ = "0.1.0"

_MODULES = {
    "Cache": "model.memory",
    "ConfigError": "config",
    "Corpus": "data.corpus",
    "DataError": "data.corpus",
    "ExperimentConfig": "config",
    "LanguageModel": "library",
    "Logger": "training.events",
    "Memory": "model.memory",
    "Segment": "data.streams",
    "Pieces": "data.pieces",
    "TransformerXL": "model.transformer_xl",
    "TransformerXLConfig": "config",
    "load": "library",
    "load_config": "config",
    "load_corpus": "data.corpus",
    "push": "checkpoint.saving",
    "relative_attention": "model.relative_attention",
    "save": "checkpoint.saving",
    "segments": "data.streams",
    "sweep": "library",
    "train": "library",
}
"""The module of each public name that is not a module itself."""


if not TYPE_CHECKING:  # a type checker shall report names that do not exist

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name not in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
