"""Compiles every recipe of ``configs/`` for GPUs; writes a table. No GPU is needed.

    python -m benchmarks.compile_recipes --out=DIR [--recipes=ptb,wt103_large] [--seconds=1200]
    python -m benchmarks.compile_recipes --out=DIR --gpu-pass
    python -m benchmarks.compile_recipes --out=DIR --ptb

For each recipe and topology (kind and number of GPUs), the program runs ``python -m txl_jax.main
--config=configs/RECIPE.py --mode=compile --topology=KIND:1x1xN`` in a process of its own. It writes
the output of the command to ``DIR/RECIPE-KIND-xN.txt``. A later call skips the commands whose file
exists, and so continues the earlier call. ``DIR/table.md`` has a row for each file. Its first line
has the date, the processor, and the versions of Python and of the packages that compile. Compiling
needs the extra ``compile-cuda``.

With ``--gpu-pass`` the program compiles what ``gpu.sh`` trains, for one H200, with the same batch
sizes, dtypes, and scanned or unrolled layers. With ``--ptb`` it compiles the candidates for Penn
Treebank, whose ``ptb_gpu.sh`` commands are in results/ptb/README.md.
"""

import argparse
import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks import gpu_pass
from benchmarks.interleaved import cpu_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
ON_EIGHT = (
    "enwik8_18l",
    "enwik8_24l",
    "lm1b_base",
    "lm1b_base_tf",
    "lm1b_large",
    "lm1b_large_tf",
    "nvidia_wt103_base",
    "nvidia_wt103_large",
    "table7",
    "text8_24l",
    "wt103_large",
    "wt103_large_tf",
)
"""Recipes for eight GPUs; the others are for one."""
LARGE = ("enwik8_24l", "wt103_large", "lm1b_large")
"""Recipes that are also compiled for H100s, and for one GPU with 8 micro-batches."""
UNKNOWN_VOCABULARY = {"my_text": 256, "my_tokens": 256}
"""Recipes for the user's own text, and the vocabulary size with which they are compiled."""
SLOWEST = ("ptb", "ptb_authors")
"""Recipes whose unrolled layers take minutes to compile; they come last."""
_WHEELS = ("jax", "jax-cuda13-plugin", "jax-triton", "triton", "nvidia-cuda-nvcc")
_COLUMNS = (
    *("recipe", "on", "train, GiB", "validate, GiB", "evaluate, GiB"),
    *("attention of the train step", "compiling train, validate, evaluate, s"),
)
_TOLD = re.MULTILINE | re.DOTALL


def main(argv: list[str] | None = None) -> None:
    """Runs the commands that have no output file yet, and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--recipes", help="names by comma; all of them if left out")
    parser.add_argument("--gpu-pass", action="store_true", help="what gpu.sh runs, for one H200")
    parser.add_argument("--ptb", action="store_true", help="what ptb_gpu.sh runs, for one H200")
    parser.add_argument("--seconds", type=float, default=1200, help="time limit of a recipe")
    flags = parser.parse_args(argv)
    out = pathlib.Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    chosen = flags.recipes.split(",") if flags.recipes else recipes()
    jobs = recipe_jobs(chosen)
    if flags.gpu_pass or flags.ptb:
        jobs = gpu_pass_jobs() if flags.gpu_pass else ptb_jobs()
    for name, words in jobs:
        path = out / f"{name}.txt"
        if not path.exists():
            path.write_text(compiled(words, flags.seconds), encoding="utf-8")
            print(row(path), flush=True)
    (out / "table.md").write_text(table(out), encoding="utf-8")


def recipes() -> list[str]:
    """Returns the name of every recipe, the slowest last."""
    names = [p.stem for p in sorted((ROOT / "configs").glob("*.py")) if p.stem != "__init__"]
    return sorted(names, key=lambda name: name in SLOWEST)


def topologies(recipe: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each topology that a recipe is compiled for, and the extra flags of that command."""
    for kind in ("h200", "h100") if recipe in LARGE else ("h200",):
        yield f"{kind}:1x1x{8 if recipe in ON_EIGHT else 1}", []
        if recipe in LARGE:
            yield f"{kind}:1x1x1", ["--config.train.micro_batches=8"]


Jobs = Iterator[tuple[str, list[str]]]
"""For each job the name of its output file, and the arguments of ``python`` in its command."""


