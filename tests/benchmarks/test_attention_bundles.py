"""Attention kernels for TPUs run few instruction bundles per tile of the attention scores.

A bundle holds the instructions that a TPU core starts in one cycle. A second test checks the sum of
cycles over an update.
"""

import os
import subprocess
import sys
from typing import Any

import pytest
from absent_devices import needs_libtpu

from benchmarks import attention_bundles, tpu_update
from benchmarks.attention_bundles import Counted
from benchmarks.program_kernels import Kernel
from txl_jax.config import load_config, override

MOST = {"forward": 850, "backward": 1_500}
"""Limits of bundles per tile on a v5e, for heads of width 128. libtpu 0.0.52: 708 and 1,340."""


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


def test_a_kernel_of_an_update_has_the_cycles_of_its_tiles(monkeypatch):
    """A kernel's cycles are the sum over its tiles: those inside the mask, and those at its edge.

    Every query sees all of a full memory, so each row of tiles has one tile at the mask's edge.
    """
    monkeypatch.setattr(attention_bundles, "compile_attention", lambda *args: None)
    found = [Counted("forward", 10, 100, 0, 0), Counted("backward", 1_000, 10_000, 0, 0)]
    monkeypatch.setattr(attention_bundles, "counted", lambda folder: found)
    exp = override(load_config("enwik8_24l"), {"train.seg_len": 768, "train.mem_len": 768})
    known: dict[str, Any] = {"times": 1, "read": 0, "written": 0}
    fused = {**known, "target": "tpu_custom_call", "results": ((8, 2, 768, 128),)}
    kernels = [
        Kernel("a", "library", "attention", **fused),
        Kernel("b", "library", "attention, gradient", **fused),
        Kernel("c", "product", "attention", cycles=7, **known),
    ]
    told = tpu_update.with_attention(kernels, exp, "v5e:2x4", "unused")
    of = lambda x: 16 * ((3 + 4 + 5) * x.inside + 3 * x.edge)  # 8 rows, 2 heads
    assert [k.cycles for k in told] == [*map(of, found), 7]
