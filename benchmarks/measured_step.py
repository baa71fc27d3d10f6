"""Measures the time of an update on this machine's GPU, by kernel and by part of the model.

    python -m benchmarks.measured_step --size=enwik8_24l [--set=train.batch_size=16] [--updates=4]

The update is the same as in train_speed.py. After a warm-up the program times some updates, and
then traces as many with JAX's profiler. The trace has the seconds of each kernel on the device, and
the operation of XLA's program that the kernel belongs to. The parts of the model are the same as in
predicted_steps.py, which prints *predicted* times for a recipe. On a CPU only the complete update
is timed.
"""

import argparse
import collections
import glob
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from benchmarks import program_kernels
from benchmarks.interleaved import changes, machine, peak_memory, published_peak, write
from benchmarks.predicted_steps import attention_kernel
from benchmarks.sizes import experiment
from benchmarks.train_speed import Training
from txl_jax.model.flops import update_flops

Row = tuple[str, float, float]
"""A row of a table: name, microseconds and launches; either of all work, or per unit of work."""
Launch = tuple[str, str, float]
"""One launch: operation of the program, kernel and microseconds."""
_PRODUCT = re.compile("gemm|nvjet|cutlass")


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the results and writes them to the file ``--out``, if given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--size", default="12l_512", help="of benchmarks/sizes.py, or a recipe of configs/")
    add("--set", action="append", default=[], metavar="KEY=JSON", help="a setting of the size")
    add("--rounds", type=int, default=3)
    add("--updates", type=int, default=4, help="dispatches in a round, and to trace")
    add("--largest", type=int, default=25, help="kernels to print")
    add("--out", help="JSON file to write")
    flags = parser.parse_args(argv)
    exp = experiment(flags.size, changes(flags))
    began = time.perf_counter()
    training = Training(exp)
    training.updates(2)
    print(f"compiled, and first updates, in {time.perf_counter() - began:.1f} s", flush=True)
    traced = flags.updates * exp.train.steps_per_dispatch
    rounds = [training.updates(flags.updates) / traced for _ in range(flags.rounds)]
    seconds = statistics.median(rounds)
    peak, needed = published_peak(), update_flops(exp)[0]
    share = f", {needed / seconds / peak:.1%} of the peak" if peak else ""
    print(f"update {1e3 * seconds:.2f} ms{share}", flush=True)
    found = trace(lambda: training.updates(flags.updates))
    kernels = each(traced, summed((kernel, us) for _, kernel, us in found))
    by_part = each(traced, summed(parts(found, training.program_text())))
    show("parts of an update", by_part)
    show("kernels of an update", kernels, flags.largest)
    report = {
        "benchmark": "measured_step",
        "size": flags.size,
        "settings": changes(flags),
        "machine": machine(),
        "seconds": rounds,
        "operations": needed,
        "peak_memory": peak_memory(),
        "parts": by_part,
        "kernels": kernels,
    }
    write(flags.out, report)


def trace(work: Any) -> list[Launch]:
    """Runs ``work`` under the profiler; returns the launches of kernels on GPUs."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(file).planes:
            lines = [line for line in plane.lines if "GPU" in plane.name]
            for line in (line for line in lines if (line.name or "").startswith("Stream")):
                for event in line.events:
                    operation = next((v for k, v in event.stats if k == "hlo_op"), "")
                    found.append((str(operation), event.name, event.duration_ns / 1e3))
    return found


def kernels_of(work: Any, units: float) -> list[Row]:
    """Returns the time and the number of launches of each kernel, per unit of ``work``.

    ``units`` is the number of units, such as tokens, that a call of ``work`` processes.
    """
    return each(units, summed((kernel, us) for _, kernel, us in trace(work)))


def each(units: float, rows: list[Row]) -> list[Row]:
    """Returns the rows for one unit of work: times and launches are divided by ``units``."""
    return [(name, us / units, n / units) for name, us, n in rows]


def show(title: str, rows: list[Row], largest: int | None = None) -> None:
    """Prints the total time of all rows, and then the first ``largest`` rows (``None``: all)."""
    print(f"{title}: {sum(us for _, us, _ in rows) / 1e3:.2f} ms")
    for name, us, n in rows[:largest]:
        print(f"{us:10.1f} us  {n:7.1f} x  {name[:110]}", flush=True)


def summed(found: Iterable[tuple[str, float]]) -> list[Row]:
    """Returns the total time and the number of launches for each name, the longest time first."""
    of: dict[str, list[float]] = collections.defaultdict(list)
    for name, us in found:
        of[name].append(us)
    rows = [(name, sum(us), float(len(us))) for name, us in of.items()]
    return sorted(rows, key=lambda row: -row[1])


def parts(found: Iterable[Launch], text: str) -> Iterator[tuple[str, float]]:
    """Yields the part of the model and the microseconds of each launch.

    ``text`` is the compiled HLO. A launch is looked up there by its operation. For a kernel in a
    CUDA graph, the profiler can give the graph as operation; then the name of the kernel is looked
    up. If the name is not there either, it shows only whether the kernel is a matrix product.
    """
    of = {}
    for k in program_kernels.kernels(text):
        fused = attention_kernel(k)
        of[_plain(k.name)] = f"attention: {fused}" if fused else f"{k.kind}: {k.source}"
    for operation, kernel, us in found:
        unknown = "product: in a graph" if _PRODUCT.search(kernel) else "not in the program"
        yield of.get(_plain(operation)) or of.get(_plain(kernel), unknown), us


def _plain(name: str) -> str:
    """Returns an operation's name with ``_`` for each dot, as in the names of kernels."""
    return name.replace(".", "_")


if __name__ == "__main__":
    main()
