"""What made a result: versions, source revision, devices and date."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from typing import Any

PACKAGES = {
    "txl_jax": "txl_jax",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "flax": "flax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "numpy": "numpy",
}
"""Name in the result, name of the distribution."""


def provenance() -> dict[str, Any]:
    """What a result needs beside it to be understood later, ready for JSON.

    Nothing in it tells whose machine it was: no host, user or path. Starts JAX's backend.

    Returns:
      ``versions``: name to version, ``None`` for what is not installed (``txl_jax`` itself,
      when it runs from its source tree).
      ``revision``: git commit of the source tree, with ``+dirty`` if the package was changed
      after it; ``None`` outside git.
      ``platform``, ``device_kind``, ``device_count``: of JAX, over all processes.
      ``date``: ISO 8601, UTC, to the second.
    """
    import jax

    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(package) for name, package in PACKAGES.items()},
        },
        "revision": revision(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def revision(folder: str) -> str | None:
    """The commit that ``folder`` is at, ``+dirty`` if a file in it is changed or new.

    ``None`` where git does not track the folder, also when it only lies inside a repository
    (a virtual environment in somebody's project), or where there is no git.
    """
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
