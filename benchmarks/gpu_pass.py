"""Runs every test and benchmark for one GPU, in calls of limited time that continue each other.

    python -m benchmarks.gpu_pass --out=DIR [--seconds=580] [--original=DIR] [--smoke]

A call first checks the packages and the device (``benchmarks.gpu_image``), and ends with exit code
1 if they cannot be used. Then it runs the commands of :func:`commands` in order, each in a process
of its own with a time limit, and stops after ``--seconds``. A command that is cut off when the call
ends has no result. The next call with the same ``--out`` continues with the first command that has
no result. Tests of correctness come before benchmarks, and a skipped test counts as a failure. If
an implementation of attention differs from the plain form, the output names it, and the other
commands still run. After every command, ``report.json`` has all results so far, and ``report.md`` a
table of them. The exit code is 1 if a command failed.

``--smoke`` is a rehearsal on a CPU: the same commands and report, with small sizes. ``python -m
benchmarks.compile_recipes --gpu-pass`` shows how much memory the programs need on an H200, and how
long they take to compile.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Iterator

DTYPES = {"bf16": "bfloat16", "f32": "float32"}
LAYERS = {"unrolled": False, "scan": True}
RECIPES = {
    "enwik8_12l": 22,
    "enwik8_24l": 16,
    "wt103_base": 60,
    "wt103_large": 32,
    "lm1b_base": 56,
    "nvidia_wt103_base": 128,
    "nvidia_wt103_large": 32,
}
"""Recipes, and the batch size of each on one device."""


Command = tuple[str, list[str], int]
"""A command: its name, the arguments after ``python -m``, and its time limit in seconds."""


def commands(original: str | None) -> Iterator[Command]:
    """Yields the commands in order, the most important results first."""
    yield "target", ["benchmarks.gpu_target"], 60
    workers = ["-n", "4", "--dist", "load"]
    yield "parity", ["pytest", "-m", "gpu", *workers, "tests/model/test_kernels_triton.py"], 400
    yield from training("bf16", "unrolled")
    for form in ("eager", "compile") if original else ():
        for recipe in ("enwik8_12l", "nvidia_wt103_base", "enwik8_24l", "wt103_large"):
            peer = [f"--original={original}", f"--forms={form}", f"--size={recipe}"]
            peer += [f"--set=train.batch_size={RECIPES[recipe]}", "--steps=5", of_dtype("bf16")]
            yield f"train_{recipe}_{form}", ["benchmarks.train_speed", *peer], 300
    for recipe in ("enwik8_24l", "wt103_large"):
        words = [f"--size={recipe}", f"--set=train.batch_size={RECIPES[recipe]}", of_dtype("bf16")]
        yield f"kernels_{recipe}", ["benchmarks.measured_step", *words], 200
    for short, dtype in DTYPES.items():
        yield from attention(short, dtype)
    for short in DTYPES:
        for recipe in ("enwik8_24l", "wt103_large"):
            words = ["benchmarks.eval_speed", f"--size={recipe}", of_dtype(short), "--trace"]
            yield f"eval_{recipe}_{short}", words, 200
        words = ["benchmarks.generate_speed", "--size=enwik8_24l", of_dtype(short), "--trace"]
        yield f"generate_{short}", words, 200
    table9 = ["benchmarks.table9", "--size=enwik8_24l", of_dtype("bf16"), "--rounds=5"]
    yield "table9", table9, 300
    yield from training("f32", "unrolled")
    for short in DTYPES:
        yield from training(short, "scan")


def of_dtype(short: str) -> str:
    """Returns the flag that sets the compute dtype."""
    return f"--set=model.dtype={DTYPES[short]}"


def attention(short: str, dtype: str) -> Iterator[Command]:
    """Yields the commands that time attention without the rest of the model."""
    words = ["benchmarks.attention", f"--dtype={dtype}"]
    three = [*words, "--implementations=reference,xla,triton", "--rows=16"]
    yield f"attention_768_{short}", three, 200
    yield f"attention_dropout_{short}", [*three, "--dropatt=0.1"], 200
    long = ["--implementations=triton", "--keys=4096,8192,16384"]
    yield f"attention_16k_{short}", [*words, *long], 200


def training(short: str, layers: str) -> Iterator[Command]:
    """Yields a command for every recipe of RECIPES that times its training update.

    ``short`` is a key of DTYPES. ``layers`` is a key of LAYERS: ``scan`` or ``unrolled``.
    """
    for recipe, rows in RECIPES.items():
        words = ["benchmarks.train_speed", f"--size={recipe}", of_dtype(short), "--steps=5"]
        words += [f"--set=model.scan_layers={LAYERS[layers]}", f"--set=train.batch_size={rows}"]
        yield f"train_{recipe}_{short}_{layers}", [*words, "--set=train.micro_batches=1"], 240


SMOKE = {
    "--implementations": "reference,xla",
    "--rows": "1",
    "--keys": "64",
    "--size": "tiny",
    "--steps": "1",
}
"""The value that each flag gets in a rehearsal."""

SMOKE_TESTS = ["tests/model/test_kernels.py", "-k", "dropout_drops or refused_by_name"]
"""The tests of a rehearsal, which need no GPU."""

LEAST = 30
"""Another command starts only if the call has at least this many seconds left."""

IMAGE_SECONDS = 120
"""The time limit in seconds of ``benchmarks.gpu_image``, which every call runs first."""


def small(words: list[str]) -> list[str]:
    """Returns the command with small sizes for a rehearsal; dtype and scanning do not change."""
    if words[0] == "benchmarks.gpu_target":
        return words
    if words[0] == "pytest":
        return ["pytest", "-n", "0", *SMOKE_TESTS]
    flags = [word.partition("=")[::2] for word in words[1:]]
    flags = [(flag, SMOKE.get(flag, value)) for flag, value in flags if flag != "--rounds"]
    flags = [
        (flag, "train.batch_size=2" if value.startswith("train.batch_size=") else value)
        for flag, value in flags
    ]
    flags.append(("--rounds", "2"))
    if words[0] == "benchmarks.attention":
        flags += [("--lengths", "32"), ("--heads", "2"), ("--d-head", "16")]
    if words[0] == "benchmarks.table9":
        flags.append(("--lengths", "32,64"))
    return [words[0], *(f"{flag}={value}" if value else flag for flag, value in flags)]


def environment(command: list[str], smoke: bool = False) -> dict[str, str]:
    """Returns the environment of a command, in which JAX uses the GPU and optimises fully.

    In a rehearsal (``smoke``), JAX uses the CPU. If ``JAX_PLATFORMS`` and
    ``JAX_DISABLE_MOST_OPTIMIZATIONS`` are not set, tests/conftest.py chooses the CPU and reduced
    optimisation.
    """
    platforms = "cuda" if command[0] == "pytest" else "cuda,cpu"
    chosen = {"JAX_PLATFORMS": "cpu" if smoke else platforms, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    return {**os.environ, **chosen}


def main(argv: list[str] | None = None) -> None:
    """Runs the commands that have no result yet, until the time of the call is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=580)
    parser.add_argument("--original")
    parser.add_argument("--smoke", action="store_true", help="a rehearsal on a CPU")
    flags = parser.parse_args(argv)
    out, ends = pathlib.Path(flags.out), time.monotonic() + flags.seconds
    out.mkdir(parents=True, exist_ok=True)
    image = ["benchmarks.gpu_image", *(["--smoke"] if flags.smoke else [])]
    if run(out, "image", image, IMAGE_SECONDS, IMAGE_SECONDS, flags.smoke) != "ok":
        print((out / "image.txt").read_text(encoding="utf-8", errors="replace"))
        sys.exit(1)
    for name, command, limit in commands(flags.original):
        if (out / f"{name}.done").exists():
            continue
        command, left = small(command) if flags.smoke else command, ends - time.monotonic()
        if left < LEAST or run(out, name, command, limit, left, flags.smoke) is None:
            print(f"out of time before {name} was complete: call again with the same --out")
            break
        collect(out)
    done = {path.stem: path.read_text(encoding="utf-8").strip() for path in out.glob("*.done")}
    if failed := sorted(name for name, said in done.items() if said != "ok"):
        print(f"not ok: {', '.join(failed)}; remove NAME.done in {out} to repeat one")
        sys.exit(1)


