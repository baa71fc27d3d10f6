"""What several formats of other programs share: checks of arguments, clusters and tied tables."""

import dataclasses
from collections.abc import Iterable, Mapping

from txl_jax.checkpoint.errors import ModelFormatError
from txl_jax.config import TransformerXLConfig
from txl_jax.model.adaptive import Cluster, clusters


def vocab_size(c: TransformerXLConfig) -> int:
    """V; ModelFormatError where the configuration leaves it open."""
    if c.vocab_size is None:
        raise ModelFormatError("cfg.vocab_size is None: a model of the original has a vocabulary")
    return c.vocab_size


def refuse_our_own(c: TransformerXLConfig) -> None:
    """Raises ModelFormatError for a model with parameters that no other code base has."""
    for key, value in (("mixtures", c.mixtures), ("past_decode", c.past_decode)):
        if value != getattr(TransformerXLConfig, key):
            raise ModelFormatError(
                f"model.{key} = {value!r}: the other code bases have no such parameters; leave it"
                " at its default"
            )


def parameter_clusters(c: TransformerXLConfig) -> list[tuple[str, Cluster]]:
    """Clusters as parameters are divided: ending of our names, words. One of all words with
    ``div_val`` 1, whatever the cutoffs are."""
    parts = clusters(c)
    if c.div_val > 1:
        return [(f"_{i}", part) for i, part in enumerate(parts)]
    return [("", dataclasses.replace(parts[0], stop=parts[-1].stop))]


def tied(c: TransformerXLConfig, i: int) -> bool:
    """Whether cluster i's output projection is the input's."""
    return i < len(c.tie_projs) and c.tie_projs[i]


def one_of(argument: str, value: object, supported: Iterable) -> None:
    """Raises ModelFormatError, naming argument, value and what is supported, where it is not."""
    if value not in supported:
        raise ModelFormatError(
            f"{argument} = {value!r} is not supported; supported: {listed(supported)}"
        )


def required(args: Mapping[str, object], names: Iterable[str], of: str) -> None:
    """Raises ModelFormatError where a name is not among the arguments ``of`` something."""
    missing = [name for name in names if name not in args]
    if missing:
        raise ModelFormatError(f"{of} are missing: {listed(missing)}")


def listed(names: Iterable) -> str:
    """Names in quotes, with commas between."""
    return ", ".join(repr(name) for name in names)
