"""Checksum manifests: the sha256 of every file of a checkpoint, to detect damage later.

    <step>/checksums.json      {"params/_METADATA": "9f86d0…", …}
    <step>/checksums.written   empty: a manifest was written, and must exist

Orbax and its array format do not notice every changed or missing file, so this is own code. A
thread waits until Orbax has committed the checkpoint (renamed its folder), then writes the
manifest. If the process dies between these two, the first restore that succeeds writes it. If only
``checksums.written`` exists, the manifest was deleted.
"""

import contextlib
import hashlib
import json
import os
import threading
import time

from txl_jax.files import parse_json_object

MANIFEST, WRITTEN = "checksums.json", "checksums.written"


class ManifestWriter:
    """Writes manifests in threads."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._saves_ended = threading.Event()
        self._error: OSError | None = None

    def write(self, folder: str) -> None:
        """Starts a thread that waits for a checkpoint and writes its manifest."""
        arguments = (folder, self._saves_ended)
        thread = threading.Thread(target=self._write_once_committed, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        """Waits for all threads; call it once every save has been committed or has failed."""
        self._saves_ended.set()
        for thread in self._threads:
            thread.join()
        self._threads, self._saves_ended = [], threading.Event()

    def take_error(self) -> OSError | None:
        """The error of a manifest since the last call, if there was one."""
        error, self._error = self._error, None
        return error

    def _write_once_committed(self, folder: str, saves_ended: threading.Event) -> None:
        while not os.path.isdir(folder) and not saves_ended.is_set():
            time.sleep(0.02)
        try:
            write_manifest(folder)
        except FileNotFoundError:
            pass  # the save failed, or retention has already removed this checkpoint
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
            expected = parse_json_object(file.read())
    except ValueError:
        expected = {}
    if not expected:
        return f"has a damaged {MANIFEST}"
    found = file_hashes(folder)
    wrong = sorted(name for name in expected if found.get(name) != expected[name])
    return f"is damaged ({wrong[0]} does not match its checksum)" if wrong else None


def file_hashes(folder: str) -> dict[str, str]:
    """The sha256 of every file below a checkpoint's folder, by relative path."""
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
    """Writes the manifest of a restored checkpoint that has none; ignores a read-only folder."""
    if not has_manifest(folder) or not os.path.exists(os.path.join(folder, WRITTEN)):
        with contextlib.suppress(OSError):
            write_manifest(folder)


def write_manifest(folder: str) -> None:
    """Writes the manifest of a checkpoint unless it has one, then the file that says so.

    Another process, such as the one that trains, may write the same manifest at this moment.
    """
    path = os.path.join(folder, MANIFEST)
    if not os.path.exists(path):
        temporary = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(file_hashes(folder), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    with open(os.path.join(folder, WRITTEN), "w", encoding="utf-8"):
        pass
