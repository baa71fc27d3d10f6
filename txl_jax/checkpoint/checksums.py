"""Checksum manifests: the sha256 of the files of a checkpoint, to detect damage later.

    <step>/checksums.json      {"params/_METADATA": "9f86d0…", …}

Orbax does not notice every changed or missing file. The manifest is written before Orbax commits
the checkpoint, so every one has it. The two files that Orbax writes then are not needed to restore.
"""

import contextlib
import hashlib
import json
import os

from txl_jax.files import atomic_write, parse_json_object

MANIFEST = "checksums.json"
_WRITTEN_AT_COMMIT = ("_CHECKPOINT_METADATA", "commit_success.txt")


def write_manifest(folder: str) -> None:
    """Writes the manifest of a checkpoint that is complete but not yet committed."""
    atomic_write(os.path.join(folder, MANIFEST), json.dumps(file_hashes(folder)).encode())


def fault(folder: str) -> str | None:
    """What is wrong with a checkpoint's files, to be read after its name; ``None``: nothing."""
    path = os.path.join(folder, MANIFEST)
    expected: dict[str, str] = {}
    if not os.path.exists(path):
        return f"has lost its {MANIFEST}, so its files cannot be checked"
    with contextlib.suppress(ValueError), open(path, "rb") as file:
        expected = parse_json_object(file.read())
    if not expected:
        return f"has a damaged {MANIFEST}"
    found = file_hashes(folder)
    wrong = sorted(name for name in expected if found.get(name) != expected[name])
    return f"is damaged ({wrong[0]} does not match its checksum)" if wrong else None


def file_hashes(folder: str) -> dict[str, str]:
    """The sha256 of every file that a manifest covers, by its path in the checkpoint's folder."""
    found = {}
    for root, _, names in os.walk(folder):
        for path in (os.path.join(root, name) for name in names):
            name = os.path.relpath(path, folder)
            if name not in (MANIFEST, *_WRITTEN_AT_COMMIT):
                with open(path, "rb") as file:
                    found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
