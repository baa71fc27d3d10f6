"""Checks the packages and the device of a machine before benchmarks and training on its GPU.

    python -m benchmarks.gpu_image [--out=FILE.json]

Exits with 1 if a package is missing, is not of a version that pyproject.toml allows, or cannot be
imported, or if JAX does not start the platform of ``JAX_PLATFORMS``. The output names each problem.
The packages are checked before any module of txl_jax is imported.
"""

import argparse
import importlib
import importlib.metadata
import json
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
OF_THE_IMAGE = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "etils", "numpy"),
    *("matplotlib", "pytest"),
)
"""Packages that are needed besides those of ``gpu_wheels.txt``.

A run on a GPU also needs those of ``_ON_GPU``; a rehearsal on a CPU does not.
"""
_ON_GPU = ("triton",)
_IMPORTED = ("jax", "flax.linen", "optax", "orbax.checkpoint")


def main(argv: list[str] | None = None) -> None:
    """Prints versions, devices and what is wrong with them; exits with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="a rehearsal on a CPU")
    flags = parser.parse_args(argv)
    names = [*OF_THE_IMAGE, *([] if flags.smoke else _ON_GPU)]
    wheels = (ROOT / "benchmarks" / "gpu_wheels.txt").read_text(encoding="utf-8")
    wheels_here = re.findall("^([a-z][a-z0-9-]*)==", wheels, re.MULTILINE)
    names += [name for name in wheels_here if not (flags.smoke and name == "jax-triton")]
    versions = {name: version(name) for name in names}
    print(", ".join(f"{name} {found or 'missing'}" for name, found in versions.items()))
    wrong = problems(versions) or import_problems() or device_problems(flags.smoke)
    if flags.out:
        report = {"benchmark": "gpu_image", "versions": versions, "problems": wrong}
        pathlib.Path(flags.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for line in wrong:
        print(f"error: {line}", flush=True)
    sys.exit(1 if wrong else 0)


def version(package: str) -> str | None:
    """Returns the version of an installed package, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def problems(versions: dict[str, str | None]) -> list[str]:
    """Returns a line for each package that is missing or has a version that is not allowed."""
    fix = "install it, or give WHEELS=DIR with the wheels of benchmarks/gpu_wheels.txt"
    lines = [f"{name} is missing: {fix}" for name, found in versions.items() if found is None]
    if versions.get("packaging") is None:  # needed to compare versions
        return lines
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for line in dict.fromkeys([*project["dependencies"], *extras["cuda13"], *extras["test"]]):
        need = Requirement(line)
        found = versions.get(canonicalize_name(need.name))
        if found is not None and found not in need.specifier:
            lines.append(f"{need.name} {found} is not {need.specifier}, which pyproject.toml needs")
    return lines


def import_problems() -> list[str]:
    """Returns a line for each library that fails when imported, such as a flax too old for jax."""
    lines = []
    for name in _IMPORTED:
        try:
            importlib.import_module(name)
        except Exception as error:
            text = " ".join(str(error).split())
            lines.append(f"import {name}: {type(error).__name__}: {text}")
    return lines


def device_problems(smoke: bool) -> list[str]:
    """Returns a line if JAX does not start or uses no GPU, else nothing; prints the devices.

    With ``smoke``, a rehearsal on a CPU, no GPU is needed.
    """
    import jax

    from txl_jax.messages import UserError
    from txl_jax.parallel.accelerators import start_devices

    try:
        start_devices()
    except UserError as error:
        return [str(error)]
    print(jax.devices())
    if not smoke and jax.default_backend() != "gpu":
        return [f"JAX uses the {jax.default_backend()}: set JAX_PLATFORMS=cuda,cpu to see why"]
    return []


if __name__ == "__main__":
    main()
