"""Counts the machine code of the fused attention for NVIDIA GPUs; no GPU is needed.

    python -m benchmarks.attention_cycles [--capabilities=90] [--widths=64,128] [--dtypes=bfloat16]

Compiles the attention kernels (with the extra compile-cuda) for T = M = 768 with dropout. For each
kernel it prints the tiling, issue cycles, registers and spilled bytes of a thread, and shared
memory. Issue cycles are the instructions of all warps divided by four, because a multiprocessor of
the GPU issues four instructions at a time. The instructions are those that the kernel's loop runs
for 64 x 64 scores. The number in brackets is for tiles that an edge of the attention mask crosses,
and the number before it is for all other tiles.
"""

import argparse
import contextlib
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.kernels import AttentionInputs, parity, triton
from txl_jax.model.masks import AttentionMask
from txl_jax.model.positions import Positions

KERNELS = (
    "position_scores",
    "forward",
    "gradient_of_keys",
    "gradient_of_queries",
    "gradient_of_distances",
)
_PRODUCT = re.compile(r"\b(HGMMA|HMMA|UTC\w*MMA)")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_BACKWARD = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")


class Counted(NamedTuple):
    """The cost of a kernel's machine code.

    ``cycles`` are the issue cycles for 64 x 64 scores, and ``edge`` those in a tile that an edge of
    the mask crosses. ``edge`` is ``None`` if one loop does all tiles. ``registers`` and ``spilled``
    (bytes) are those of a thread. ``shared`` is the shared memory in bytes.
    """

    kernel: str
    tiling: triton.Tiling
    cycles: float
    edge: float | None
    registers: int
    spilled: int
    shared: int
    ptx: str


def main(argv: list[str] | None = None) -> None:
    """Compiles the kernels, counts their cycles and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capabilities", default="90")
    parser.add_argument("--widths", default="64,128")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rate", type=float, default=0.15, help="of dropout")
    flags = parser.parse_args(argv)
    print(
        "| GPU | dtype | heads of | kernel | warps, stages, tile | issue cycles | registers", end=""
    )
    print(" | spilled bytes | shared KiB |\n" + "|---" * 9 + "|")
    for capability in map(int, flags.capabilities.split(",")):
        for dtype in flags.dtypes.split(","):
            for width in map(int, flags.widths.split(",")):
                found = counted(width, dtype, capability, flags.rate)
                about = f"| sm_{capability} | {dtype} | {width} |"
                print("\n".join(f"{about} {_row(x)}" for x in found))
                print(f"{about} all | | {sum(x.cycles for x in found):,.0f} | | | |", flush=True)


def _row(x: Counted) -> str:
    tile = " x ".join(map(str, x.tiling.sizes.values()))
    edge = f" ({x.edge:,.0f})" if x.edge else ""
    options = f"{x.tiling.num_warps}, {x.tiling.num_stages}, {tile}"
    sizes = f"{x.registers} | {x.spilled} | {x.shared / 1024:.0f} |"
    return f"{x.kernel} | {options} | {x.cycles:,.0f}{edge} | {sizes}"


def counted(
    h: int, dtype: Any, capability: int = 90, rate: float = 0.15, ring: bool = False
) -> list[Counted]:
    """Returns the cost of each kernel for heads of width ``h``, in the order of :data:`KERNELS`.

    With ``ring``, the memory is a ring buffer, as in a cache.
    """
    with compiled_kernels() as made:
        form = lower(h, dtype, capability, rate, ring=ring)
    found = []
    for kernel in KERNELS:
        (program,) = (program for name, program in made.items() if kernel in name)
        tiling = triton.tiling(kernel, jnp.dtype(dtype), form)
        registers, spilled, sass = assembled(program.binary)
        scores = 1
        for size in tiling.sizes.values():
            scores *= size
        each = sorted(n * tiling.num_warps / 4 * 4096 / scores for n in _loops(sass))
        edge = each[-1] if len(each) > 1 else None
        shared = program.shared_mem_bytes
        found.append(
            Counted(kernel, tiling, each[0], edge, registers, spilled, shared, program.binary)
        )
    return found


@contextlib.contextmanager
def compiled_kernels() -> Iterator[dict[str, Any]]:
    """Yields a dict that gets, by name, every kernel that jax-triton compiles in the context."""
    from jax_triton import triton_lib as library

    made: dict[str, Any] = {}
    compile_kernel, cache = library.compile_ttir_to_ptx_inplace, library._COMPILED_KERNEL_CACHE

    def recorded(*args):
        result = compile_kernel(*args)
        made[result.name] = result
        return result

    library.compile_ttir_to_ptx_inplace = recorded
    library._COMPILED_KERNEL_CACHE = {}
    try:
        yield made
    finally:
        library.compile_ttir_to_ptx_inplace = compile_kernel
        library._COMPILED_KERNEL_CACHE = cache


def lower(
    h: int, dtype: Any, capability: int, rate: float, t: int = 768, m: int = 768, ring: bool = False
) -> Any:
    """Lowers attention and its gradient, which compiles the kernels; returns the sizes (Form).

    There are 8 rows and 8 heads of width ``h``. The segment has ``t`` tokens, and the memory ``m``.
    """
    n, b, k = 8, 8, t + m
    shape: Any = lambda *sides: jax.ShapeDtypeStruct(sides, jnp.dtype(dtype))
    positions = Positions(u=shape(n, h), v=shape(n, h), r=shape(n, k, h))
    arrays = (shape(n, b, t, h), shape(n, b, k, h), shape(n, b, k, h), positions)
    forms = []

    def run(q, keys, values, positions, filled, key):
        dropout = AttentionDropout.draw(key, rate) if rate else None
        mask = AttentionMask(filled, None, t, m, k - 1)
        oldest = filled[0] if ring else None
        inputs = AttentionInputs(q, keys, values, positions, mask, dropout, oldest)
        forms.append(triton.form_of(inputs, capability))
        attend = lambda x: triton.attend(x, capability)
        return parity.values_and_gradients(attend, inputs)

    key = jax.eval_shape(lambda: jax.random.key(0))
    filled = jax.ShapeDtypeStruct((b,), jnp.int32)
    jax.jit(run).trace(*arrays, filled, key).lower(lowering_platforms=("cuda",))
    return forms[0]


def assembled(ptx: str) -> tuple[int, int, str]:
    """Assembles PTX; returns registers and spilled bytes per thread, and the machine code."""
    from triton import knobs

    found = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert found
    target, capability = found.groups()
    tool = knobs.nvidia.ptxas_blackwell if int(capability) >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name={target}", source, "-o", cubin]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [knobs.nvidia.cuobjdump.path, "-sass", cubin]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (registers,) = re.findall(r"Used (\d+) registers", said)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    return int(registers), int(spilled), sass


def _loops(sass: str) -> Iterator[int]:
    """Yields the number of instructions of each loop that has matrix products."""
    lines = [(int(at, 16), text) for at, text in _INSTRUCTION.findall(sass)]
    for at, text in lines:
        jump = _BACKWARD.search(text)
        if jump and int(jump[1], 16) < at:
            body = [text for place, text in lines if int(jump[1], 16) <= place <= at]
            if any(map(_PRODUCT.search, body)) and not any("EXIT" in x for x in body):
                yield len(body)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
