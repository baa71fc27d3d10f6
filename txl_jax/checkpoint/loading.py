"""A trained model by name: from a workdir, from a folder of plain files, from the Hugging Face Hub.

What is passed on is what ``python -m txl_jax.convert --export`` writes: safetensors and JSON.
"""

import os
import re

from txl_jax.checkpoint.exported import load_exported
from txl_jax.checkpoint.hub import fetched
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir import load_workdir
from txl_jax.checkpoint.workdir_files import is_exported

_REPOSITORY = re.compile(r"(hub:)?([\w.-]+/[\w.-]+)(@([\w./-]+))?")
"""``owner/name``, ``hub:owner/name``, and ``@revision`` after it."""


def load(source: str, step: str = "best", weights: str | None = None) -> TrainedModel:
    """A trained model: ``.model``, ``.params``, ``.vocab``, ``.config``, ``.step``.

        trained = txl_jax.load("runs/quickstart")           # a workdir
        trained = txl_jax.load("exported/")                 # what save() or --export wrote
        trained = txl_jax.load("owner/name@main")           # the Hub; needs txl_jax[hub]

    Example:
      >>> import txl_jax
      >>> trained = txl_jax.load("runs/quickstart")
      >>> tokens = trained.vocab.encode("class ")
      >>> trained.vocab.decode(tokens)
      'class '
      >>> mems = trained.model.init_mems(batch_size=1, mem_len=32)
      >>> logits, mems = trained.model.apply({"params": trained.params}, tokens[None], mems)
      >>> logits.shape == (1, 6, len(trained.vocab))
      True

    Args:
      source: an existing folder, or a repository of the Hub; ``hub:`` before it leaves no doubt.
      step: of a workdir: ``best`` by validation, ``latest``, or a number.
      weights: of a workdir: ``raw``, ``swa`` or ``ema``; ``None``: as training chose.

    Raises:
      WorkdirError: it is neither, it holds both, or it cannot be fetched.
      CheckpointError, ModelFormatError: what is there is damaged or incomplete.
    """
    if os.path.isdir(source):
        if is_exported(source):
            return load_exported(source)
        return load_workdir(source, step, weights)
    match = _REPOSITORY.fullmatch(source)
    if match and (match[1] or not source.startswith(("runs/", "./", "../"))):
        return load_exported(fetched(match[2], match[4]))
    return load_workdir(source, step, weights)  # which says what is missing
