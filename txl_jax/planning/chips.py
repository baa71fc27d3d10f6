"""What one device of each kind has, as its maker publishes it."""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: as people say it.
      memory: bytes that a program may use.
      products: floating-point operations per second, dense, bfloat16 in and float32 out. A TPU
        multiplies float32 in the same way unless told otherwise; a GPU in TF32, at half the rate.
      bandwidth: of its memory, bytes per second.
      link: to its neighbours, bytes per second out of a chip, all links together.
    """

    name: str
    memory: int
    products: float
    bandwidth: float
    link: float


CHIPS = {
    "v5e": Chip("TPU v5e", int(15.75 * GIB), 197e12, 819e9, 200e9),
    "v5p": Chip("TPU v5p", int(95.73 * GIB), 459e12, 2_765e9, 600e9),
    "v6e": Chip("TPU v6e", int(31.24 * GIB), 918e12, 1_640e9, 448e9),
    "h100": Chip("H100 SXM", 80 * 10**9, 989e12, 3_350e9, 450e9),
    "h200": Chip("H200 SXM", 141 * 10**9, 989e12, 4_800e9, 450e9),
}
"""Published figures, *paper*: cloud.google.com/tpu/docs (v5e 16 GB, v5p 95 GB, v6e 32 GB; links of
1,600, 4,800 and 3,584 Gbit/s), nvidia.com data sheets (NVLink 900 GB/s both ways). Memory of TPUs
is what their compiler allows (libtpu 0.0.52): the published less what the system keeps."""

TPUS = ("v5e", "v5p", "v6e")
"""Those that can be compiled for ahead of time."""
