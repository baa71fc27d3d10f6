"""The memory and the speed of accelerators, mostly as their makers publish them."""

import dataclasses

from txl_jax.messages import UserError
from txl_jax.parallel.device_memory import GIB


@dataclasses.dataclass(frozen=True)
class Chip:
    """The memory and the speed of one device."""

    name: str
    memory: int  # bytes that a program may use
    flops: float  # operations per second in dense bfloat16, or in float16 on older GPUs
    bandwidth: float  # bytes per second to and from its memory
    link: float  # bytes per second out of the chip, all links together
    accelerator: str = ""  # the name under which Google rents slices; GPUs have none
    cores: int = 1  # of one chip; the number in a TPU slice's name counts cores


CHIPS = {
    "v4": Chip("TPU v4", int(30.5 * GIB), 275e12, 1_228e9, 300e9, "v4", cores=2),
    "v5e": Chip("TPU v5e", int(15.75 * GIB), 197e12, 819e9, 200e9, "v5litepod"),
    "v5p": Chip("TPU v5p", int(95.73 * GIB), 459e12, 2_765e9, 600e9, "v5p", cores=2),
    "v6e": Chip("TPU v6e", int(31.24 * GIB), 918e12, 1_640e9, 448e9, "v6e"),
    "v100": Chip("V100 SXM2 16 GB", 16 * 10**9, 125e12, 900e9, 150e9),
    "t4": Chip("T4", 15 * 10**9, 65e12, 320e9, 16e9),
    "a100": Chip("A100 SXM 80 GB", 80 * 10**9, 312e12, 2_039e9, 300e9),
    "l4": Chip("L4", 23 * 10**9, 121e12, 300e9, 32e9),
    "rtx4090": Chip("RTX 4090", 24 * 10**9, 165e12, 1_008e9, 32e9),
    "h100": Chip("H100 SXM", 80 * 10**9, 989e12, 3_350e9, 450e9),
    "h200": Chip("H200 SXM", 141 * 10**9, 989e12, 4_800e9, 450e9),
    "b200": Chip("B200", 180 * 10**9, 2_250e12, 7_700e9, 900e9),
}
"""Published numbers, *paper*: cloud.google.com/tpu/docs (v5e 16 GB, v5p 95 GB, v6e 32 GB; links of
1,600, 4,800 and 3,584 Gbit/s), nvidia.com data sheets (NVLink 900 GB/s both ways). The memory
of a TPU is the amount that its compiler allows (libtpu 0.0.52).
"""


class PlanningError(UserError, ValueError):
    """Raised for a machine or text that cannot be planned for; the message says what to change."""
