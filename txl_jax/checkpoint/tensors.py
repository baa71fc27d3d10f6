"""A stored state being read: every tensor once, with its shape, and all that is wrong at once."""

import os
from collections.abc import Iterable, Mapping

import numpy as np

from txl_jax.checkpoint.errors import ModelFormatError


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
        """Raises ModelFormatError with all problems, tensors that nothing took among them."""
        extra = [name for name in self.left if name not in ignored]
        problems = self.problems + [f"{name} is not known" for name in extra]
        if problems:
            raise ModelFormatError(
                "the state does not fit the configuration: " + "; ".join(problems)
            )


def read_safetensors(path: str) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file by name; raises ModelFormatError where there are none."""
    from safetensors import SafetensorError  # here, so that models run where it is not installed
    from safetensors.numpy import load_file

    if not os.path.isfile(path):
        raise ModelFormatError(f"{path}: there is no such file")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelFormatError(f"{path}: is not a whole safetensors file ({error})") from error
