"""The machine code of the TPU attention kernels takes no more bundles than a limit."""

import os
import subprocess
import sys

import pytest
from absent_devices import needs_libtpu

MOST = {"forward": 850, "backward": 1_500}
"""Most bundles for a tile, heads of width 128, on a v5e; libtpu 0.0.52 gives 708 and 1,340."""


@needs_libtpu
@pytest.mark.integration
def test_a_tile_takes_no_more_bundles():
    flags = ["--topologies=v5e:2x2", "--widths=128"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.attention_bundles", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    rows = [row.strip("| ").split(" | ") for row in done.stdout.splitlines()[2:]]
    assert [row[:4] for row in rows] == [["v5e", "bfloat16", "128", name] for name in MOST], done
    for name, row in zip(MOST, rows, strict=True):
        inside, edge = (int(cell.replace(",", "")) for cell in row[4:6])
        assert inside < edge, row
        assert inside <= MOST[name], row
