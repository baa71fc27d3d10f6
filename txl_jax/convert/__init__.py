"""Weights of other programs, in: one file per program they come from."""

from txl_jax.convert.pytorch import config_from_pytorch, params_from_pytorch

__all__ = ["config_from_pytorch", "params_from_pytorch"]
