"""The size of the vocabulary, from the settings, or else from the user's own text."""

import dataclasses

from txl_jax.config import DataConfig, ExperimentConfig
from txl_jax.data.corpus import corpus_from_config
from txl_jax.messages import argument
from txl_jax.planning.machines import PlanningError

SIZES = {"enwik8": 204, "text8": 27, "ptb": 10_000}
SIZES |= {"wt103": 267_735, "wt2": 33_278, "lm1b": 793_471}
"""The number of symbols of each published corpus with default settings. The number for enwik8 does
not include the newline, and the numbers of words include ``<eos>``."""


def with_vocab_size(exp: ExperimentConfig) -> ExperimentConfig:
    """Returns the experiment with ``model.vocab_size`` set; raises PlanningError if it is unknown.

    If the size depends on the user's own text, this text is read as in training.
    """
    size = exp.model.vocab_size or known_vocab_size(exp.data)
    if size is None and exp.data.path is not None:
        size = len(corpus_from_config(exp.data).vocab)
    if size is None:
        raise PlanningError(
            f"the size of the vocabulary of data.name={exp.data.name!r} is known only from the"
            f" text: give {argument('config.data.path', 'FILE')}, or the size,"
            f" {argument('config.model.vocab_size', 'N')}"
        )
    return dataclasses.replace(exp, model=dataclasses.replace(exp.model, vocab_size=size))


def known_vocab_size(data: DataConfig) -> int | None:
    """Returns the number of symbols of an unread corpus; ``None`` if it depends on the text."""
    if data.name == "enwik8" and data.protocol == "bytes":
        return SIZES["enwik8"] + 1  # the newline
    if data.name == "probe":
        return data.probe.symbols + data.probe.noise + 2  # two markers
    if data.name == "tokens":
        return data.vocab_size
    if data.name in ("text", "stdlib"):
        return 256 if has_bytes(data) else None
    return SIZES[data.name] if data.vocab in (None, "word") else None


def has_bytes(data: DataConfig) -> bool:
    """Tells whether the settings of a text make each byte a token."""
    tokens = data.vocab or data.tokenizer or "byte"
    return data.name in ("text", "stdlib") and tokens == "byte"
