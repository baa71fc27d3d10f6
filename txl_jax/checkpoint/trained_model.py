"""A trained model, whole, and the shapes of its parameters."""

import dataclasses
from typing import Any

import jax

from txl_jax.checkpoint.checkpoints import RAW
from txl_jax.config import ExperimentConfig, TransformerXLConfig
from txl_jax.data.vocab import Vocab
from txl_jax.model.transformer_xl import TransformerXL


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model, whole.

    Example:
      >>> import txl_jax
      >>> trained = txl_jax.load("runs/quickstart")
      >>> trained.vocab.kind, trained.config.model == trained.model.cfg
      ('byte', True)
      >>> trained.step, trained.weights, trained.config.name
      (0, 'raw', 'quickstart')

    Attributes:
      model: the module.
      params: its parameters; ``model.apply({"params": params}, ...)``.
      vocab: text to ids and back.
      config: of the experiment.
      step: of the checkpoint.
      weights: which of its parameters, ``raw`` or a mean of them (training/average.py).
      others: names of what else the checkpoint has.
    """

    model: TransformerXL
    params: Any
    vocab: Vocab
    config: ExperimentConfig
    step: int
    weights: str = RAW
    others: tuple[str, ...] = ()


def parameter_count(params: Any) -> int:
    """How many numbers the parameters are."""
    return sum(x.size for x in jax.tree.leaves(params))


def param_shapes(c: TransformerXLConfig) -> Any:
    """Shape and dtype of every parameter of ``TransformerXL(c)``; nothing is computed."""
    model = TransformerXL(c)
    # some windows need a memory, some forms must not have one
    mems = model.init_mems(batch_size=1, mem_len=0 if c.memory_free else 1)
    tokens = jax.ShapeDtypeStruct((1, 1), "int32")
    return jax.eval_shape(model.init, jax.random.key(0), tokens, mems)["params"]
