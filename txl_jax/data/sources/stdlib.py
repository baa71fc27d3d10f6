"""Finds ``stdlib``, the source code of the running Python's standard library."""

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path

from txl_jax.data.errors import DataError
from txl_jax.data.sources.source import SPLITS, ByteRange, Source

LEFT_OUT = {
    *("encodings", "pydoc_data"),
    *("antigravity", "this"),
    *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo", "venv"),
}
"""Modules that are left out: tables (a fifth of the corpus), jokes, and modules that some systems
package separately. So the same version of Python has the same corpus on every system."""


def find() -> Source:
    """Finds the corpus of the running Python.

    The corpus has those ``*.py`` files of the standard library that :func:`is_taken` accepts,
    sorted by path, with a line feed between files. The hash of a file's path decides its split.
    The train split has 6.6 MB, and valid and test have 0.5 MB each. Raises DataError if there are
    no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "os.py").is_file():
        fix = "use another Python, or data.name='text' with a data.path"
        raise DataError(f"stdlib: there is no source code in {root} (zipped or stripped?); {fix}")
    found: list[Path] = []
    for module in sys.stdlib_module_names:
        found += [root / f"{module}.py", *(root / module).rglob("*.py")]
    paths = sorted(path.relative_to(root).as_posix() for path in found if path.is_file())
    files = {path: root / path for path in paths if is_taken(path)}
    texts: dict[str, list[ByteRange | bytes]] = {split: [] for split in SPLITS}
    for path, file in files.items():
        texts[split_of(path)] += [b"\n", ByteRange.whole(file)]
    splits = {split: text[1:] for split, text in texts.items()}
    label = f"Python {platform.python_version()} standard library"
    return Source("stdlib", files, splits, counted=SPLITS, label=label)


def is_taken(path: str) -> bool:
    """Whether the corpus has the file ``path`` (a POSIX path below the library's folder)."""
    *folders, file = path.split("/")
    module = folders[0] if folders else file.removesuffix(".py")
    return (
        module in sys.stdlib_module_names
        and module not in LEFT_OUT
        and not module.startswith("_sysconfigdata")
        and not {"test", "tests"}.intersection(folders)
    )


def split_of(path: str) -> str:
    """Returns the split of the file ``path`` (a POSIX path below the library's folder)."""
    bucket = hashlib.sha256(path.encode()).digest()[0] % 20
    return {0: "test", 1: "valid"}.get(bucket, "train")
