"""Compiled programs kept from one start to the next, so that a resumed run soon goes on."""

import contextlib
import hashlib
import platform
import re
import sys
from pathlib import Path

import jax

from txl_jax.config import ConfigError
from txl_jax.config.folders import data_folder

LIMIT = 2 * 2**30
"""Bytes of programs that are kept from one start to the next."""


def keep_compiled_programs() -> None:
    """Has JAX keep what takes over a second to compile, unless it keeps it somewhere already.

    In ``compiled`` of the folder where prepared corpora live, ``$TXL_DATA_DIR`` or
    ``~/.cache/txl_jax``. ``JAX_COMPILATION_CACHE_DIR`` names another one, and
    ``JAX_ENABLE_COMPILATION_CACHE=false`` keeps none. A folder that cannot be written costs a
    warning of JAX's, and a home folder that does not exist one of ours, not the run.

    Our own folder is brought below :data:`LIMIT` first. JAX's setting for that,
    ``JAX_COMPILATION_CACHE_MAX_SIZE``, goes before it where it is given; it needs the package
    filelock, and in a folder that was filled without it nothing more is kept (jax 0.10.2).
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        folder = _folder()
    except ConfigError as error:
        print(f"warning: no compiled program is kept: {error}", file=sys.stderr, flush=True)
        return
    if jax.config.values["jax_compilation_cache_max_size"] == -1:
        remove_longest_unused(folder, LIMIT)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def remove_longest_unused(folder: Path, limit: int) -> None:
    """Leaves at most ``limit`` bytes of programs, those that were read or written last.

    Others may do the same at the same time. What is not JAX's stays, as does all of a folder that
    cannot be written. Many disks note no more than the day of a reading.
    """
    found = []
    with contextlib.suppress(OSError):
        for file in folder.glob("*-cache"):
            with contextlib.suppress(OSError):  # gone meanwhile
                about = file.stat()
                found.append((max(about.st_atime, about.st_mtime), about.st_size, file))
    kept = 0
    for _, size, file in sorted(found, reverse=True):
        kept += size
        if kept > limit:
            with contextlib.suppress(OSError):
                file.unlink()


def _folder() -> Path:
    return data_folder() / "compiled" / _machine()


def _machine() -> str:
    """A name for processors that run the same programs: JAX's own key does not tell them apart."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = platform.processor()
    able = re.search(r"^(flags|Features)\s*:.*$", text, re.MULTILINE)
    digest = hashlib.sha256((able.group() if able else text).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:8]}"
