"""The cache of compiled programs, which makes a resumed run start quickly."""

import contextlib
import hashlib
import platform
import re
from pathlib import Path

import jax

from txl_jax.config import ConfigError
from txl_jax.config.folders import data_folder
from txl_jax.paths import is_remote
from txl_jax.standard_streams import say

LIMIT = 2 * 2**30
"""The most bytes of compiled programs that the cache keeps."""


def keep_compiled_programs() -> None:
    """Makes JAX cache the programs that take over a second to compile.

    The cache is the folder ``compiled`` of ``$TXL_DATA_DIR`` or ``~/.cache/txl_jax``. Its size is
    first reduced to :data:`LIMIT` bytes, unless ``JAX_COMPILATION_CACHE_MAX_SIZE`` is set. (With
    this variable, jax 0.10.2 stores nothing in a folder that was filled without the variable.)
    ``JAX_COMPILATION_CACHE_DIR`` names another folder. If the folder cannot be used, a warning is
    printed.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        folder = _folder()
    except ConfigError as error:
        say(f"warning: compiled programs are not cached: {error}")
        return
    if jax.config.values["jax_compilation_cache_max_size"] == -1:
        remove_longest_unused(folder, LIMIT)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def remove_longest_unused(folder: Path, limit: int) -> None:
    """Removes the programs of JAX's cache that were unused longest, down to ``limit`` bytes.

    Several processes can do this at once. Many file systems record only the day of the last read.
    """
    with contextlib.suppress(OSError):  # the next start removes the rest
        stats = [(file.stat(), file) for file in folder.glob("*-cache")]
        kept = 0
        for stat, file in sorted(stats, key=lambda x: -max(x[0].st_atime, x[0].st_mtime)):
            kept += stat.st_size
            if kept > limit:
                file.unlink(missing_ok=True)


def cache_folder() -> Path | None:
    """Returns a local folder of compiled programs, where callers keep other files, or ``None``."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder and not is_remote(folder):
        return Path(folder)
    try:
        return _folder()
    except ConfigError:
        return None


def _folder() -> Path:
    """Returns a cache folder for this type of processor, which JAX's cache keys do not include."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = platform.processor()
    features = re.search(r"^(flags|Features)\s*:.*$", text, re.MULTILINE)
    digest = hashlib.sha256((features.group() if features else text).encode()).hexdigest()
    return data_folder() / "compiled" / f"{platform.machine()}-{digest[:8]}"


def compiled_rows(n: int) -> int:
    """Returns how many rows the program for n rows is compiled with; the other rows are padding.

    The result is a power of two up to 8, and a multiple of 8 above. So programs are compiled for
    only a few numbers of rows, and at most 7 rows are padding.
    """
    return 1 << max(n - 1, 0).bit_length() if n <= 8 else -(-n // 8) * 8
