"""Defines every setting of an experiment, and checks all settings before any work starts.

A file in ``configs/`` returns an ``ml_collections.ConfigDict`` with the settings that differ from
the defaults in this package. :func:`load_config` applies these settings and any overrides to the
defaults, and returns a frozen, checked :class:`ExperimentConfig`. Checks that need the text, the
devices or a trained model are made later, in the modules that read them.
"""

from txl_jax.config.analysis import ANALYSES as ANALYSES
from txl_jax.config.analysis import AblationConfig as AblationConfig
from txl_jax.config.analysis import AttentionMapsConfig as AttentionMapsConfig
from txl_jax.config.analysis import ContextConfig as ContextConfig
from txl_jax.config.analysis import ProbeConfig as ProbeConfig
from txl_jax.config.analysis import ReclConfig as ReclConfig
from txl_jax.config.analysis import ReportConfig as ReportConfig
from txl_jax.config.analysis import ScoreConfig as ScoreConfig
from txl_jax.config.analysis import SpeedConfig as SpeedConfig
from txl_jax.config.analysis import SweepConfig as SweepConfig
from txl_jax.config.changes import FREE_TO_CHANGE as FREE_TO_CHANGE
from txl_jax.config.changes import differing_keys as differing_keys
from txl_jax.config.changes import override as override
from txl_jax.config.changes import with_absolute_paths as with_absolute_paths
from txl_jax.config.data import DataConfig as DataConfig
from txl_jax.config.data import ProbeTextConfig as ProbeTextConfig
from txl_jax.config.errors import ConfigError as ConfigError
from txl_jax.config.evaluation import DynamicConfig as DynamicConfig
from txl_jax.config.evaluation import ProtocolConfig as ProtocolConfig
from txl_jax.config.experiment import ExperimentConfig as ExperimentConfig
from txl_jax.config.experiment import describe_settings as describe_settings
from txl_jax.config.experiment import format_settings as format_settings
from txl_jax.config.export import ExportConfig as ExportConfig
from txl_jax.config.generation import GenerateConfig as GenerateConfig
from txl_jax.config.loading import config_rows as config_rows
from txl_jax.config.loading import load_config as load_config
from txl_jax.config.model import AttentionForm as AttentionForm
from txl_jax.config.model import TransformerXLConfig as TransformerXLConfig
from txl_jax.config.model import Window as Window
from txl_jax.config.nested import flatten as flatten
from txl_jax.config.training import AverageConfig as AverageConfig
from txl_jax.config.training import CheckpointConfig as CheckpointConfig
from txl_jax.config.training import DistilConfig as DistilConfig
from txl_jax.config.training import LossConfig as LossConfig
from txl_jax.config.training import MeshConfig as MeshConfig
from txl_jax.config.training import OptimizerConfig as OptimizerConfig
from txl_jax.config.training import TrainConfig as TrainConfig
