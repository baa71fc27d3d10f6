"""Compiled programs kept from one start to the next, so that a resumed run soon goes on."""

import hashlib
import os
import platform
import re
from pathlib import Path

import jax


def keep_compiled_programs() -> None:
    """Has JAX keep what takes over a second to compile, unless it keeps it somewhere already.

    In ``compiled`` of the folder where prepared corpora live, ``$TXL_DATA_DIR`` or
    ``~/.cache/txl_jax``. ``JAX_COMPILATION_CACHE_DIR`` names another one, and
    ``JAX_ENABLE_COMPILATION_CACHE=false`` keeps none. A folder that cannot be written costs a
    warning of JAX's, not the run.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(_folder()))


def _folder() -> Path:
    data = Path(os.environ.get("TXL_DATA_DIR") or "~/.cache/txl_jax").expanduser().absolute()
    return data / "compiled" / _machine()


def _machine() -> str:
    """A name for processors that run the same programs: JAX's own key does not tell them apart."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = platform.processor()
    able = re.search(r"^(flags|Features)\s*:.*$", text, re.MULTILINE)
    digest = hashlib.sha256((able.group() if able else text).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:8]}"
