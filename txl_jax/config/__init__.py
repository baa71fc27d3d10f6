"""Every setting of an experiment, checked before any work.

A file in ``configs/`` returns a sparse ``ml_collections.ConfigDict`` that names only what
differs from the defaults in the modules here. :func:`load_config` lays it and any overrides over
the defaults and gives a frozen, checked :class:`ExperimentConfig`. Checks that need more than the
settings (the text, the devices, a trained model) are made where that is read.
"""

from txl_jax.config.analysis import (
    AblationConfig,
    AttentionMapsConfig,
    ContextConfig,
    ProbeConfig,
    ReclConfig,
    ReportConfig,
    ScoreConfig,
    SpeedConfig,
)
from txl_jax.config.data import DataConfig
from txl_jax.config.fields import ConfigError, without_paths
from txl_jax.config.model import AttentionForm, TransformerXLConfig, Window
from txl_jax.config.probe_text import ProbeTextConfig
from txl_jax.config.reading import FREE_TO_CHANGE, differing_keys, load_config, of_record, override
from txl_jax.config.settings import (
    DynamicConfig,
    ExperimentConfig,
    GenerateConfig,
    ProtocolConfig,
)
from txl_jax.config.training import (
    AverageConfig,
    CheckpointConfig,
    DistilConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
    longest_segment,
)

__all__ = [
    "FREE_TO_CHANGE",
    "AblationConfig",
    "AttentionForm",
    "AttentionMapsConfig",
    "AverageConfig",
    "CheckpointConfig",
    "ConfigError",
    "ContextConfig",
    "DataConfig",
    "DistilConfig",
    "DynamicConfig",
    "ExperimentConfig",
    "GenerateConfig",
    "LossConfig",
    "MeshConfig",
    "OptimizerConfig",
    "ProbeConfig",
    "ProbeTextConfig",
    "ProtocolConfig",
    "ReclConfig",
    "ReportConfig",
    "ScoreConfig",
    "SpeedConfig",
    "TrainConfig",
    "TransformerXLConfig",
    "Window",
    "differing_keys",
    "load_config",
    "longest_segment",
    "of_record",
    "override",
    "without_paths",
]
