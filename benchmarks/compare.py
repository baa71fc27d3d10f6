"""Compares new benchmark results with the committed ones, and says what became slower.

    python -m benchmarks.compare FRESH.json … [--committed=benchmarks/results] [--allowed=0.15]

The files FRESH.json are those that train_speed, eval_speed and generate_speed write with ``--out``.
They contain ratios, which say how many times faster txl_jax is than another program in the same
run. Each new ratio is compared with the ratio in the newest committed file of the same benchmark,
size, settings, device and processor. On the same kind of processor, ratios can be compared even
where seconds cannot. If there are committed ratios only of other processors, the comparison is
refused, because the two programs use the caches and vector units of a processor differently. The
exit code is 1 if a ratio fell by more than ``--allowed``, and 2 if a comparison was refused.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"


def main(argv: list[str] | None = None) -> int:
    """Compares and prints; returns the exit code.

    The code is 2 if a comparison was refused, else 1 if a ratio fell too much, else 0.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fresh", nargs="+")
    parser.add_argument("--committed", default=str(RESULTS))
    parser.add_argument(
        "--allowed", type=float, default=0.15, help="share that a ratio may fall by"
    )
    flags = parser.parse_args(argv)
    committed = sorted(_reports(pathlib.Path(flags.committed)), key=lambda r: r["machine"]["date"])
    fell = refused = 0
    for path in flags.fresh:
        fresh = json.loads(pathlib.Path(path).read_text())
        before = [r for r in committed if _what(r) == _what(fresh)]
        for name, found in fresh["ratios"].items():
            label = f"{fresh['benchmark']} {fresh['size']} over {name}"
            measured = [r for r in before if name in r["ratios"]]
            known = [r for r in measured if _processor(r) == _processor(fresh)]
            if measured and not known:
                processors = ", ".join(sorted({_processor(r) for r in measured}))
                print(
                    f"{label}: {found['median']:.2f} on {_processor(fresh)}, REFUSED: committed"
                    f" figures are of {processors}"
                )
                refused = 1
                continue
            if not known:
                print(f"{label}: {found['median']:.2f}, nothing committed to compare with")
                continue
            old = known[-1]["ratios"][name]["median"]
            slower = found["median"] < old * (1 - flags.allowed)
            fell += slower
            print(
                f"{label}: {found['median']:.2f}, committed {old:.2f}"
                f" ({known[-1]['machine']['date'][:10]}){'  SLOWER' if slower else ''}"
            )
    return 2 if refused else min(fell, 1)


def _processor(report: dict[str, Any]) -> str:
    """Returns the name of the accelerator, or of the CPU if there is none."""
    about = report["machine"]
    return str(about["cpu"] if about["device"] == "cpu" else about["device"])


def _reports(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    for path in folder.rglob("*.json"):
        report = json.loads(path.read_text())
        if isinstance(report, dict) and "ratios" in report and "benchmark" in report:
            yield report


def _what(report: dict[str, Any]) -> tuple:
    device = report["machine"]["device"]
    return (
        report["benchmark"],
        report["size"],
        json.dumps(report["settings"], sort_keys=True),
        device,
    )


if __name__ == "__main__":
    sys.exit(main())
