"""Checksum manifests: the sha256 of every file of a checkpoint, to detect damage later.

    <step>/checksums.json    {"params/_METADATA": "9f86d0…", …}
    <step>/sealed       empty: a manifest was written, and must be there

A manifest is written right after the commit, by a thread that waits for the folder to appear: Orbax
makes it whole under another name and renames it. Where there is none the process died in between,
and the first restore that succeeds writes it. A missing manifest with
``checksums.written`` beside it was deleted.
"""

import contextlib
import hashlib
import json
import os
import threading
import time

from txl_jax.files import json_object

MANIFEST, WRITTEN = "checksums.json", "checksums.written"


class ManifestWriter:
    """Manifests that are being written in threads."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._committed = threading.Event()
        self._error: OSError | None = None

    def write(self, folder: str) -> None:
        """Starts a thread that waits for a checkpoint and writes its manifest."""
        thread = threading.Thread(target=self._write_when_there, args=(folder,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        """Until all are written; to be called when the checkpoint is there, or never will be."""
        self._committed.set()
        for thread in self._threads:
            thread.join()
        self._threads, self._committed = [], threading.Event()

    def error(self) -> OSError | None:
        """What kept a manifest from being written since this was last asked."""
        error, self._error = self._error, None
        return error

    def _write_when_there(self, folder: str) -> None:
        committed = self._committed
        while not os.path.isdir(folder):
            if committed.is_set():
                break
            time.sleep(0.02)
        try:
            write_manifest(folder)
        except FileNotFoundError:
            pass  # removed meanwhile as no longer among the newest or best
        except OSError as error:
            self._error = error


def has_manifest(folder: str) -> bool:
    """Whether a checkpoint has a manifest."""
    return os.path.exists(os.path.join(folder, MANIFEST))


def fault(folder: str) -> str | None:
    """What is wrong with a checkpoint's files, to be read after its name; ``None``: nothing."""
    if not os.path.exists(os.path.join(folder, "meta")):
        return "is incomplete (it has no meta)"
    if not has_manifest(folder):
        if os.path.exists(os.path.join(folder, WRITTEN)):
            return f"has lost its {MANIFEST}, so its files cannot be checked"
        described = os.path.exists(os.path.join(folder, "params", "_METADATA"))
        return None if described else "is incomplete (it has no params/_METADATA)"
    try:
        with open(os.path.join(folder, MANIFEST), "rb") as file:
            expected = json_object(file.read())
    except ValueError:
        expected = {}
    if not expected:
        return f"has a damaged {MANIFEST}"
    found = hashes(folder)
    wrong = sorted(k for k in expected if found.get(k) != expected[k])
    return f"is damaged ({wrong[0]} does not match its hash)" if wrong else None


def hashes(folder: str) -> dict[str, str]:
    """sha256 of every file below a checkpoint's folder, by relative path."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            if name.startswith(MANIFEST) or (name == WRITTEN and root == folder):
                continue
            path = os.path.join(root, name)
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[os.path.relpath(path, folder)] = digest
    return found


def write_missing_manifest(folder: str) -> None:
    """Writes the manifest of a restored checkpoint whose process died before it could.

    A read-only folder is left as it is.

    Another process, such as the one that trains, may be writing the same file.
    """
    if not has_manifest(folder) or not os.path.exists(os.path.join(folder, WRITTEN)):
        with contextlib.suppress(OSError):
            write_manifest(folder)


def write_manifest(folder: str) -> None:
    """Writes the manifest of a checkpoint, if it has none, and then the note that it has one."""
    path = os.path.join(folder, MANIFEST)
    if not os.path.exists(path):
        own = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
        with open(own, "w", encoding="utf-8") as file:
            json.dump(hashes(folder), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(own, path)
    with open(os.path.join(folder, WRITTEN), "w", encoding="utf-8"):
        pass
