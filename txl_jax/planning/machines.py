"""Devices of a TPU slice that is not there, to compile for."""

import importlib.util
import os
import re

import jax

from txl_jax.planning.chips import TPUS

_ACCELERATOR = {"v5e": "v5litepod-{}", "v5p": "v5p-{}", "v6e": "v6e-{}"}
_CORES = {"v5e": 1, "v5p": 2, "v6e": 1}
"""Cores of a chip, which is what the names of slices count."""


class PlanningError(ValueError):
    """What cannot be planned for; the text says what to change."""


def devices_of(topology: str) -> list[jax.Device]:
    """The chips of a slice such as ``v5e:4x4``, one device each.

    Nothing is asked of any TPU: libtpu describes the slice, and its compiler compiles for it.
    What the process computes itself is put on the CPU, so call it before anything uses a device.

    Raises:
      PlanningError: no such slice, or libtpu is not installed.
    """
    accelerator = accelerator_type(topology)
    _check_library()
    os.environ.update(
        TPU_ACCELERATOR_TYPE=accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        TPU_SKIP_MDS_QUERY="1",  # do not ask a cloud what this machine is
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no chip is used, so others may be at work
    )
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except (RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise PlanningError(
            f"--topology={topology}: libtpu has no such slice ({said}); sides are those of a slice"
            " that can be rented, for example v5e:4x4, v5p:2x2x4, v6e:2x4"
        ) from error


def kind_of(topology: str) -> str:
    """``v5e`` of ``v5e:4x4``; PlanningError where it is none of those known."""
    accelerator_type(topology)
    return topology.partition(":")[0]


def accelerator_type(topology: str) -> str:
    """What the slice is rented as: ``v5e:4x4`` is ``v5litepod-16``, ``v5p:2x2x4`` is ``v5p-32``."""
    kind, _, sides = topology.partition(":")
    n_sides = 3 if kind == "v5p" else 2
    if kind not in TPUS or not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{n_sides - 1}}}", sides):
        raise PlanningError(
            f"--topology={topology}: must be a kind of TPU ({', '.join(TPUS)}), a colon and the"
            " sides of the slice in chips: v5e:4x4, v5p:2x2x4, v6e:2x4"
        )
    chips = 1
    for side in sides.split("x"):
        chips *= int(side)
    return _ACCELERATOR[kind].format(chips * _CORES[kind])


def _check_library() -> None:
    path = os.environ.get("TPU_LIBRARY_PATH") or None
    if path is not None and not os.path.isfile(path):
        raise PlanningError(f"TPU_LIBRARY_PATH={path}: there is no such file; name a libtpu.so")
    if path is None and importlib.util.find_spec("libtpu") is None:
        raise PlanningError(
            "--topology needs libtpu, whose compiler needs no TPU: pip install 'txl_jax[tpu]', or"
            " unpack the wheel libtpu anywhere and set TPU_LIBRARY_PATH=…/libtpu.so"
        )
