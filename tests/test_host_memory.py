"""Freed memory stays with the process."""

import platform
import subprocess
import sys

import pytest

from txl_jax.parallel import host_memory

PROGRAM = """
import resource, runpy, sys
import numpy as np

if sys.argv[2] == "keep":
    runpy.run_path(sys.argv[1])["keep_freed_memory"]()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (200, 40):
        np.ones(size << 20, np.int8)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
@pytest.mark.parametrize("freed", ["keep", "return"])
def test_the_second_use_of_a_block_finds_its_pages(freed):
    command = [sys.executable, "-c", PROGRAM, host_memory.__file__, freed]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    assert first > 100  # pages of 4 KiB, or of 2 MiB
    assert (second < first / 10) == (freed == "keep"), done.stdout
