"""Descriptions of devices that this machine lacks, for tests that compile programs for them.

If the compiler for such a device is not installed, these tests are skipped.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import jax
import pytest

from txl_jax.planning import gpus
from txl_jax.planning.machines import PlanningError
from txl_jax.planning.topologies import topology_devices

HAS_LIBTPU = bool(os.environ.get("TPU_LIBRARY_PATH") or importlib.util.find_spec("libtpu"))
NO_LIBTPU = "no libtpu: install it or set TPU_LIBRARY_PATH"
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason=NO_LIBTPU)


@contextlib.contextmanager
def absent_tpus(topology: str) -> Iterator[list[jax.Device]]:
    """Yields descriptions of the TPU chips of ``topology``, for which programs can be compiled.

    Meanwhile, XLA_FLAGS is not set: with the tests' CPU flags in it, libtpu would end the process
    at its first program. Afterwards, all environment variables have their old values again.
    """
    jax.devices()  # the CPU backend reads XLA_FLAGS here
    before = dict(os.environ)
    os.environ.pop("XLA_FLAGS", None)
    try:
        yield topology_devices(topology)
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_compiler(topology: str) -> None:
    """Skips the test where the compiler for a topology is not installed."""
    if topology.startswith("v"):
        if not HAS_LIBTPU:
            pytest.skip(NO_LIBTPU)
        return
    try:
        gpus.check_wheels(topology)
    except PlanningError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def eight_gpus():
    """Descriptions of eight H200s, which need not be present."""
    check_compiler("h200:1x1x8")
    pytest.importorskip("jax_triton", exc_type=ImportError)
    return topology_devices("h200:1x1x8")
