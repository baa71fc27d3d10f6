"""Times the compilation of the training step, with unrolled and with scanned layers.

    python -m benchmarks.compile_time [--layers=4,24] [--repeats=5] [--out=FILE.json]

The program traces, lowers and compiles the step of a model of width 512 (8 heads of 64, inner width
2,048, 204 symbols, dropout 0.1), with batch size 4, segments of 128 tokens and memory 128. It does
so for several numbers of layers, in each of three forms: unrolled, scanned, and scanned with
recomputation. All combinations take turns, so that a busy machine slows all of them. The output has
the median and the range of the seconds, and for each form the ratio of the seconds with the most
layers to those with the fewest. XLA compiles for the devices of this machine.
"""

import argparse
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import numpy as np

from benchmarks.data_preparation import machine
from txl_jax.config import ExperimentConfig
from txl_jax.data.batch import Batch
from txl_jax.parallel.mesh import make_mesh
from txl_jax.training.plan import StepSetup

FORMS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "scan": {"scan_layers": True},
    "scan, remat layer": {"scan_layers": True, "remat": "layer"},
}
B, T = 4, 128


def main(argv: list[str] | None = None) -> None:
    """Times all forms in turn, prints the results and writes them to ``--out``, if given."""
    flags = _flags(argv)
    layers = [int(n) for n in flags.layers.split(",")]
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(flags.repeats):
        for form, settings in FORMS.items():
            for n in layers:
                seconds.setdefault((form, n), []).append(compile_seconds(n, settings))
    rows: list[dict[str, Any]] = [
        {
            "form": form,
            "layers": n,
            "median_seconds": statistics.median(found),
            "range": [min(found), max(found)],
        }
        for (form, n), found in seconds.items()
    ]
    ratios = {}
    for form in FORMS:
        few, many = (seconds[form, n] for n in (min(layers), max(layers)))
        ratios[form] = statistics.median(b / a for a, b in zip(few, many, strict=True))
    for row in rows:
        low, high = row["range"]
        print(
            f"{row['form']:<18} {row['layers']:>3} layers  {row['median_seconds']:6.2f} s"
            f"  ({low:.2f} to {high:.2f})"
        )
    for form, ratio in ratios.items():
        print(f"{form:<18} {max(layers)} against {min(layers)} layers: {ratio:.2f} times")
    if flags.out:
        about = {**machine(), "jax": jax.__version__, "backend": jax.default_backend()}
        report = {"machine": about, "rows": rows, "ratios": ratios}
        pathlib.Path(flags.out).write_text(json.dumps(report, indent=1) + "\n")


def compile_seconds(n_layer: int, settings: dict[str, Any]) -> float:
    """Returns the seconds to trace, lower and compile the training step of one model.

    ``settings`` are those of the model's form, an entry of FORMS.
    """
    jax.clear_caches()
    shape = {"n_layer": n_layer, "d_model": 512, "n_head": 8, "d_head": 64, "d_inner": 2048}
    exp = ExperimentConfig.from_dict(
        {
            "model": {"vocab_size": 204, "dropout": 0.1, **shape, **settings},
            "train": {"batch_size": B, "seg_len": T, "mem_len": T},
        }
    )
    setup = StepSetup.on(make_mesh(exp.mesh, exp.model, B), exp)
    of: Any = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    batch = Batch(
        inputs=of(np.int32, B, T),
        targets=of(np.int32, B, T),
        weights=of(np.float32, B, T),
        reset=of(bool, B),
    )
    began = time.perf_counter()
    setup.update().lower(setup.abstract, batch).compile()
    return time.perf_counter() - began


def _flags(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="4,24")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
