"""Records how a result was produced: versions, source revision, devices and date."""

import datetime
import os
import platform
import subprocess
from typing import Any

from txl_jax.library_errors import installed_version

PACKAGES = ("txl_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def provenance() -> dict[str, Any]:
    """Returns how a result was produced, for JSON, without the names of host, user and paths."""
    import jax

    return {
        "versions": {
            "python": platform.python_version(),
            **{name.removesuffix("-checkpoint"): installed_version(name) for name in PACKAGES},
        },
        "revision": revision(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def revision(folder: str) -> str | None:
    """Returns a folder's commit, with ``+dirty`` if a file is changed; ``None`` without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit or not _git(folder, "ls-files", "--", "."):
        return None
    changes = _git(folder, "status", "--porcelain", "--", ".")
    return commit if changes == "" else commit + "+dirty"


def _git(folder: str, *arguments: str) -> str | None:
    command = ["git", "-C", folder, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
