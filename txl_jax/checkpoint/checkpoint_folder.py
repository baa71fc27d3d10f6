"""The ``checkpoints/`` folder on disk: its steps, their metadata and checksums, and their renaming.

Orbax does not notice every changed or missing file, so ``<step>/checksums.json``, the manifest, has
the sha256 of each. The manifest is written before Orbax commits a checkpoint. It does not list the
two files that Orbax writes at the commit, because restoring does not need them.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from typing import Any

from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.checkpoint.workdir_files import CHECKPOINTS
from txl_jax.files import atomic_write, parse_json_object
from txl_jax.messages import truncate
from txl_jax.standard_streams import stdout

TEMPORARY = ".orbax-checkpoint-tmp"  # follows the step in the name of an uncommitted checkpoint
METRIC = "valid_loss"  # the name of Orbax's metric: validation loss in nats, or infinity
MANIFEST = "checksums.json"
_WRITTEN_AT_COMMIT = ("_CHECKPOINT_METADATA", "commit_success.txt")


class CheckpointFolder:
    """The checkpoint files of a workdir; with many processes, only process 0 uses this class."""

    def __init__(self, workdir: str):
        self.path = os.path.abspath(os.path.join(workdir, CHECKPOINTS))

    def step_path(self, step: int) -> str:
        """The path of the folder of one checkpoint."""
        return os.path.join(self.path, str(step))

    def _names(self) -> list[str]:
        return os.listdir(self.path) if os.path.isdir(self.path) else []

    def steps(self) -> list[int]:
        """Returns the steps that have a committed checkpoint, oldest first."""
        return sorted(int(name) for name in self._names() if name.isascii() and name.isdigit())

    def choose(self, which: str) -> int:
        """Returns the step of ``best``, ``latest`` or a number; raises CheckpointError."""
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.path}; train first")
        if which == "latest":
            return steps[-1]
        if which == "best":
            losses = {step: self.valid_loss(step) for step in steps}
            best = min(steps, key=losses.__getitem__)
            return best if losses[best] < math.inf else steps[-1]
        named = {str(step): step for step in steps}
        if which not in named:
            raise CheckpointError(
                f"there is no checkpoint {truncate(which)} in {self.path}, only {', '.join(named)}"
            )
        return named[which]

    def valid_loss(self, step: int) -> float:
        """Returns the validation loss saved with a step, in nats; infinity if it is unreadable."""
        try:
            path = os.path.join(self.step_path(step), "metrics", "metrics")
            with open(path, encoding="utf-8") as file:
                loss = float(json.load(file)[METRIC])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return math.inf
        return loss if math.isfinite(loss) else math.inf

    def meta(self, step: int) -> tuple[dict[str, Any], str | None]:
        """Returns the metadata of a step, and their fault or ``None``."""
        try:
            with open(os.path.join(self.step_path(step), "meta", "metadata"), "rb") as file:
                meta = parse_json_object(file.read())
        except (OSError, ValueError) as error:
            return {}, f"has no readable meta ({type(error).__name__})"
        if not isinstance(meta.get("config"), dict) or type(meta.get("format")) is not int:
            return {}, "has no readable meta (no config or format)"
        return meta, None

    def fault(self, step: int) -> str | None:
        """Returns the fault of a step's files, to be read after its name, or ``None``."""
        path = os.path.join(self.step_path(step), MANIFEST)
        expected: dict[str, str] = {}
        if not os.path.exists(path):
            return f"has lost its {MANIFEST}, so its files cannot be checked"
        with contextlib.suppress(ValueError), open(path, "rb") as file:
            expected = parse_json_object(file.read())
        if not expected:
            return f"has a damaged {MANIFEST}"
        found = file_hashes(self.step_path(step))
        wrong = sorted(name for name in expected if found.get(name) != expected[name])
        return f"is damaged ({wrong[0]} does not match its checksum)" if wrong else None

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
            file=stdout(),
            flush=True,
        )

    def begin_replacing(self, step: int) -> None:
        """Renames a checkpoint to ``replaced-<step>``, so that its step can be saved again."""
        os.rename(self.step_path(step), os.path.join(self.path, f"replaced-{step}"))

    def finish_replacing(self) -> None:
        """Removes a replaced checkpoint, or restores its name if the new checkpoint is missing."""
        names = self._names()
        for match in filter(None, (re.fullmatch(r"replaced-(\d+)", name) for name in names)):
            replaced = os.path.join(self.path, match[0])
            if match[1] in names:
                shutil.rmtree(replaced)
            else:
                os.rename(replaced, self.step_path(int(match[1])))

    def remove_temporary(self) -> None:
        """Removes the files of a failed save at once, because a full disk needs the space."""
        for name in self._names():
            if re.fullmatch(rf"\d+{re.escape(TEMPORARY)}", name):
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)


def write_manifest(folder: str) -> None:
    """Writes the manifest of a checkpoint that is complete but not yet committed."""
    atomic_write(os.path.join(folder, MANIFEST), json.dumps(file_hashes(folder)).encode())


def file_hashes(folder: str) -> dict[str, str]:
    """Returns the sha256 of every file that a manifest lists, by its path in ``folder``."""
    found = {}
    for root, _, names in os.walk(folder):
        for path in (os.path.join(root, name) for name in names):
            name = os.path.relpath(path, folder)
            if name not in (MANIFEST, *_WRITTEN_AT_COMMIT):
                with open(path, "rb") as file:
                    found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
