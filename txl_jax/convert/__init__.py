"""Weights of other programs, in; and this project's own, out and in again.

pytorch.py  tensorflow.py  huggingface.py   tensors of one program to parameters
files.py  vocabulary.py                     tensors and symbols out of files
conversion.py  exported.py  __main__.py     whole models, and the command
"""

from txl_jax.convert.conversion import Request, to_workdir
from txl_jax.convert.errors import ConvertError
from txl_jax.convert.exported import export, load_exported, save
from txl_jax.convert.huggingface import config_from_huggingface, params_from_huggingface
from txl_jax.convert.pytorch import config_from_pytorch, params_from_pytorch
from txl_jax.convert.tensorflow import config_from_tensorflow, params_from_tensorflow

__all__ = [
    "ConvertError",
    "Request",
    "config_from_huggingface",
    "config_from_pytorch",
    "config_from_tensorflow",
    "export",
    "load_exported",
    "params_from_huggingface",
    "params_from_pytorch",
    "params_from_tensorflow",
    "save",
    "to_workdir",
]
