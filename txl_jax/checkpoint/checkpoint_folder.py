"""The ``checkpoints/`` folder on disk: its steps, their metadata and faults, and what is moved.

Process 0 does the work of every method of :class:`CheckpointFolder`, and all processes get its
result. So all processes must call them together.
"""

import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from txl_jax.checkpoint import checksums
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.checkpoint.orbax_store import METRIC
from txl_jax.files import parse_json_object
from txl_jax.messages import truncate
from txl_jax.parallel import processes

P = ParamSpec("P")
T = TypeVar("T")

_TEMPORARY = re.compile(r"\d+\.orbax-checkpoint-tmp(-\d+)?")
"""A checkpoint that Orbax has not committed."""
_REPLACED = re.compile(r"replaced-(\d+)")
"""A checkpoint that was moved because a new one of the same step replaces it."""


def list_steps(folder: str) -> list[int]:
    """The steps with a committed checkpoint, oldest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def remove_temporary(folder: str) -> None:
    """Removes what a failed save, or one whose process died, has left.

    Orbax's ``cleanup_tmp_directories`` does so only when a manager opens; after a failed save on a
    full disk the space is needed at once.
    """
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if _TEMPORARY.fullmatch(name):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def finish_replacing(folder: str) -> None:
    """Removes replaced checkpoints, or puts one back if its replacement was not committed."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    for match in filter(None, map(_REPLACED.fullmatch, names)):
        replaced = os.path.join(folder, match[0])
        if match[1] in names:
            shutil.rmtree(replaced)
        else:
            os.rename(replaced, os.path.join(folder, match[1]))


def _on_process_zero(method: Callable[P, T]) -> Callable[P, T]:
    """Has process 0 call a method and gives its result to all processes."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return processes.on_process_zero(lambda: method(*args, **kwargs))

    return call


class CheckpointFolder:
    """The files of the checkpoints of one workdir."""

    def __init__(self, workdir: str):
        self.path = os.path.abspath(os.path.join(workdir, "checkpoints"))

    def step_path(self, step: int) -> str:
        """The folder of one checkpoint; only this method asks no other process."""
        return os.path.join(self.path, str(step))

    @_on_process_zero
    def clean(self) -> None:
        """Finishes what a process that died here has left: replacements and half-written saves."""
        finish_replacing(self.path)
        remove_temporary(self.path)

    @_on_process_zero
    def steps(self) -> list[int]:
        """The steps with a committed checkpoint, oldest first."""
        return list_steps(self.path)

    @_on_process_zero
    def choose(self, which: str) -> int:
        """The step that ``best`` (by validation), ``latest`` or a number names.

        Raises:
          CheckpointError: there is no such checkpoint.
        """
        steps = list_steps(self.path)
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.path}; train first")
        if which == "latest":
            return steps[-1]
        if which == "best":
            losses = {step: self.valid_loss(step) for step in steps}
            measured = {step: loss for step, loss in losses.items() if loss is not None}
            return min(measured, key=lambda step: measured[step]) if measured else steps[-1]
        named = {str(step): step for step in steps}
        if which not in named:
            raise CheckpointError(
                f"there is no checkpoint {truncate(which)} in {self.path}, only {', '.join(named)}"
            )
        return named[which]

    def valid_loss(self, step: int) -> float | None:
        """The validation loss in nats that was saved with a step; ``None``: not measured.

        Orbax's ``best_step`` would raise where this file is damaged.
        """
        try:
            path = os.path.join(self.step_path(step), "metrics", "metrics")
            with open(path, encoding="utf-8") as file:
                value = float(json.load(file)[METRIC])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return value if value != float("inf") else None

    @_on_process_zero
    def meta(self, step: int) -> tuple[dict[str, Any], str | None]:
        """The metadata of a step, and what is wrong with it (``None``: nothing)."""
        path = os.path.join(self.step_path(step), "meta", "metadata")
        try:
            with open(path, "rb") as file:
                meta = parse_json_object(file.read())
        except (OSError, ValueError) as error:
            return {}, f"has no readable meta ({type(error).__name__})"
        if not isinstance(meta.get("config"), dict) or type(meta.get("format", 0)) is not int:
            return {}, "has no readable meta (no config or format)"
        return meta, None

    @_on_process_zero
    def fault(self, step: int) -> str | None:
        """What is wrong with the files of a step, see :func:`checksums.fault`."""
        return checksums.fault(self.step_path(step))

    @_on_process_zero
    def has_manifest(self, step: int) -> bool:
        """Whether a step has a checksum manifest."""
        return checksums.has_manifest(self.step_path(step))

    @_on_process_zero
    def write_missing_manifest(self, step: int) -> None:
        """Writes the manifest of a restored step if the process that saved it died before that."""
        checksums.write_missing_manifest(self.step_path(step))

    @_on_process_zero
    def move_aside(self, step: int, fault: str) -> None:
        """Renames a damaged checkpoint to ``damaged-<step>`` and prints why."""
        name, count = f"damaged-{step}", 1
        while os.path.exists(os.path.join(self.path, name)):
            count += 1
            name = f"damaged-{step}-{count}"
        os.rename(self.step_path(step), os.path.join(self.path, name))
        print(
            f"checkpoint {step} {fault}; moved aside to checkpoints/{name}, falling back to the"
            " one before it",
            flush=True,
        )

    @_on_process_zero
    def begin_replacing(self, step: int) -> None:
        """Moves a checkpoint so that a new one of the same step can be saved."""
        os.rename(self.step_path(step), os.path.join(self.path, f"replaced-{step}"))

    @_on_process_zero
    def finish_replacing(self) -> None:
        """Removes the moved checkpoint, or puts it back if the new one was not committed."""
        finish_replacing(self.path)
