"""Measures how much saving checkpoints slows down training of the 41M model.

    python -m benchmarks.save_time [--steps=30] [--saves=5] [--out=FILE.json]

The step is that of configs/enwik8_12l.py (41.1M parameters; with Adam a checkpoint has 0.5 GB), but
with 4 streams, and with segments and memory of 128 tokens. The recipe's own batch would make a step
slower, but not a save. The program times steps before a save, and steps after it that run while the
files of the save are written. It repeats this for several saves.

    cost = (seconds that save() blocked + delay of steps while it wrote) / (seconds of 1000 steps)

The default of checkpoint.every is 1000.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks.data_preparation import machine
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.config import CheckpointConfig, load_config
from txl_jax.data.batch import Batch
from txl_jax.parallel.mesh import make_mesh
from txl_jax.training.plan import StepSetup

B, T = 4, 128


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the results and writes them to the file ``--out``, if given."""
    flags = _flags(argv)
    exp = load_config(
        "configs/enwik8_12l.py",
        {
            "model.vocab_size": 204,
            "model.scan_layers": False,
            "train.batch_size": B,
            "train.seg_len": T,
            "train.mem_len": T,
            "mesh.data": 1,
        },
    )
    setup = StepSetup.on(make_mesh(exp.mesh, exp.model, B), exp)
    state, step = setup.initial_state(exp), setup.update()
    tokens = np.random.default_rng(0).integers(0, 204, (B, T), np.int32)
    batch = Batch(tokens, tokens, np.ones((B, T), np.float32), np.zeros(B, bool))

    def run(state: Any, n: int) -> tuple[Any, list[float]]:
        seconds = []
        for _ in range(n):
            began = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - began)
        return state, seconds

    state, _ = run(state, 3)
    alone: list[float] = []
    beside: list[list[float]] = []
    blocked: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(folder, CheckpointConfig()) as checkpoints,
    ):
        for number in range(flags.saves):
            state, seconds = run(state, flags.steps)
            alone += seconds
            began = time.perf_counter()
            checkpoints.save(number + 1, state, {"config": exp.to_dict()}, None)
            blocked.append(time.perf_counter() - began)
            state, seconds = run(state, flags.steps)
            beside.append(seconds)
            checkpoints.wait()
    usual = statistics.median(alone)
    slower = [sum(seconds) - usual * flags.steps for seconds in beside]
    every = CheckpointConfig().every
    lost = statistics.median(a + b for a, b in zip(blocked, slower, strict=True))
    result = {
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "step_seconds": usual,
        "blocked_seconds": blocked,
        "slower_seconds": slower,
        "every": every,
        "cost": lost / (every * usual),
    }
    print(json.dumps(result))
    if flags.out:
        about = {**machine(), "jax": jax.__version__, "backend": jax.default_backend()}
        report = {"machine": about, "result": result}
        pathlib.Path(flags.out).write_text(json.dumps(report, indent=1) + "\n")


def _flags(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--out")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
