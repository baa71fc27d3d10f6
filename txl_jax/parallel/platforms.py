"""The kind of the devices of a mesh, or of this process's devices without a mesh."""

import functools
import pathlib
import re

import jax
from jax.sharding import Mesh


def platform_of(mesh: Mesh | None) -> str:
    """Returns ``cpu``, ``tpu``, ``gpu`` for an NVIDIA GPU, or ``ROCm GPU`` for an AMD GPU."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform not in ("gpu", "cuda", "rocm"):
        return platform
    amd = platform == "rocm" or _capability(mesh).startswith("gfx")
    return "ROCm GPU" if amd else "gpu"


def compute_capability(mesh: Mesh | None) -> int | None:
    """Returns the compute capability of NVIDIA GPUs, such as 90 (H100); ``None`` for others."""
    found = re.fullmatch(r"(\d+)\.(\d)", _capability(mesh))
    return int(found[1] + found[2]) if found else None


def tpu_generation(mesh: Mesh | None) -> int | None:
    """Returns the generation of TPUs, such as 5 for a v5e; ``None`` for other devices."""
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    found = re.match(r"TPU v(\d+)", str(getattr(device, "device_kind", "")))
    return int(found[1]) if found else None


def has_bfloat16(mesh: Mesh | None) -> bool:
    """Tells whether a mesh has NVIDIA GPUs (but not T4 or V100) or CPUs with bfloat16 units."""
    platform = platform_of(mesh)
    if platform == "cpu":
        return cpu_has_bfloat16()
    return platform == "gpu" and (compute_capability(mesh) or 0) >= 80


def prefers_bfloat16(mesh: Mesh | None) -> bool:
    """Tells whether bfloat16 is faster than float32 on a mesh of GPUs or CPUs.

    Among CPUs with bfloat16 units, bfloat16 is faster on those of AMD. On an Intel Xeon with
    AVX512-BF16, an update takes 1.4 times as long in bfloat16 as in float32 (RESULTS.md).
    """
    amd = platform_of(mesh) != "cpu" or "AuthenticAMD" in _about_cpu()
    return amd and has_bfloat16(mesh)


@functools.cache
def cpu_has_bfloat16() -> bool:
    """Tells whether this machine's processors multiply bfloat16 (AVX512-BF16, AMX)."""
    return re.search(r"\b(avx512_bf16|amx_bf16)\b", _about_cpu()) is not None


def _about_cpu() -> str:
    try:
        return pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""


def _capability(mesh: Mesh | None) -> str:
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    return str(getattr(device, "compute_capability", ""))  # such as 9.0 or gfx942
