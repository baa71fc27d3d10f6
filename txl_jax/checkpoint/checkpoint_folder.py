"""Lists, checks and renames the checkpoints in the ``checkpoints/`` folder of a workdir.

Orbax does not notice every changed or missing file, so ``<step>/checksums.json``, the manifest, has
the sha256 of every file. The manifest is written before Orbax commits a checkpoint. It does not
list the two files that Orbax writes at the commit, because restoring does not need them.
"""

import contextlib
import hashlib
import json
import math
import os
import re
from typing import Any

from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.checkpoint.workdir_files import CHECKPOINTS
from txl_jax.files import atomic_write, parse_json_object
from txl_jax.literal_path import COMMIT_MARK
from txl_jax.messages import truncate
from txl_jax.paths import absolute, files_in, is_remote, move_folder, names, path, remove_folder

TEMPORARY = ".orbax-checkpoint-tmp"  # the end of a local checkpoint's name until the commit
METRIC = "valid_loss"  # the name of Orbax's metric: validation loss in nats, or infinity
MANIFEST = "checksums.json"
_WRITTEN_AT_COMMIT = ("_CHECKPOINT_METADATA", COMMIT_MARK)


class CheckpointFolder:
    """The checkpoint files of a workdir. With many processes, only process 0 uses this class."""

    def __init__(self, workdir: str):
        self.path = absolute(os.path.join(workdir, CHECKPOINTS))

    def step_path(self, step: int) -> str:
        """The path of the folder of one checkpoint."""
        return os.path.join(self.path, str(step))

    def temporary_path(self, step: int) -> str:
        """The path of a checkpoint's folder before the checkpoint is committed."""
        return self.step_path(step) + ("" if is_remote(self.path) else TEMPORARY)

    def steps(self) -> list[int]:
        """Returns the steps that have a committed checkpoint, oldest first."""
        found = [name for name in names(self.path) if name.isascii() and name.isdigit()]
        return sorted(int(name) for name in found if self._is_committed(name))

    def _is_committed(self, name: str) -> bool:
        """Whether a checkpoint with its final name is complete; on a local disk, it always is."""
        return not is_remote(self.path) or path(self.path, name, COMMIT_MARK).exists()

    def choose(self, which: str) -> int:
        """Returns the step of the checkpoint that ``which`` names: ``best``, ``latest`` or a step.

        ``best`` has the lowest validation loss; if none has a loss, the latest checkpoint is used.
        Raises CheckpointError if there is no such checkpoint.
        """
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
        """Returns the validation loss saved with a step, in nats; infinity if there is none."""
        try:
            metrics = path(self.step_path(step), "metrics", "metrics").read_bytes()
            loss = float(json.loads(metrics)[METRIC])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return math.inf
        return loss if math.isfinite(loss) else math.inf

    def meta(self, step: int) -> tuple[dict[str, Any], str | None]:
        """Returns the metadata of a step, and what is wrong with it or ``None``."""
        try:
            meta = parse_json_object(path(self.step_path(step), "meta", "metadata").read_bytes())
        except (OSError, ValueError) as error:
            return {}, f"has no readable metadata ({type(error).__name__})"
        if not isinstance(meta.get("config"), dict) or type(meta.get("format")) is not int:
            return {}, "has no readable metadata (no config or format)"
        return meta, None

    def fault(self, step: int) -> str | None:
        """Returns what is wrong with a step's files, such as "is damaged (..)", or ``None``."""
        manifest = path(self.step_path(step), MANIFEST)
        expected: dict[str, str] = {}
        if not manifest.exists():
            return f"has no {MANIFEST}, so its files cannot be checked"
        with contextlib.suppress(ValueError):
            expected = parse_json_object(manifest.read_bytes())
        if not expected:
            return f"has a damaged {MANIFEST}"
        found = file_hashes(self.step_path(step))
        wrong = sorted(name for name in expected if found.get(name) != expected[name])
        return f"is damaged ({wrong[0]} does not match its checksum)" if wrong else None

    def move_aside(self, step: int, fault: str) -> None:
        """Renames a damaged checkpoint to ``damaged-<step>`` and prints why."""
        name, count = f"damaged-{step}", 1
        while path(self.path, name).exists():
            count += 1
            name = f"damaged-{step}-{count}"
        move_folder(self.step_path(step), os.path.join(self.path, name))
        print(f"checkpoint {step} {fault}; it was renamed to checkpoints/{name}, and the checkpoint"
              " before it is tried", flush=True)  # fmt: skip

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps."""
        for later in self.steps():
            if later > step:
                remove_folder(self.step_path(later))

    def damaged(self) -> list[str]:
        """Returns the names of the checkpoints that were moved aside, oldest first."""
        found = [name for name in names(self.path) if re.fullmatch(r"damaged-\d+(-\d+)?", name)]
        return sorted(found, key=lambda name: int(name.split("-")[1]))

    def begin_replacing(self, step: int) -> None:
        """Renames a checkpoint to ``replaced-<step>``, so that its step can be saved again."""
        move_folder(self.step_path(step), os.path.join(self.path, f"replaced-{step}"))

    def finish_replacing(self) -> None:
        """Removes a replaced checkpoint, or restores its name if the new checkpoint is missing."""
        steps, found = self.steps(), names(self.path)
        for match in filter(None, (re.fullmatch(r"replaced-(\d+)", name) for name in found)):
            if int(match[1]) in steps:
                path(self.path, match[0]).rmtree()
            elif self._is_committed(match[0]):
                if is_remote(self.path):  # removes the incomplete new checkpoint
                    remove_folder(self.step_path(int(match[1])))
                move_folder(os.path.join(self.path, match[0]), self.step_path(int(match[1])))

    def remove_temporary(self) -> None:
        """Removes the files of a failed save at once, because a full disk needs the space."""
        for name in names(self.path):
            remote = name.isdigit() and not self._is_committed(name)
            if remote or re.fullmatch(rf"\d+{re.escape(TEMPORARY)}", name):
                remove_folder(os.path.join(self.path, name))


def write_manifest(folder: str) -> None:
    """Writes the manifest of a checkpoint that is complete but not yet committed."""
    atomic_write(os.path.join(folder, MANIFEST), json.dumps(file_hashes(folder)).encode())


def file_hashes(folder: str) -> dict[str, str]:
    """Returns the sha256 of every file that a manifest lists, by its path in ``folder``."""
    found = {}
    for name in files_in(folder):
        if name not in (MANIFEST, *_WRITTEN_AT_COMMIT):
            with path(folder, name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