def run(
    out: pathlib.Path, name: str, command: list[str], limit: float, left: float, smoke: bool
) -> str | None:
    """Runs one command; returns how it ended, or ``None`` if the call ended before the command.

    The command has at most ``limit`` seconds, and the call has ``left`` seconds left. The output
    goes to NAME.txt, and how the command ended to NAME.done; a benchmark writes its results to
    NAME.json. After ``None`` there is no NAME.done, so the next call runs the command again.
    """
    tests = out / f"{name}.xml" if command[0] == "pytest" else None
    files = f"--junitxml={tests}" if tests else f"--out={out / name}.json"
    for old in filter(None, (tests, out / f"{name}.done", out / f"{name}.json")):
        old.unlink(missing_ok=True)
    began = time.monotonic()
    with open(out / f"{name}.txt", "w", encoding="utf-8") as text:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, files],
            stdout=text,
            stderr=subprocess.STDOUT,
            env=environment(command, smoke),
            start_new_session=True,
        )
        code = finish(process, min(limit, left))
    if code is None and left < limit:
        return None
    if code is None:
        said = f"stopped after {limit:.0f} s"
    else:
        said = f"ended with {code}" if code else verdict(tests)
    print(f"{name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    (out / f"{name}.done").write_text(said + "\n", encoding="utf-8")
    return said


def finish(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Waits for a process that leads a process group; returns its exit code.

    After ``seconds``, kills all processes of the group and returns ``None``. At an exception, kills
    the group too and raises the exception.
    """
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def verdict(tests: pathlib.Path | None) -> str:
    """Returns ``ok``, or why a command with exit code 0 failed: it skipped tests or ran none.

    ``tests`` is the report that pytest wrote, or ``None`` if the command is not pytest.
    """
    if tests is None:
        return "ok"
    suites = xml.etree.ElementTree.parse(tests).getroot().iter("testsuite")
    counts = [(int(suite.get("tests", 0)), int(suite.get("skipped", 0))) for suite in suites]
    number, skipped = (sum(column) for column in zip(*counts, strict=True))
    if skipped or not number:
        return f"{skipped} of {number} tests skipped: not a pass"
    return "ok"


def collect(out: pathlib.Path) -> None:
    """Writes ``report.json`` and ``report.md`` from the results so far."""
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
    for number in (signal.SIGTERM, signal.SIGHUP):  # the signal ends the running command too
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    main()