def recipe_jobs(chosen: list[str]) -> Jobs:
    """Yields a job for each recipe and topology."""
    for recipe in chosen:
        size = UNKNOWN_VOCABULARY.get(recipe)
        settings = [f"--config.model.vocab_size={size}"] if size else []
        for topology, more in topologies(recipe):
            name = f"{recipe}-{topology.replace(':1x1', '-')}"
            yield name, command(recipe, topology, settings + more)


def gpu_pass_jobs() -> Jobs:
    """Yields a job for each run of gpu.sh: a recipe in one dtype, with layers scanned or not."""
    for name, words, _ in gpu_pass.commands(None):
        if name.startswith("train_"):
            settings = [w.replace("--set=", "--config.") for w in words if w.startswith("--set=")]
            (recipe,) = (w.removeprefix("--size=") for w in words if w.startswith("--size="))
            job = f"{name.removeprefix('train_')}-h200-x1"
            yield job, command(recipe, "h200:1x1x1", settings)


def ptb_jobs() -> Jobs:
    """Yields a job for each candidate for Penn Treebank in results/ptb/README.md."""
    page = (ROOT / "benchmarks" / "results" / "ptb" / "README.md").read_text(encoding="utf-8")
    for line in page.replace("\\\n", " ").splitlines():
        if line.startswith("benchmarks/ptb_gpu.sh "):
            words = shlex.split(line)
            settings = [word for word in words if word.startswith("--config.")]
            recipe, candidate = pathlib.Path(words[1]).stem, pathlib.Path(words[3]).name
            yield f"{candidate}-h200-x1", command(recipe, "h200:1x1x1", settings)


def command(recipe: str, topology: str, settings: list[str]) -> list[str]:
    """Returns the arguments of ``python`` in the command that compiles a recipe."""
    words = ["-m", "txl_jax.main", f"--config=configs/{recipe}.py", "--mode=compile"]
    return [*words, f"--topology={topology}", *settings]


def compiled(words: list[str], seconds: float) -> str:
    """Returns a text with a command, its output, and how it ended.

    ``words`` are the arguments of ``python``. The command is stopped after ``seconds``.
    """
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        said = ended.stdout + (ended.stderr if ended.returncode else "")
        code = f"exit code {ended.returncode}"
    except subprocess.TimeoutExpired as stopped:
        said = (stopped.stdout or b"").decode(errors="replace")
        code = "stopped"
    took = time.monotonic() - began
    return f"$ python {shlex.join(words)}\n{said}{code} after {took:.0f} s\n"


def row(path: pathlib.Path) -> str:
    """Returns the table's row for an output file."""
    return f"| {' | '.join(cells(path))} |"


def cells(path: pathlib.Path) -> list[str]:
    """Returns the cells of the row for an output file, in the order of ``_COLUMNS``."""
    recipe, kind, number = path.stem.rsplit("-", 2)
    whole = path.read_text(encoding="utf-8")
    parts = dict(re.findall(r"^(train|validate|evaluate): (.*?compiled in.*?$)", whole, _TOLD))
    text = "\n".join(parts.values()) or whole
    totals = re.findall(r"^  total +([\d.]+) GiB(?: \+ ([\d.]+) GiB)?", text, re.MULTILINE)
    sizes = [f"{float(own) + float(held or 0):.2f}" for own, held in totals]
    sizes = ["does not fit"] * text.count("DOES NOT FIT: ") + sizes
    sizes += ["-"] * (3 - len(sizes))
    attention = re.findall(r"^  attention +(.*)", text, re.MULTILINE)
    fused = attention[0].partition(" (")[2].rstrip(")") if attention else text.splitlines()[-1]
    seconds = re.findall(r"^  compiled in +([\d.]+) s", text, re.MULTILINE)
    on = f"{number.removeprefix('x')} x {kind.upper()}"
    took = ", ".join(f"{float(s):.0f}" for s in seconds)
    return [f"`{recipe}`", on, *sizes, fused, took]


def table(out: pathlib.Path) -> str:
    """Returns the date, machine and versions, and below them the table of a folder's files."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _WHEELS)
    python = f"Python {platform.python_version()}, {versions}"
    about = f"{datetime.date.today()}, {cpu_name()}, {os.cpu_count()} cores; {python}"
    rows = map(row, sorted(out.glob("*-x*.txt")))
    head = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    return "\n".join([about, "", *head, *rows, ""])


if __name__ == "__main__":
    main()
