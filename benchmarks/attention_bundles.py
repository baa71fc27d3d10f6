"""Counts the machine code of the fused attention for TPUs; no TPU is needed.

    python -m benchmarks.attention_bundles [--topologies=v5e:2x2] [--widths=64,128]

Compiles the attention kernels (with the extra tpu) for T = M = 768 with dropout. For each kernel it
prints the number of VLIW bundles that the kernel's loop runs for one tile of 256 x 256 scores, with
and without masks. A bundle holds the instructions that a TPU's core starts in one cycle. If data
arrives in time, the loop takes as many cycles as it has bundles, because the compiler schedules the
waiting too. The code that runs once for each tile of queries, outside of this loop, is not counted.
"""

import argparse
import os
import pathlib
import re
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.kernels import AttentionInputs, pallas_tpu
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions
from txl_jax.planning.topologies import topology_devices

KERNELS = ("forward", "backward")
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(\w*) *:[ >]*\{(.*)", re.MULTILINE)
_ENDS = ("LB", "LE", "PB", "PF", "CT")  # labels of branch targets
_LENGTH, _HEADS, _ROWS = 768, 2, 2


class Counted(NamedTuple):
    """The bundles of a kernel for a tile that needs no mask, and for a tile at an edge of the mask.

    ``products`` and ``spilled`` count instructions for the tile at an edge: matrix products, and
    stores and loads of spilled registers.
    """

    kernel: str
    inside: int
    edge: int
    products: int
    spilled: int


def main(argv: list[str] | None = None) -> None:
    """Compiles the kernels, counts their bundles and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topologies", default="v5e:2x2,v5p:2x2x1,v6e:2x2")
    parser.add_argument("--widths", default="64,128")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--rate", type=float, default=0.15, help="of dropout")
    flags = parser.parse_args(argv)
    print(
        "| TPU | dtype | heads of | kernel | bundles of a tile | at an edge | products | spilled |"
    )
    print("|---" * 8 + "|")
    with tempfile.TemporaryDirectory() as folder:
        write_machine_code(folder)
        for topology in flags.topologies.split(","):
            for dtype in flags.dtypes.split(","):
                for width in map(int, flags.widths.split(",")):
                    compile_attention(topology, width, dtype, flags.rate)
                    for x in counted(pathlib.Path(folder)):
                        about = f"| {topology.partition(':')[0]} | {dtype} | {width} | {x.kernel}"
                        sizes = f"{x.inside:,} | {x.edge:,} | {x.products:,} | {x.spilled:,}"
                        print(f"{about} | {sizes} |", flush=True)


def write_machine_code(folder: str) -> None:
    """Makes libtpu write machine code to a folder; call this before the first compilation."""
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ.pop("XLA_FLAGS", None)


def compile_attention(topology: str, width: int, dtype: str, rate: float) -> None:
    """Compiles attention with heads of ``width``, and its gradients, for one chip of a topology."""
    there = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])

    def of(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=there)

    def loss(q, k, val, u, v, r, filled, seed):
        mask = AttentionMask(filled, None, _LENGTH, _LENGTH, 2 * _LENGTH - 1)
        dropout = AttentionDropout(seed, rate) if rate else None
        x = AttentionInputs(q, k, val, Positions(u, v, r), mask, dropout)
        return jnp.sum(pallas_tpu.attend(x).astype(jnp.float32) ** 2)

    keys, biases = of(_HEADS, _ROWS, 2 * _LENGTH, width), of(_HEADS, width)
    arrays = of(_HEADS, _ROWS, _LENGTH, width), keys, keys, biases, biases
    masks = of(_ROWS, dtype="int32"), of(2, dtype="uint32")
    distances = of(_HEADS, 2 * _LENGTH, width)
    jax.jit(jax.grad(loss, argnums=range(6))).lower(*arrays, distances, *masks).compile()


def counted(folder: pathlib.Path) -> list[Counted]:
    """Returns the counts of each kernel of which libtpu wrote machine code to a folder.

    Then the folder is empty.
    """
    found = []
    for file in folder.iterdir():
        if file.name.endswith("-final_bundles.txt") and "schedule-analysis" not in file.name:
            runs = [run for run in _straight(file.read_text()) if "vmatmul" in run[1]]
            if runs:
                found.append(sorted(runs)[-2:])
        file.unlink()
    found.sort(key=lambda runs: runs[-1][1].count("vmatmul"))
    return [
        Counted(kernel, inside, edge, code.count("vmatmul"), code.count("_spill"))
        for kernel, ((inside, _), (edge, code)) in zip(KERNELS, found, strict=True)
    ]


def _straight(text: str) -> list[tuple[int, str]]:
    """Returns for each sequence of bundles between two branches its length and its text."""
    runs: list[list[str]] = [[]]
    for label, code in _BUNDLE.findall(text):
        if label in _ENDS:
            runs.append([])
        runs[-1].append(code)
        if "sbr.rel" in code:
            runs.append([])
    return [(len(run), "\n".join(run)) for run in runs]


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
