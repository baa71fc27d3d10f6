"""A foreign state being read: every tensor once, with its shape, and all that is wrong at once."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from txl_jax.config import TransformerXLConfig
from txl_jax.convert.errors import ConvertError
from txl_jax.model.adaptive import Cluster, clusters


class Tensors:
    """Arrays by their foreign names; remembers which were taken and what was wrong with them.

    Args:
      state: name to array.
    """

    def __init__(self, state: Mapping[str, np.ndarray]):
        self.left = dict(state)
        self.problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def take(self, name: str, *shapes: tuple[int, ...]) -> np.ndarray:
        """The tensor as float32 in the first of ``shapes``, the others are as good.

        Zeros in its place where there is a problem with it.
        """
        if name not in self.left:
            self.problems.append(f"{name} {list(shapes[0])} is missing")
            return np.zeros(shapes[0], np.float32)
        tensor = np.asarray(self.left.pop(name))
        if tensor.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            self.problems.append(f"{name} is {list(tensor.shape)}, expected {expected}")
            return np.zeros(shapes[0], np.float32)
        return tensor.astype(np.float32).reshape(shapes[0])

    def alias(self, name: str, of: str, tensor: np.ndarray, why: str) -> None:
        """Takes another name of the tensor ``of``; it may be absent, but must not differ."""
        if name in self.left and not np.array_equal(self.take(name, tensor.shape), tensor):
            self.problems.append(f"{name} differs from {of}, and {why}")

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises ConvertError with all problems, tensors that nothing took among them."""
        extra = [name for name in self.left if name not in ignored]
        problems = self.problems + [f"{name} is not known" for name in extra]
        if problems:
            raise ConvertError("the state does not fit the configuration: " + "; ".join(problems))


def vocab_size(c: TransformerXLConfig) -> int:
    """V; ConvertError where the configuration leaves it open."""
    if c.vocab_size is None:
        raise ConvertError("cfg.vocab_size is None: a model of the original has a vocabulary")
    return c.vocab_size


def refuse_our_own(c: TransformerXLConfig) -> None:
    """Raises ConvertError for a model with parameters that no other code base has."""
    for key, value in (("mixtures", c.mixtures), ("past_decode", c.past_decode)):
        if value != getattr(TransformerXLConfig, key):
            raise ConvertError(
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
    """Raises ConvertError, naming argument, value and what is supported, where it is not."""
    if value not in supported:
        raise ConvertError(
            f"{argument} = {value!r} is not supported; supported: {listed(supported)}"
        )


def required(args: Mapping[str, object], names: Iterable[str], of: str) -> None:
    """Raises ConvertError where one of the names is not among the arguments ``of`` something."""
    missing = [name for name in names if name not in args]
    if missing:
        raise ConvertError(f"{of} are missing: {listed(missing)}")


def listed(names: Iterable) -> str:
    """Names in quotes, with commas between."""
    return ", ".join(repr(name) for name in names)
