"""Writes XLA's own description of this machine's GPU, for comparison with txl_jax/planning/gpus.py.

    python -m benchmarks.gpu_target [--out=FILE.json]

When a program is compiled without a GPU, ``gpus.target_config`` gives XLA a description of the GPU.
If this description differs from XLA's own, replace it by XLA's own. On a machine without a GPU, the
output is ``null``.
"""

import argparse
from typing import Any

import jax
from jaxlib import _jax  # JAX has no public name for the description

from benchmarks.interleaved import machine, write


def main(argv: list[str] | None = None) -> None:
    """Prints and writes the description."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="JSON file to write")
    flags = parser.parse_args(argv)
    target = None
    if jax.default_backend() == "gpu":
        target = target_config(jax.devices())
    print(target)
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    report = {"benchmark": "gpu_target", "machine": machine(), "target_config": target}
    write(flags.out, {**report, "bytes_limit": memory})


def target_config(devices: Any) -> str:
    """Returns XLA's description of the GPUs, a GpuTargetConfigProto, as text."""
    return str(_jax.get_topology_for_devices(devices).target_config)


if __name__ == "__main__":
    main()
