"""Descriptions of NVIDIA GPUs, from which XLA compiles programs without a GPU or its driver.

A description is a GpuTargetConfigProto of XLA in its text form. Its numbers are from XLA's own
descriptions (V100, A100, H100, H200, B200), or from NVIDIA's data sheets and the CUDA C++
Programming Guide (T4, L4, RTX 4090).
"""

import dataclasses
import re

import jax

from txl_jax.library_errors import installed_version
from txl_jax.planning.machines import PlanningError


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that XLA's compiler needs.

    ``capability`` is the compute capability. If it ends with ``a``, the compiler can use
    instructions that only this generation has. ``cache`` is the size of the second-level cache.
    """

    name: str
    capability: str
    processors: int
    units: int  # units for float32 of each processor
    clock: float  # GHz
    memory: int  # bytes
    bandwidth: float  # bytes per second to and from the memory
    cache: int  # bytes
    threads: int  # threads of each processor
    shared: int  # bytes of shared memory of each processor
    links: int = 0  # the number of NVLink links


GPUS = {
    "v100": Gpu(
        *("Tesla V100-SXM2-16GB", "7.0", 80, 64, 1.53, 16_935_682_048, 898.048e9, 6 << 20),
        *(2048, 96 << 10, 6),
    ),
    "t4": Gpu("Tesla T4", "7.5", 40, 64, 1.59, 15_828_320_256, 320.064e9, 4 << 20, 1024, 64 << 10),
    "a100": Gpu(
        *("NVIDIA A100-SXM4-80GB", "8.0", 108, 64, 1.41, 85_100_068_864, 2039.04e9, 40 << 20),
        *(2048, 164 << 10, 12),
    ),
    "l4": Gpu(
        *("NVIDIA L4", "8.9", 58, 128, 2.04, 23_580_639_232, 300.096e9, 48 << 20),
        *(1536, 100 << 10),
    ),
    "rtx4090": Gpu(
        *("NVIDIA GeForce RTX 4090", "8.9", 128, 128, 2.52, 25_386_352_640, 1008.096e9, 72 << 20),
        *(1536, 100 << 10),
    ),
    "h100": Gpu(
        *("NVIDIA H100 80GB HBM3", "9.0a", 132, 128, 1.98, 84_942_979_072, 3352.32e9, 50 << 20),
        *(2048, 228 << 10, 18),
    ),
    "h200": Gpu(
        *("NVIDIA H200 141GB HBM3e", "9.0a", 132, 128, 1.98, 151_397_597_184, 4800e9, 50 << 20),
        *(2048, 228 << 10, 18),
    ),
    "b200": Gpu(
        *("NVIDIA B200", "10.0a", 148, 128, 1.965, 191_514_411_008, 7672.32e9, 132_644_864),
        *(2048, 228 << 10, 18),
    ),
}
"""The known GPUs, by the name with which a topology begins."""
_WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-nvvm", "nvidia-cuda-nvcc")
_SCALAR = ((4, 64, 1), (8, 64, 1), (10, 128, 2), (11, 128, 1), (12, 64, 1), (16, 128, 2))
"""For each kind of number: its code in XLA, units per processor, operations per clock."""
_MATRIX = {2: 1024, 6: 1024, 10: 512, 11: 256, 12: 32, 16: 512}
_MATRIX |= dict.fromkeys((19, 20, 23, 24, 25, 28, 29, 33, 35, 36), 1024)
"""For each kind of number, by its code: operations per clock of a tensor core of Hopper."""


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
        version = installed_version(name)
        if version is None:
            missing.append(name)
        elif name.startswith("jax-") and version != jax.__version__:
            missing.append(f"{name}=={jax.__version__} (not {version})")
    if missing:
        raise PlanningError(
            f"--topology={topology}: needs {', '.join(missing)}, whose compiler needs no GPU:"
            f" {install}"
        )


def target_config(kind: str) -> str:
    """Returns the description of a GPU as XLA reads it."""
    gpu = GPUS[kind]
    major, minor = re.findall(r"\d+", gpu.capability)
    feature = "ACCELERATED_FEATURES" if gpu.capability.endswith("a") else "NONE"
    return f"""
gpu_device_info {{
  name: "{gpu.name}" model_str: "{gpu.name}" device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {gpu.capability}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  device_memory_size: {gpu.memory} memory_bandwidth: {int(gpu.bandwidth)}
  l2_cache_size: {gpu.cache} core_count: {gpu.processors} fpus_per_core: {gpu.units}
  clock_rate_ghz: {gpu.clock} threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: {gpu.threads}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {_shared_of_a_block(gpu)}
  shared_memory_per_core: {gpu.shared}
  {_units_of_hopper(gpu) if gpu.capability == "9.0a" else ""}
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  device_interconnect_info {{ active_links: {gpu.links} }}
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0" cub_version: "3.1.2"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""


def _units_of_hopper(gpu: Gpu) -> str:
    """Returns the rates of a Hopper GPU's units for XLA's cost model; other GPUs have defaults."""
    rate = lambda code, units, operations, ghz: (
        f"rate_infos {{ key: {code} value {{ clock_rate_ghz: {ghz} units_per_core: {units}"
        f" ops_per_clock: {operations} }} }}"
    )
    scalar = " ".join(rate(*unit, gpu.clock) for unit in _SCALAR)
    float64 = 12  # runs at the full clock
    matrix = " ".join(
        rate(code, 4, n, gpu.clock if code == float64 else 1.8295201) for code, n in _MATRIX.items()
    )
    return f"scalar_unit_description {{ {scalar} }} matrix_unit_description {{ {matrix} }}"


def _shared_of_a_block(gpu: Gpu) -> int:
    """Returns the shared memory of a block: from Ampere on, the driver keeps 1 KiB of a block."""
    return gpu.shared - (1024 if float(gpu.capability.rstrip("a")) >= 8 else 0)
