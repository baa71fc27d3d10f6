"""Measures how long a command takes to its first training step, and how long ``--help`` takes.

    python -m benchmarks.start_up [--rounds=5] [--out=FILE.json]

Every command runs in a process of its own. Two commands train: ``quickstart:smoke``, and a model of
24 scanned layers with the widths of ``enwik8_24l:smoke``, which trains on random letters. Two times
are measured: until the command prints that the step is compiled, and until it prints the losses of
the first step. Then the benchmark ends the command. A run ``without`` cached programs starts with
an empty folder of compiled programs. The run ``with`` cached programs comes next and finds those
that the run before it stored. The text is prepared before the rounds.
"""

import argparse
import os
import pathlib
import random
import shutil
import string
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.interleaved import ROOT, machine, write
from txl_jax.analysis.speed import summary

COMMAND = [sys.executable, "-m", "txl_jax.main"]
_24_LAYERS = {"model.n_layer": "24", "model.scan_layers": "True"}
_OWN_TEXT = {"data.name": "text", "data.protocol": "None", "data.vocab": "char"}
RECIPES = {
    "quickstart": ["--config=quickstart:smoke"],
    "24 layers": [
        "--config=enwik8_24l:smoke",
        *(f"--config.{key}={value}" for key, value in {**_24_LAYERS, **_OWN_TEXT}.items()),
    ],
}
"""Arguments of the commands that train; ``main`` adds ``--config.data.path`` to the second."""


def main(argv: list[str] | None = None) -> None:
    """Times all commands in turn, prints the results and writes them to ``--out``, if given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="JSON file to write")
    flags = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        commands = {name: [*COMMAND, *words] for name, words in RECIPES.items()}
        text = pathlib.Path(folder) / "text.txt"
        letters = random.Random(0).choices(string.ascii_lowercase + " ", k=60_000)
        text.write_text("".join(letters), encoding="ascii")  # the same for each version of the code
        commands["24 layers"].append(f"--config.data.path={text}")
        for command in commands.values():
            first_step(command, pathlib.Path(folder))  # prepares the text
        for _ in range(flags.rounds):
            for name, found in one_round(commands, pathlib.Path(folder)).items():
                seconds.setdefault(name, []).append(found)
    rows = {name: summary(found) for name, found in seconds.items()}
    for name, row in rows.items():
        spread = f"({row['lower_quartile']:.2f} to {row['upper_quartile']:.2f})"
        print(f"{name:<55} {row['median']:6.2f} s {spread}", flush=True)
    write(flags.out, {"benchmark": "start_up", "machine": machine(), "rows": rows})


def one_round(commands: dict[str, list[str]], folder: pathlib.Path) -> dict[str, float]:
    """Returns the seconds of every command by name, without and then with cached programs.

    A command that trains has two times: until its first step begins, and until it prints losses.
    """
    start = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], stdout=subprocess.DEVNULL, cwd=ROOT, check=False)
    seconds = {"--help": time.perf_counter() - start}
    for name, command in commands.items():
        shutil.rmtree(folder / "data" / "compiled")
        for cached in ("without", "with"):
            begins, printed = first_step(command, folder)
            seconds[f"{name}, {cached} cached programs: step begins"] = begins
            seconds[f"{name}, {cached} cached programs: losses printed"] = printed
    return seconds


def first_step(command: list[str], folder: pathlib.Path) -> tuple[float, float]:
    """Starts a run; returns the seconds until its first step begins, and until it prints losses."""
    environment: dict[str, Any] = {**os.environ, "TXL_DATA_DIR": str(folder / "data")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    shutil.rmtree(folder / "run", ignore_errors=True)
    words = [f"--workdir={folder / 'run'}", "--config.train.log_every=1"]
    begins, start = 0.0, time.perf_counter()
    with subprocess.Popen(
        [*command, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        cwd=ROOT, env=environment,
    ) as process:  # fmt: skip
        assert process.stderr
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("compiled the step"):
                begins = time.perf_counter() - start
            if line.startswith("step "):
                printed = time.perf_counter() - start
                process.kill()
                return begins, printed
    raise SystemExit("the command ended before its first step:\n" + "".join(lines))


if __name__ == "__main__":
    main()
