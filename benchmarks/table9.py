"""Measures the speed of evaluation with memory and with windows, as in the paper's table 9.

    python -m benchmarks.table9 --size=12l_512 [--lengths=800,1800,2800,3800] [--out=FILE.json]

txl_jax/analysis/speed.py describes the programs that are timed. For a trained model, use
``--mode=speed``, which measures the same.
"""

import argparse

from benchmarks.interleaved import add_flags, changes, machine, write
from benchmarks.sizes import experiment
from txl_jax.analysis.speed import format_row, measure_rows
from txl_jax.config import SpeedConfig


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the results and writes them to the file ``--out``, if given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--lengths", default="800,1800,2800,3800")
    parser.add_argument("--windows", type=int, default=4, help="run at a time")
    flags = parser.parse_args(argv)
    exp = experiment(flags.size, {"model.scan_layers": False, **changes(flags)})
    lengths = tuple(map(int, flags.lengths.split(",")))
    settings = SpeedConfig(lengths=lengths, windows=flags.windows, rounds=flags.rounds)
    rows = []
    for row in measure_rows(exp.model, settings):
        print(format_row(row), flush=True)
        rows.append(row)
    write(
        flags.out, {"benchmark": "table9", "size": flags.size, "machine": machine(), "rows": rows}
    )


if __name__ == "__main__":
    main()
