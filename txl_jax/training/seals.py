"""Seals: the sha256 of every file of a checkpoint, which tell later whether it is as it was.

    <step>/seal.json    {"params/_METADATA": "9f86d0…", …}
    <step>/sealed       empty: a seal was written, and must be there

A seal is written right after the commit, by a thread that waits for the folder to appear: Orbax
makes it whole under another name and renames it. Where there is none the process died in between,
and the first restore that succeeds writes it. Without ``sealed`` beside it, a missing seal would be
taken for such a one when it was deleted.
"""

import contextlib
import hashlib
import json
import os
import threading
import time

from txl_jax.files import json_object

SEAL, SEALED = "seal.json", "sealed"


class Seals:
    """Seals that are being written."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._committed = threading.Event()
        self._error: OSError | None = None

    def write(self, folder: str) -> None:
        """Starts a thread that seals a checkpoint as soon as its folder is there."""
        thread = threading.Thread(target=self._seal_when_there, args=(folder,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        """Until all are written; to be called when what is sealed is there, or never will be."""
        self._committed.set()
        for thread in self._threads:
            thread.join()
        self._threads, self._committed = [], threading.Event()

    def error(self) -> OSError | None:
        """What kept a seal from being written since this was last asked."""
        error, self._error = self._error, None
        return error

    def _seal_when_there(self, folder: str) -> None:
        committed = self._committed
        while not os.path.isdir(folder):
            if committed.is_set():
                break
            time.sleep(0.02)
        try:
            write_seal(folder)
        except FileNotFoundError:
            pass  # removed meanwhile as no longer among the newest or best
        except OSError as error:
            self._error = error


def sealed(folder: str) -> bool:
    """Whether a checkpoint has a seal."""
    return os.path.exists(os.path.join(folder, SEAL))


def fault(folder: str) -> str | None:
    """What is wrong with a checkpoint's files, to be read after its name; ``None``: nothing."""
    if not os.path.exists(os.path.join(folder, "meta")):
        return "is incomplete (it has no meta)"
    if not sealed(folder):
        if os.path.exists(os.path.join(folder, SEALED)):
            return f"has lost its {SEAL}, so its files cannot be checked"
        described = os.path.exists(os.path.join(folder, "params", "_METADATA"))
        return None if described else "is incomplete (it has no params/_METADATA)"
    try:
        with open(os.path.join(folder, SEAL), "rb") as file:
            expected = json_object(file.read())
    except ValueError:
        expected = {}
    if not expected:
        return f"has a damaged {SEAL}"
    found = hashes(folder)
    wrong = sorted(k for k in expected if found.get(k) != expected[k])
    return f"is damaged ({wrong[0]} does not match its hash)" if wrong else None


def hashes(folder: str) -> dict[str, str]:
    """sha256 of every file below a checkpoint's folder, by relative path."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            if name.startswith(SEAL) or (name == SEALED and root == folder):
                continue
            path = os.path.join(root, name)
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[os.path.relpath(path, folder)] = digest
    return found


def seal_if_missing(folder: str) -> None:
    """Seals a checkpoint that was restored, if its process died before; not where it is read-only.

    Another process, such as the one that trains, may be writing the same seal.
    """
    if not sealed(folder) or not os.path.exists(os.path.join(folder, SEALED)):
        with contextlib.suppress(OSError):
            write_seal(folder)


def write_seal(folder: str) -> None:
    """Writes the seal of a checkpoint, if it has none, and then the note that it has one."""
    path = os.path.join(folder, SEAL)
    if not os.path.exists(path):
        own = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
        with open(own, "w", encoding="utf-8") as file:
            json.dump(hashes(folder), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(own, path)
    with open(os.path.join(folder, SEALED), "w", encoding="utf-8"):
        pass
