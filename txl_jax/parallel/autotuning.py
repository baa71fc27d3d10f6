"""The kernels that XLA's autotuner chose for a program on NVIDIA GPUs, kept with the run.

While XLA compiles, it measures several kernels and chooses one of them. If the cache of compiled
programs is lost, a resumed run compiles again, and another choice would change its rounding. So the
choices are kept with the run.

XLA writes its choices to a folder, whose path is a part of the compiled program's key in the cache.
So the folder is beside the compiled programs and is named after the program, and all runs of one
program share both the folder and the compiled program. The workdir has a copy of the choices:

    workdir/autotuned.json ──▶ compiled/autotuned/PROGRAM/ ──▶ compiler
                           ◀──
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib
from jax.sharding import Mesh

from txl_jax.files import write_json
from txl_jax.parallel import processes
from txl_jax.parallel.compile_cache import cache_folder
from txl_jax.parallel.platforms import platform_of
from txl_jax.paths import path

Choices = dict[str, str]
"""Maps the name of each of XLA's files to its contents, decoded as Latin-1."""
_OPTION = "xla_gpu_per_fusion_autotune_cache_dir"


@contextlib.contextmanager
def kept_choices(
    lowered: jax.stages.Lowered, mesh: Mesh, file: str
) -> Iterator[dict[str, bool | str] | None]:
    """Yields XLA's options for compiling a program with the choices in ``file``, if there are any.

    Afterwards process 0 writes the program's choices to ``file``. Choices made by another version
    or kind of GPU are not read. The options are ``None`` if the devices are not GPUs, or if this
    machine has no folder for compiled programs.
    """
    root = cache_folder() if platform_of(mesh) == "gpu" else None
    if root is None:
        yield None
        return
    made_by = f"jaxlib {jaxlib.__version__}, {mesh.devices.flat[0].device_kind}"
    kept = _read_file(file, made_by)
    folder = _fill(root / "autotuned", (made_by, lowered.as_text()), kept)
    yield {_OPTION: str(folder)}
    chosen = _read_folder(folder)
    if chosen != kept and processes.is_process_zero():
        write_json(file, {"made_by": made_by, "choices": chosen})


def _fill(root: Path, program: tuple[str, ...], kept: Choices) -> Path:
    """Returns the program's folder, with the kept choices in it."""
    folder = root / _digest(*program)
    found = _read_folder(folder)
    if any(found.get(name, text) != text for name, text in kept.items()):
        # The cache was lost, and another run of the program made new choices.
        folder = root / _digest(*program, json.dumps(kept, sort_keys=True))
        found = _read_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in kept.keys() - found:
        (folder / name).write_bytes(kept[name].encode("latin-1"))
    return folder


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _read_folder(folder: Path) -> Choices:
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {file.name: file.read_bytes().decode("latin-1") for file in files if file.is_file()}


def _read_file(file: str, made_by: str) -> Choices:
    """Returns the choices in a file; none if it is absent, damaged or not of ``made_by``."""
    try:
        found = json.loads(path(file).read_text())
        kept = found["choices"] if found["made_by"] == made_by else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}
    return {name: text for name, text in kept.items() if Path(name).name == name}
