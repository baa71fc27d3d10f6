"""Predicts the time of an update on a GPU from its compiled program; no GPU is needed.

    python -m benchmarks.predicted_steps enwik8_24l --topology=h100:1x1x8 [--largest=20] \
        [--set model.scan_layers=False] [--seconds=MEASURED]

Compiles the recipe's update (with the extra ``compile-cuda``). Counts the operations of matrix
products and the bytes of every kernel in the HLO (program_kernels.py), and the issue cycles of the
attention kernels in their machine code (attention_cycles.py). The predicted time of a kernel is the
longest of these times:

    products        operations (also those of attention) / (PRODUCTS x the chip's rate)
    traffic         bytes / (TRAFFIC x the chip's bandwidth)
    issue           cycles / (ISSUE x clock x multiprocessors)

The predicted time of an update is the sum over its kernels, because a GPU runs one kernel after
another. The exchange of data between devices adds time, unless it runs at the same time as kernels
and so is hidden. PRODUCTS and TRAFFIC are fitted to three recipes on one H100 (RESULTS.md), and are
the same for all recipes and GPUs; ISSUE is an assumption. The time of the exchange was never
measured. With ``--seconds=MEASURED`` the table also has this measured time of an update.
"""

import argparse
import codecs
import dataclasses
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks import attention_cycles, program_kernels
from benchmarks.interleaved import changes
from benchmarks.program_kernels import Kernel
from txl_jax.config import ExperimentConfig, load_config, override
from txl_jax.model.kernels import AttentionInputs, triton
from txl_jax.model.masks import attention_mask
from txl_jax.model.positions import Positions
from txl_jax.model.precision import resolved
from txl_jax.planning.compile_ahead import compiler_options
from txl_jax.planning.costs import KINDS
from txl_jax.planning.gpus import GPUS
from txl_jax.planning.machines import CHIPS
from txl_jax.planning.run_programs import Flops, run_programs
from txl_jax.planning.topologies import topology_devices
from txl_jax.planning.vocabulary import with_vocab_size
from txl_jax.training.plan import training_mesh

PRODUCTS, TRAFFIC, ISSUE = 0.75, 0.5, 0.8
"""The shares of a chip's published speed that kernels reach.

PRODUCTS is the share for the operations of matrix products, TRAFFIC that for bytes to and from the
device memory, and ISSUE that for instructions.
"""
PRODUCTS_OF = dict(zip(attention_cycles.KERNELS, (1, 2, 4, 2, 1), strict=True))
"""How many matrix products of the size queries x keys each attention kernel computes."""


@dataclasses.dataclass
class Row:
    """Sums over a group of kernels; the seconds are *predicted*."""

    group: str
    launches: int = 0
    flops: float = 0.0
    cycles: float = 0.0
    moved: float = 0.0
    seconds: float = 0.0


