"""A trained model with its vocabulary and settings, and the shapes of its parameters."""

import dataclasses
import functools
from typing import Any

import jax

from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.orbax_items import RAW
from txl_jax.config import ExperimentConfig, TransformerXLConfig, differing_keys
from txl_jax.data.vocab import Vocab
from txl_jax.model.transformer_xl import TransformerXL


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model; ``txl_jax.LanguageModel`` documents its attributes."""

    model: TransformerXL
    params: Any
    vocab: Vocab
    config: ExperimentConfig
    step: int
    weights: str = RAW
    others: tuple[str, ...] = ()
    source: str = ""

    def __repr__(self) -> str:
        parameters = f"{parameter_count(self.params):,} {self.weights} parameters"
        about = f"{self.config.name!r}, step {self.step:,}, {parameters}, {self.vocab!r}"
        return f"{type(self).__name__}({about})"


def with_settings(trained: TrainedModel, exp: ExperimentConfig) -> TrainedModel:
    """Returns the model with the settings of ``exp``; raises WorkdirError if the shapes differ.

    The dtype and the precision of the computation can differ, because they change no parameter.
    """
    own = trained.config.model
    vocab_size = own.vocab_size if exp.model.vocab_size is None else exp.model.vocab_size
    model = dataclasses.replace(
        exp.model, scan_layers=own.scan_layers, remat=own.remat, vocab_size=vocab_size
    )
    shape = dataclasses.replace(model, dtype=own.dtype, matmul_precision=own.matmul_precision)
    different = differing_keys(*({"model": dataclasses.asdict(c)} for c in (own, shape)))
    if different:
        keys = "; ".join(different)
        fix = "leave these keys out, or name another workdir"
        raise WorkdirError(f"the model of the workdir has another shape: {keys}; {fix}")
    config = dataclasses.replace(exp, model=model)
    return dataclasses.replace(trained, model=TransformerXL(model), config=config)


def parameter_count(params: Any) -> int:
    """The number of scalars in the parameters."""
    return sum(x.size for x in jax.tree.leaves(params))


@functools.lru_cache(maxsize=8)
def param_shapes(c: TransformerXLConfig) -> Any:
    """Returns shape and dtype of every parameter of ``TransformerXL(c)``; computes no values."""
    c = dataclasses.replace(c, kernel="xla")  # ``c.kernel`` may need the devices of a mesh
    model = TransformerXL(c)  # some windows need a memory, and models without memory refuse one
    mems = model.init_mems(batch_size=1, mem_len=0 if c.memory_free else 1)
    tokens = jax.ShapeDtypeStruct((1, 1), "int32")
    return jax.eval_shape(model.init, jax.random.key(0), tokens, mems)["params"]


def memory_shapes(c: TransformerXLConfig, rows: int, mem_len: int) -> Any:
    """Returns the shapes and dtypes of a memory; a model without memory has the length 0."""
    return jax.eval_shape(lambda: TransformerXL(c).init_mems(rows, 0 if c.memory_free else mem_len))
