"""How many symbols a text has, where that is known without the text."""

import dataclasses

from txl_jax.config import DataConfig, ExperimentConfig
from txl_jax.planning.topology import PlanningError

SIZES = {
    "enwik8": 204,
    "text8": 27,
    "wt103": 267_735,
    "wt2": 33_278,
    "lm1b": 793_471,
    "ptb": 10_000,
}
"""Symbols of the published corpora as their configs have them by default: enwik8 without newline
bytes, words with ``<eos>``."""


def with_known_size(exp: ExperimentConfig) -> ExperimentConfig:
    """The experiment with ``model.vocab_size``, its own or that of its published corpus.

    Raises:
      PlanningError: neither is known.
    """
    if exp.model.vocab_size is not None:
        return exp
    size = size_of(exp.data)
    if size is None:
        raise PlanningError(
            f"the size of the vocabulary of data.name={exp.data.name!r} is known only with the"
            " text; name one: --config.model.vocab_size=N"
        )
    return dataclasses.replace(exp, model=dataclasses.replace(exp.model, vocab_size=size))


def size_of(data: DataConfig) -> int | None:
    """Symbols of a corpus that is not at hand; ``None``: only the text can tell."""
    if data.name == "enwik8" and data.protocol == "bytes":
        return SIZES["enwik8"] + 1  # the newline
    if data.name == "probe":
        return data.probe.symbols + data.probe.noise + 2  # two markers
    if data.name in ("text", "stdlib"):
        return 256 if data.vocab in (None, "byte") else None
    return SIZES[data.name] if data.vocab in (None, "word") else None
