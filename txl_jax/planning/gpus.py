"""NVIDIA GPUs that are not at hand, for XLA's compiler for GPUs, which needs no driver.

A description is a GpuTargetConfigProto of XLA in its text form. Its figures are those of the
files ``h100_sxm`` and ``h200`` among XLA's own descriptions of GPUs; the two differ in memory.
"""

import importlib.metadata
import re

import jax

from txl_jax.planning.machines import PlanningError

GPUS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200 141GB HBM3e"}
"""The full names of the GPUs that are described here."""
_MEMORY = {
    "h100": (84_942_979_072, 3_352_320_000_000),
    "h200": (151_397_597_184, 4_800_000_000_000),
}
"""Bytes of memory, and bytes per second to and from it."""
_WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-nvvm", "nvidia-cuda-nvcc")
_SCALAR = ((4, 64, 1), (8, 64, 1), (10, 128, 2), (11, 128, 1), (12, 64, 1), (16, 128, 2))
"""Of each kind of number (its code in XLA): units per processor, operations per clock."""
_MATRIX = {2: 1024, 6: 1024, 10: 512, 11: 256, 12: 32, 16: 512}
_MATRIX |= dict.fromkeys((19, 20, 23, 24, 25, 28, 29, 33, 35, 36), 1024)
"""Of each kind of number: operations per clock of a tensor core."""


def gpu_devices(topology: str) -> list[jax.Device]:
    """Returns the GPUs of a topology such as ``h200:1x1x8``: slices x hosts x devices of a host.

    Raises PlanningError if the topology is unknown or a wheel is missing.
    """
    kind, _, sides = topology.partition(":")
    if kind not in GPUS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", sides):
        raise PlanningError(
            f"--topology={topology}: must be a kind of GPU ({', '.join(GPUS)}), a colon and the"
            " numbers of slices, hosts and devices of a host: h200:1x1x8"
        )
    check_wheels(topology)
    from jax.experimental import topologies

    config = target_config(kind)
    found = topologies.get_topology_desc(platform="cuda", target_config=config, topology=sides)
    return list(found.devices)


def check_wheels(topology: str) -> None:
    """Raises PlanningError, which names the extra, if the compiler for GPUs is not installed."""
    missing, install = [], "pip install 'txl_jax[compile-cuda]'"
    for name in _WHEELS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if name.startswith("jax-") and version != jax.__version__:
            missing.append(f"{name}=={jax.__version__} (not {version})")
    if missing:
        raise PlanningError(
            f"--topology={topology}: needs {', '.join(missing)}, whose compiler needs no GPU:"
            f" {install}"
        )


def target_config(kind: str) -> str:
    """Returns the description of an H100 or H200 (SXM) as XLA reads it."""
    name, (memory, bandwidth) = GPUS[kind], _MEMORY[kind]
    rate = lambda code, units, operations, ghz: (
        f"rate_infos {{ key: {code} value {{ clock_rate_ghz: {ghz} units_per_core: {units}"
        f" ops_per_clock: {operations} }} }}"
    )
    scalar = " ".join(rate(*unit, 1.98) for unit in _SCALAR)
    float64 = 12  # runs at the full clock
    matrix = " ".join(
        rate(code, 4, n, 1.98 if code == float64 else 1.8295201) for code, n in _MATRIX.items()
    )
    return f"""
gpu_device_info {{
  name: "{name}" model_str: "{name}" device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  device_memory_size: {memory} memory_bandwidth: {bandwidth} l2_cache_size: 52428800
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  scalar_unit_description {{ {scalar} }}
  matrix_unit_description {{ {matrix} }}
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  device_interconnect_info {{ active_links: 18 }}
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0" cub_version: "3.1.2"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
"""
