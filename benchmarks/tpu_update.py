"""Counts the work of a training update on a TPU in its compiled program; no TPU is needed.

    python -m benchmarks.tpu_update enwik8_24l --topology=v5e:2x4 [--set train.batch_size=22]

Compiles the recipe's update (with the extra ``tpu``) and reads the text of the compiled program
(program_kernels.py). For each kernel it counts the bytes to and from the chip's memory, and the
cycles that the compiler expects. Only the cycles of the fused attention are counted otherwise, in
its machine code (attention_bundles.py). A copy that runs at the same time as other kernels has
bytes, but no cycles. The operations of matrix products come from formulas
(txl_jax/model/flops.py).
"""

import argparse
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Iterator

from benchmarks import attention_bundles, program_kernels
from benchmarks.interleaved import changes
from benchmarks.predicted_steps import compiled_update, masked_tiles
from benchmarks.program_kernels import Kernel
from txl_jax.config import ExperimentConfig, load_config, override
from txl_jax.planning.machines import CHIPS
from txl_jax.planning.vocabulary import with_vocab_size

_TILE = 256


def main(argv: list[str] | None = None) -> None:
    """Compiles the update, counts its kernels and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        attention_bundles.write_machine_code(folder)
        exp = override(load_config(flags.recipe), changes(flags))
        exp, counted, text = compiled_update(with_vocab_size(exp), flags.topology)
        for file in pathlib.Path(folder).iterdir():
            file.unlink()
        kernels = with_attention(program_kernels.kernels(text), exp, flags.topology, folder)
    print("\n".join(report(kernels, counted.device, flags.topology.partition(":")[0])))


def with_attention(
    kernels: list[Kernel], exp: ExperimentConfig, topology: str, folder: str
) -> list[Kernel]:
    """Returns the kernels, with cycles also for those of the fused attention.

    The cycles of such a kernel are the sum over its tiles. Those of one tile come from the machine
    code that libtpu writes to ``folder``.
    """
    fused = [k for k in kernels if k.target == "tpu_custom_call"]
    if not fused:
        return kernels
    c, t = exp.model, exp.train
    attention_bundles.compile_attention(topology, c.d_head, c.dtype, c.dropatt)
    bundles = attention_bundles.counted(pathlib.Path(folder))
    length = t.context_len + t.seg_len
    reach = {False: t.mem_len + length, "pytorch": t.mem_len - 1, "tf": t.mem_len}[c.same_length]
    in_64 = masked_tiles(_TILE, _TILE, length, t.mem_len, reach)
    inside, edges = (n * 64 * 64 / _TILE**2 for n in in_64)
    cycles = {}
    for k in fused:
        heads, rows = k.results[0][:2]
        x = bundles["gradient" in k.source]
        cycles[k.name] = heads * rows * (inside * x.inside + edges * x.edge)
    return [dataclasses.replace(k, cycles=cycles.get(k.name, k.cycles)) for k in kernels]


def report(kernels: list[Kernel], flops: float, kind: str) -> Iterator[str]:
    """Yields the lines of a table: a row for each group of kernels, then a row of sums.

    Below the table are two lower bounds for the time of an update. One follows from ``flops``, the
    operations of one device, and the other from the bytes. ``kind`` is a key of CHIPS.
    """
    chip, moved = CHIPS[kind], sum(k.moved for k in kernels)
    yield "| kernels | launches | GB | Mcycles |"
    yield "|---" * 4 + "|"
    groups: dict[str, list[Kernel]] = {}
    for k in kernels:
        groups.setdefault(f"{k.kind}: {k.source}", []).append(k)
    counted = {name: _sums(group) for name, group in groups.items()}
    for name, sums in sorted(counted.items(), key=lambda item: -item[1][1]):
        yield f"| {name} | {sums[0]:,} | {sums[1] / 1e9:.2f} | {sums[2] / 1e6:.2f} |"
    times, _, cycles = _sums(kernels)
    yield f"| update | {times:,} | {moved / 1e9:.2f} | {cycles / 1e6:.2f} |"
    bounds = 1e3 * flops / chip.flops, 1e3 * moved / chip.bandwidth
    yield ""
    yield f"products {flops / 1e12:.2f} TFLOP, at least {bounds[0]:.1f} ms (*arithmetic*)"
    yield f"traffic {moved / 1e9:.1f} GB, at least {bounds[1]:.1f} ms (*arithmetic*)"


def _sums(kernels: list[Kernel]) -> tuple[int, int, float]:
    """Returns the sums of launches, bytes and cycles over the kernels."""
    launches, size = sum(k.times for k in kernels), sum(k.moved for k in kernels)
    return launches, size, sum(k.times * k.cycles for k in kernels)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
