"""Published figures of accelerators, and the devices of a TPU slice that is not at hand."""

import dataclasses
import importlib.util
import math
import os
import re

import jax

from txl_jax.messages import UserError
from txl_jax.parallel.device_memory import GIB


@dataclasses.dataclass(frozen=True)
class Chip:
    """The published figures of one device."""

    name: str
    memory: int  # bytes that a program may use
    flops: float  # dense bfloat16, per second; float32: the same on TPUs, half on GPUs (TF32)
    bandwidth: float  # bytes per second to and from its memory
    link: float  # bytes per second out of the chip, all links together
    accelerator: str = ""  # the name under which Google rents slices; GPUs have none
    cores: int = 1  # of one chip, which the names of slices count


CHIPS = {
    "v5e": Chip("TPU v5e", int(15.75 * GIB), 197e12, 819e9, 200e9, "v5litepod"),
    "v5p": Chip("TPU v5p", int(95.73 * GIB), 459e12, 2_765e9, 600e9, "v5p", cores=2),
    "v6e": Chip("TPU v6e", int(31.24 * GIB), 918e12, 1_640e9, 448e9, "v6e"),
    "h100": Chip("H100 SXM", 80 * 10**9, 989e12, 3_350e9, 450e9),
    "h200": Chip("H200 SXM", 141 * 10**9, 989e12, 4_800e9, 450e9),
}
"""Published figures, *paper*: cloud.google.com/tpu/docs (v5e 16 GB, v5p 95 GB, v6e 32 GB; links of
1,600, 4,800 and 3,584 Gbit/s), nvidia.com data sheets (NVLink 900 GB/s both ways). The memory
of a TPU is the amount that its compiler allows (libtpu 0.0.52), less than is published."""

_TPUS = [kind for kind, chip in CHIPS.items() if chip.accelerator]


class PlanningError(UserError, ValueError):
    """Raised for a machine or text that cannot be planned for; the message says what to change."""


def topology_devices(topology: str) -> list[jax.Device]:
    """Returns the chips of a slice such as ``v5e:4x4``; PlanningError if it or libtpu is missing.

    No TPU is needed: libtpu describes the slice, and its compiler compiles for it. The process
    itself then computes on the CPU, so call this before anything uses a device.
    """
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
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no chip is used, so other processes may load it too
    )
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except (RuntimeError, ValueError) as error:
        raise PlanningError(
            f"--topology={topology}: libtpu has no such slice ({str(error).splitlines()[0]}); sides"
            " are those of a slice that can be rented, for example v5e:4x4, v5p:2x2x4, v6e:2x4"
        ) from error


def accelerator_type(topology: str) -> str:
    """Returns the rental name of a slice, such as ``v5litepod-16`` for the chips ``v5e:4x4``."""
    kind, _, sides = topology.partition(":")
    n_sides = 3 if kind == "v5p" else 2
    if kind not in _TPUS or not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{n_sides - 1}}}", sides):
        raise PlanningError(
            f"--topology={topology}: must be a kind of TPU ({', '.join(_TPUS)}), a colon and the"
            " sides of the slice in chips: v5e:4x4, v5p:2x2x4, v6e:2x4"
        )
    chips = math.prod(map(int, sides.split("x")))
    return f"{CHIPS[kind].accelerator}-{chips * CHIPS[kind].cores}"
