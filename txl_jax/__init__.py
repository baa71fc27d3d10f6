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
    from txl_jax import convert as convert
    from txl_jax.checkpoint.saving import push as push
    from txl_jax.config import ConfigError as ConfigError
    from txl_jax.config import ExperimentConfig as ExperimentConfig
    from txl_jax.config import TransformerXLConfig as TransformerXLConfig
    from txl_jax.config import load_config as load_config
    from txl_jax.convert import save as save
    from txl_jax.data.corpus import Corpus as Corpus
    from txl_jax.data.corpus import DataError as DataError
    from txl_jax.data.corpus import load_corpus as load_corpus
    from txl_jax.data.pieces import Pieces as Pieces
    from txl_jax.data.streams import Segment as Segment
    from txl_jax.data.streams import segments as segments
    from txl_jax.library import LanguageModel as LanguageModel
    from txl_jax.library import load as load
    from txl_jax.library import sweep as sweep
    from txl_jax.library import train as train
    from txl_jax.model.memory import Cache as Cache
    from txl_jax.model.memory import Memory as Memory
    from txl_jax.model.relative_attention import relative_attention as relative_attention
    from txl_jax.model.transformer_xl import TransformerXL as TransformerXL
    from txl_jax.training.events import Logger as Logger

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
__all__ = [*_MODULES, "convert"]


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
