"""Everything that is to be known from one GPU, in slices: correctness, speed, a profile.

    python -m benchmarks.gpu_pass --out=DIR [--seconds=580] [--original=DIR] [--smoke]

Runs :func:`commands` in order, each in a process of its own with a time limit, and stops when
``--seconds`` are over; called again with the same ``--out`` it goes on with the first one that has
no result. Correctness comes first; an implementation that differs from the plain form is named, and
the rest still runs, so that it can be mended. After every command ``report.json`` holds all results
so far and ``report.md`` a table.

``--smoke`` is a rehearsal on a CPU: the same commands and report, with small sizes. What the
programs need on an H200, and in what time: ``python -m benchmarks.compile_recipes --gpu-pass``.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

BF16 = "--set=model.dtype=bfloat16"
RECIPES = {
    "enwik8_12l": 22,
    "enwik8_24l": 16,
    "wt103_base": 60,
    "wt103_large": 32,
    "lm1b_base": 56,
    "nvidia_wt103_base": 128,
    "nvidia_wt103_large": 32,
}
"""Recipes, with the streams that one device is given."""


def commands(original: str | None) -> Iterator[tuple[str, list[str], int]]:
    """Name, arguments after ``python -m`` and time limit in seconds, in their order."""
    yield "target", ["benchmarks.gpu_target"], 60
    yield "parity", ["pytest", "-m", "gpu", "-n", "0", "tests/test_kernels_triton.py"], 400
    attention = ["benchmarks.attention", "--implementations=reference,xla,triton"]
    yield "attention_768", [*attention, "--dtype=bfloat16", "--rows=16"], 200
    yield "attention_dropout", [*attention, "--dtype=bfloat16", "--rows=16", "--dropatt=0.1"], 200
    long = ["--implementations=triton", "--dtype=bfloat16", "--keys=4096,8192,16384"]
    yield "attention_16k", ["benchmarks.attention", *long], 200
    cudnn = ["--implementations=cudnn,xla", "--dtype=bfloat16", "--rows=16"]
    yield "attention_cudnn", ["benchmarks.attention", *cudnn], 200
    for recipe, rows in RECIPES.items():
        train = ["benchmarks.train_speed", f"--size={recipe}", BF16, "--steps=5"]
        train += [f"--set=train.batch_size={rows}", "--set=train.micro_batches=1"]
        yield f"train_{recipe}", train, 240
    for form in ("eager", "compile") if original else ():
        for recipe in ("nvidia_wt103_base", "enwik8_24l", "wt103_large"):
            peer = [f"--original={original}", f"--forms={form}", f"--size={recipe}", BF16]
            peer += [f"--set=train.batch_size={RECIPES[recipe]}", "--steps=5"]
            yield f"train_{recipe}_{form}", ["benchmarks.train_speed", *peer], 300
    for recipe in ("enwik8_24l", "wt103_large"):
        yield f"eval_{recipe}", ["benchmarks.eval_speed", f"--size={recipe}", BF16], 200
    yield "generate", ["benchmarks.generate_speed", "--size=enwik8_24l", BF16], 200
    yield "table9", ["benchmarks.table9", "--size=enwik8_24l", BF16, "--rounds=5"], 300


SMOKE = {
    "--implementations": "reference,xla",
    "--dtype": "float32",
    "--rows": "1",
    "--keys": "64",
    "--size": "tiny",
    "--set": "train.batch_size=2",
    "--steps": "1",
    "--rounds": "2",
}
"""What a rehearsal puts for the value of each flag."""


def small(words: list[str]) -> list[str]:
    """Returns a command with the sizes of a rehearsal."""
    if words[0] in ("pytest", "benchmarks.gpu_target"):
        return words
    flags = dict(word.partition("=")[::2] for word in words[1:])
    small = {flag: SMOKE.get(flag, value) for flag, value in flags.items()}
    small["--rounds"] = SMOKE["--rounds"]
    if words[0] == "benchmarks.attention":
        small |= {"--lengths": "32", "--heads": "2", "--d-head": "16"}
    if words[0] == "benchmarks.table9":
        small |= {"--lengths": "32,64"}
    return [words[0], *(f"{flag}={value}" for flag, value in small.items())]


def main(argv: list[str] | None = None) -> None:
    """Run what has no result yet until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=580)
    parser.add_argument("--original")
    parser.add_argument("--smoke", action="store_true", help="a rehearsal on a CPU")
    flags = parser.parse_args(argv)
    out, ends = pathlib.Path(flags.out), time.monotonic() + flags.seconds
    out.mkdir(parents=True, exist_ok=True)
    for name, command, limit in commands(flags.original):
        if (out / f"{name}.done").exists():
            continue
        left = ends - time.monotonic()
        if left < 30:
            print(f"out of time before {name}: call again with the same --out")
            break
        run(out, name, small(command) if flags.smoke else command, min(limit, left))
        collect(out)


def run(out: pathlib.Path, name: str, command: list[str], seconds: float) -> None:
    """One command: its output in NAME.txt, its figures in NAME.json, how it ended in NAME.done."""
    figures = [] if command[0] == "pytest" else [f"--out={out / name}.json"]
    began = time.monotonic()
    with open(out / f"{name}.txt", "w", encoding="utf-8") as text:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", *command, *figures],
                stdout=text,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
            said = "ok" if ended.returncode == 0 else f"ended with {ended.returncode}"
        except subprocess.TimeoutExpired:
            said = f"stopped after {seconds:.0f} s"
    print(f"{name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    (out / f"{name}.done").write_text(said + "\n", encoding="utf-8")


def collect(out: pathlib.Path) -> None:
    """``report.json`` and ``report.md`` of what is there."""
    results, lines = {}, ["| what | figure | ended |", "|---|---|---|"]
    for done in sorted(out.glob("*.done"), key=lambda path: path.stat().st_mtime):
        said = done.read_text(encoding="utf-8").strip()
        figures = done.with_suffix(".json")
        text = done.with_suffix(".txt").read_text(encoding="utf-8", errors="replace")
        results[done.stem] = {
            "ended": said,
            "figures": json.loads(figures.read_text()) if figures.exists() else None,
            "last_lines": text.splitlines()[-5:],
        }
        shown = [
            line
            for line in text.splitlines()
            if any(word in line for word in (" ms", "passed", "skipped"))
        ]
        lines += [f"| {done.stem} | {line.strip()} | {said} |" for line in shown or [""]]
    (out / "report.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
