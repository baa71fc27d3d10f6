"""Defines every setting of an experiment, and checks all settings before any work starts.

A file in ``configs/`` returns an ``ml_collections.ConfigDict`` with the settings that differ from
the defaults in this package. :func:`load_config` applies these settings and any overrides to the
defaults, and returns a frozen, checked :class:`ExperimentConfig`. Checks that need the text, the
devices or a trained model are made later, in the modules that read them.
"""

from txl_jax.config.analysis import (
    ANALYSES,
    AblationConfig,
    AttentionMapsConfig,
    ContextConfig,
    ProbeConfig,
    ReclConfig,
    ReportConfig,
    ScoreConfig,
    SpeedConfig,
    SweepConfig,
)
from txl_jax.config.changes import (
    FREE_TO_CHANGE,
    differing_keys,
    override,
    with_absolute_paths,
)
from txl_jax.config.data import DataConfig, ProbeTextConfig
from txl_jax.config.errors import ConfigError
from txl_jax.config.evaluation import DynamicConfig, ProtocolConfig
from txl_jax.config.experiment import ExperimentConfig, describe_settings, format_settings
from txl_jax.config.export import ExportConfig
from txl_jax.config.generation import GenerateConfig
from txl_jax.config.loading import config_rows, load_config
from txl_jax.config.model import AttentionForm, TransformerXLConfig, Window
from txl_jax.config.nested import flatten
from txl_jax.config.training import (
    AverageConfig,
    CheckpointConfig,
    DistilConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)

__all__ = [
    "ANALYSES",
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
    "ExportConfig",
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
    "SweepConfig",
    "TrainConfig",
    "TransformerXLConfig",
    "Window",
    "config_rows",
    "describe_settings",
    "differing_keys",
    "flatten",
    "format_settings",
    "load_config",
    "override",
    "with_absolute_paths",
]