def main(argv: list[str] | None = None) -> None:
    """Compiles the update, counts its kernels and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--topology", default="h100:1x1x8")
    parser.add_argument("--largest", type=int, default=0, help="kernels to print beside the groups")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    parser.add_argument("--seconds", type=float, help="what a run's update took")
    flags = parser.parse_args(argv)
    exp = override(load_config(flags.recipe), changes(flags))
    exp, counted, text = compiled_update(with_vocab_size(exp), flags.topology)
    kind = flags.topology.partition(":")[0]
    schedule = program_kernels.schedule(text)
    kernels = [k for k in schedule if k.kind != program_kernels.WAIT]
    fused = attention_launches(kernels, exp, kind)
    print("\n".join(report(schedule, fused, counted, kind, flags.seconds)))
    largest = sorted(kernels, key=lambda k: -took(k, fused, kind) * k.times)
    for k in largest[: flags.largest]:
        about = f"{k.times:4} x {1e6 * took(k, fused, kind):8.1f} us, read {k.read / 1e6:8.1f} MB"
        print(f"{about}, written {k.written / 1e6:8.1f} MB  {k.source:28} {k.name}")


def compiled_update(exp: ExperimentConfig, topology: str) -> tuple[ExperimentConfig, Flops, str]:
    """Returns the experiment with its ``auto`` settings resolved, and its compiled update.

    The update is given by its operations and by its compiled HLO as text.
    """
    devices = topology_devices(topology)
    model = resolved(exp.model, training_mesh(exp, devices))
    exp = dataclasses.replace(exp, model=model)
    update = next(p for p in run_programs(exp, devices) if p.name == "train")
    assert update.flops
    compiled = update.lower().compile(compiler_options(devices[0]))
    return exp, update.flops, compiled.as_text() or ""


class Attention(NamedTuple):
    """One launch of an attention kernel: name, issue cycles, operations of its matrix products."""

    kernel: str
    cycles: float
    flops: float


def attention_launches(
    kernels: Iterable[Kernel], exp: ExperimentConfig, kind: str
) -> dict[str, Attention]:
    """Returns the cost of one launch of each attention kernel, by its name in the compiled HLO.

    ``kind`` is a key of GPUS, such as ``h100``.
    """
    fused = {k.name: (found, k) for k in kernels if (found := attention_kernel(k))}
    if not fused:
        return {}
    c, t = exp.model, exp.train
    dtype = jnp.dtype(c.dtype)
    capability = round(float(GPUS[kind].capability.rstrip("a")) * 10)
    counted = attention_cycles.counted(c.d_head, dtype, capability, c.dropatt)
    of = {x.kernel: x for x in counted}
    filled = jnp.full(1, t.mem_len)
    mask = attention_mask(t.context_len + t.seg_len, filled, t.mem_len, c.same_length)
    zeros = lambda *sides: jnp.zeros((*sides, c.d_head), dtype)
    q, keys, r = zeros(1, 1, mask.seg_len), zeros(1, 1, mask.n_keys), zeros(1, mask.n_keys)
    form = triton.form_of(AttentionInputs(q, keys, keys, Positions(r=r), mask), capability)
    heads = next(k.results[0][0] for name, k in fused.values() if name == "position_scores")
    launches = {}
    for name, (kernel, _) in fused.items():
        x = of[kernel]
        inside, edges = tiles(kernel, dtype, form)
        cycles = inside * x.cycles + edges * (x.cycles if x.edge is None else x.edge)
        flops = PRODUCTS_OF[kernel] * 2 * 4096 * c.d_head * (inside + edges)
        launches[name] = Attention(kernel, heads * cycles, heads * flops)
    return launches


def attention_kernel(k: Kernel) -> str:
    """Returns the name in triton_tiles.py of an attention kernel, or an empty text for others."""
    if not k.name.startswith("triton_kernel_call"):
        return ""
    packed, _ = codecs.escape_decode(k.config.encode("latin-1"))
    found = re.search(rb"attention_([a-z_]+)", zlib.decompress(packed))
    return found[1].decode() if found else ""


def tiles(kernel: str, dtype: Any, f: triton.Form) -> tuple[float, float]:
    """Returns how many blocks of 64 x 64 scores have no mask edge, and how many have one.

    The numbers are for one row and head, with full memory, and for the loops of triton_tiles.py.
    The attention mask hides a part of a block with an edge. Three kernels apply no mask; all their
    blocks count as blocks without an edge.
    """
    sizes = triton.tiling(kernel, dtype, f).sizes
    if "SQ" not in sizes:
        return _steps(kernel, dtype, f) * sizes["SX"] * sizes["SD"] / 4096, 0.0
    spans = f.t, f.k - f.t, f.k - 1 - f.far
    return masked_tiles(sizes["SQ"], sizes["SK"], *spans, last_is_edge=kernel != "forward")


def masked_tiles(
    queries: int, keys: int, t: int, m: int, reach: int, last_is_edge: bool = False
) -> tuple[float, float]:
    """Returns how many blocks of 64 x 64 scores are in tiles without and with an edge of the mask.

    The ``t`` queries follow a full memory of ``m`` slots, and each query sees ``reach`` keys before
    its own. With ``last_is_edge``, a last tile with fewer queries counts as a tile with an edge.
    """
    inside = edges = 0
    for first in range(0, t, queries):
        last = min(first + queries, t) - 1
        for key in range(max(0, m + first - reach) // keys * keys, m + last + 1, keys):
            whole = key + keys - 1 <= m + first and key >= m + last - reach
            whole = whole and (not last_is_edge or first + queries <= t)
            inside, edges = inside + whole, edges + (not whole)
    return inside * queries * keys / 4096, edges * queries * keys / 4096


def _steps(kernel: str, dtype: Any, f: triton.Form) -> int:
    """Counts the loop iterations of a kernel whose tiles have every n-th query (``f.every``)."""
    rows, step = triton.tiling(kernel, dtype, f).sizes.values()
    t, m, reach, every = f.t, f.k - f.t, f.k - 1 - f.far, f.every
    ceil: Any = lambda x, of: -(-x // of)
    parts = ceil(ceil(t, every), rows)
    if kernel == "gradient_of_distances":
        last = t - 1 - np.arange(every)
        y = np.arange(ceil(f.r + every, step))[:, None] * (step // every) - ceil(last, every)
        begin = np.maximum(-y - step // every + 1, 0) // rows
        steps = np.minimum(ceil(ceil(f.k, every) - y, rows), parts) - begin
        steps = np.where(last + y * every + step > f.far, steps, 0)
        return int(np.maximum(steps, 0).sum())
    x = np.arange(parts * rows).reshape(parts, rows, 1)
    query = x * every + np.arange(every)
    exists = query < t
    if kernel == "position_scores":
        low = np.where(exists, np.maximum(m + query - reach, 0), 1 << 30) // every - x
        high = np.where(exists, m + query, 0) // every - x
        steps = ceil(high.max(1) + 1 - low.min(1), step // every)
    else:
        queries, keys = triton.tiling("gradient_of_keys", dtype, f).sizes.values()
        first = query // queries * queries
        last = np.minimum(first + queries, t) - 1
        low = np.where(exists, np.maximum(m + first - reach, 0) // keys * keys, f.padded)
        limit = np.where(exists, ((m + last) // keys + 1) * keys, 0)
        by_key = ceil(limit.max(1), step) - low.min(1) // step
        low, limit = low // every - x, limit // every - x
        steps = np.maximum(by_key, ceil((limit.max(1) - low.min(1)) * every, step))
    return int(np.maximum(steps, 0).sum())


def took(k: Kernel, fused: Mapping[str, Attention], kind: str) -> float:
    """Returns the *predicted* seconds of one launch of a kernel on a GPU such as ``h100``.

    ``fused`` is the result of :func:`attention_launches`.
    """
    chip, gpu = CHIPS[kind], GPUS[kind]
    if k.kind in KINDS:
        return k.sent / chip.link
    own = fused.get(k.name, Attention("", 0.0, k.flops))
    issue = own.cycles / (ISSUE * 1e9 * gpu.clock * gpu.processors)
    moved = (k.read + k.written) / (TRAFFIC * chip.bandwidth)
    return max(moved, issue, own.flops / (PRODUCTS * chip.flops))


def groups(kernels: Iterable[Kernel], fused: Mapping[str, Attention], kind: str) -> list[Row]:
    """Returns sums over groups of kernels, the group that takes longest first.

    A group is one attention kernel, or all other kernels of one kind in one part of the model.
    """
    found: dict[str, Row] = {}
    for k in kernels:
        own = fused.get(k.name, Attention("", 0.0, k.flops))
        name = f"attention: {own.kernel}" if own.kernel else f"{k.kind}: {k.source}"
        row = found.setdefault(name, Row(name))
        row.launches += k.times
        row.flops += k.times * own.flops
        row.cycles += k.times * own.cycles
        row.moved += k.moved
        row.seconds += k.times * took(k, fused, kind)
    return sorted(found.values(), key=lambda row: -row.seconds)


def scheduled(schedule: Iterable[Kernel], fused: Mapping[str, Attention], kind: str) -> float:
    """Returns the seconds of an update whose collectives run at the same time as other kernels.

    Collectives run one after another. A collective starts where the compiler put its start, and the
    next kernels wait for it where the compiler put its end.
    """
    schedule = list(schedule)
    awaited = {k.name for k in schedule if k.kind == program_kernels.WAIT}
    now, link = 0.0, 0.0
    ends: dict[str, float] = {}
    for k in schedule:
        if k.kind == program_kernels.WAIT:
            now = max(now, ends[k.name])
        elif k.kind in KINDS:
            ends[k.name] = link = max(now, link) + k.times * took(k, fused, kind)
            now = now if k.name in awaited else link
        else:
            now += k.times * took(k, fused, kind)
    return max(now, link)


def report(
    schedule: list[Kernel], fused: Mapping[str, Attention], flops: Flops, kind: str, measured: Any
) -> Iterator[str]:
    """Yields the lines of a table: a row for each group of kernels, then rows for the update.

    The rows for the update differ in how much of the exchange between devices runs at the same time
    as kernels: all of it, as much as the compiled program allows, and nothing.
    """
    kernels = [k for k in schedule if k.kind != program_kernels.WAIT]
    rows, peak = groups(kernels, fused, kind), CHIPS[kind].flops
    yield "| kernels | launches | TFLOP | Gcycles | GB | ms (*predicted*) |"
    yield "|---" * 6 + "|"
    for row in rows:
        about = f"{row.flops / 1e12:.2f} | {row.cycles / 1e9:.2f} | {row.moved / 1e9:.2f}"
        yield f"| {row.group} | {row.launches} | {about} | {1e3 * row.seconds:.2f} |"
    exchange = sum(row.seconds for row in rows if row.group.split(":")[0] in KINDS)
    whole = sum(row.seconds for row in rows)
    own = flops.device - flops.recomputed * flops.device / (flops.model + flops.recomputed)
    compiled = scheduled(schedule, fused, kind)
    for about, seconds in (
        ("exchange hidden", whole - exchange),
        ("exchange as scheduled", compiled),
        ("exchange shown", whole),
    ):
        share = f"{own / seconds / peak:.1%} of the peak"
        moved = f"{sum(row.moved for row in rows) / 1e9:.1f}"
        yield f"| update, {about}: {share} | | | | {moved} | {1e3 * seconds:.1f} |"
    if measured is not None:
        share = own / measured / peak
        yield f"| update, measured: {share:.1%} of the peak | | | | | {1e3 * measured:.1f} |"


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
