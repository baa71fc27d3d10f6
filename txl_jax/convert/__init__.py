"""Converts models of other programs, and exports models of this project.

Example:
  >>> from txl_jax import convert
  >>> shape = {"n_token": 11, "n_layer": 2, "n_head": 2, "d_model": 8, "d_head": 4, "d_inner": 16}
  >>> cfg = convert.config_from_pytorch({**shape, "same_length": True})
  >>> cfg.vocab_size, cfg.same_length
  (11, 'pytorch')
"""

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.checkpoint.loading import load_exported
from txl_jax.checkpoint.saving import export, save
from txl_jax.convert.conversion import Request, to_workdir
from txl_jax.convert.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    params_from_huggingface,
    params_to_huggingface,
)
from txl_jax.convert.ppo_jax import config_from_ppo_jax, params_from_ppo_jax
from txl_jax.convert.pytorch import (
    config_from_pytorch,
    config_to_pytorch,
    params_from_pytorch,
    params_to_pytorch,
)
from txl_jax.convert.tensorflow import config_from_tensorflow, params_from_tensorflow
from txl_jax.convert.writing import save_as

__all__ = [
    "ModelFormatError",
    "Request",
    "config_from_huggingface",
    "config_from_ppo_jax",
    "config_from_pytorch",
    "config_from_tensorflow",
    "config_to_huggingface",
    "config_to_pytorch",
    "export",
    "load_exported",
    "params_from_huggingface",
    "params_from_ppo_jax",
    "params_from_pytorch",
    "params_from_tensorflow",
    "params_to_huggingface",
    "params_to_pytorch",
    "save",
    "save_as",
    "to_workdir",
]
