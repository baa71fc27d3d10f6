"""Devices that this machine does not have: those of a TPU slice or of machines with GPUs."""

import importlib.util
import math
import os
import re
from typing import Any

import jax

from txl_jax.planning.gpus import GPUS, gpu_devices
from txl_jax.planning.machines import CHIPS, PlanningError

_SMALL = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4"),
}
"""The sides of slices, in chips. With 2 sides these are all slices of a v5e or v6e, with 3 sides
only the small slices of a v4 or v5p."""
_TPUS = [kind for kind, chip in CHIPS.items() if chip.accelerator]


def topology_devices(topology: str) -> list[jax.Device]:
    """Returns the devices of a topology such as ``v5e:4x4`` or ``h200:1x1x8``.

    The compilers run without these devices. After this call, JAX computes on the CPU in this
    process, so call it before anything uses a device. Raises PlanningError if the topology is
    unknown or its compiler is not installed.
    """
    kind = topology.partition(":")[0]
    if kind not in (*_TPUS, *GPUS):
        raise PlanningError(
            f"--topology={topology}: must start with a kind of TPU ({', '.join(_TPUS)}) or GPU"
            f" ({', '.join(GPUS)}) and a colon: v5e:4x4, v5p:2x2x4, h200:1x1x8"
        )
    jax.config.update("jax_platforms", "cpu")
    return gpu_devices(topology) if kind in GPUS else tpu_devices(topology)


def tpu_devices(topology: str) -> list[jax.Device]:
    """Returns the chips of a slice such as ``v5e:4x4``, which libtpu describes."""
    accelerator = accelerator_type(topology)
    path = os.environ.get("TPU_LIBRARY_PATH")
    if path and not os.path.isfile(path):
        raise PlanningError(f"TPU_LIBRARY_PATH={path}: there is no such file; name a libtpu.so")
    if not path and importlib.util.find_spec("libtpu") is None:
        raise PlanningError(
            "--topology needs libtpu, whose compiler needs no TPU: pip install 'txl_jax[tpu]', or"
            " unpack the wheel libtpu anywhere and set TPU_LIBRARY_PATH=…/libtpu.so"
        )
    os.environ.update(
        TPU_ACCELERATOR_TYPE=accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        TPU_SKIP_MDS_QUERY="1",  # do not ask a cloud what this machine is
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no chip is used, so other processes can load it too
    )
    from jax.experimental import topologies

    try:
        options = _chips(topology)
        return list(topologies.get_topology_desc(topology, platform="tpu", **options).devices)
    except (RuntimeError, ValueError) as error:
        raise PlanningError(
            f"--topology={topology}: libtpu has no such slice ({str(error).splitlines()[0]});"
            " name a slice that can be rented, for example v5e:4x4, v5p:2x2x4, v6e:2x4"
        ) from error


def _chips(topology: str) -> dict[str, Any]:
    """Returns libtpu's options for the chips of a slice and the sides of its hosts.

    By default, a host of libtpu has 2x2x1 chips. But a v5e or v6e slice of one, four or eight chips
    has only one host. On a v4, JAX has one device for both cores of a chip.
    """
    kind, _, sides = topology.partition(":")
    if kind in ("v5e", "v6e") and sides in ("1x1", "2x2", "2x4"):
        return {"chips_per_host_bounds": [*map(int, sides.split("x")), 1]}
    return {"chip_config_name": "megacore"} if kind == "v4" else {}


def accelerator_type(topology: str) -> str:
    """Returns the rental name of a slice, such as ``v5litepod-16`` for the chips ``v5e:4x4``."""
    kind, _, sides = topology.partition(":")
    n_sides = 3 if kind in ("v4", "v5p") else 2
    if kind not in _TPUS or not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{n_sides - 1}}}", sides):
        raise PlanningError(
            f"--topology={topology}: must be a kind of TPU ({', '.join(_TPUS)}), a colon and the"
            " sides of the slice in chips: v5e:4x4, v5p:2x2x4, v6e:2x4"
        )
    counts = [*map(int, sides.split("x"))]
    of_cubes = n_sides == 3 and counts == sorted(counts) and not any(n % 4 for n in counts)
    known = _SMALL[n_sides]
    if sides not in known and not of_cubes:
        more = ", or multiples of 4x4x4 chips, the shorter sides first" * (n_sides == 3)
        raise PlanningError(
            f"--topology={topology}: there is no such slice of a {kind}; the slices that can be"
            f" rented are {', '.join(known)}{more}"
        )
    chips = math.prod(counts)
    return f"{CHIPS[kind].accelerator}-{chips * CHIPS[kind].cores}"
