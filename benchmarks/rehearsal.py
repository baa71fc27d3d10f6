"""Compiles every program of every recipe for TPUs and GPUs, and writes a table.

    python -m benchmarks.rehearsal --out=DIR [--recipes=ptb,wt103_large] [--topologies=v5e:2x4]

Each row of the table comes from one command, ``python -m txl_jax.main --config=configs/RECIPE.py
--mode=compile --topology=TOPOLOGY``, with the recipe's own settings. The program writes the output
of the command to a file in DIR. A later call skips the commands whose file exists, and so continues
the earlier call. ``DIR/table.md`` has the rows of all files. Compiling needs libtpu, and the extra
``compile-cuda``, but no TPU and no GPU.
"""

import argparse
import pathlib
import re
from collections.abc import Iterator

from benchmarks.compile_recipes import UNKNOWN_VOCABULARY, command, compiled, recipes

TOPOLOGIES = ("v5e:2x4", "v6e:2x4", "h100:1x1x1", "h100:1x1x8")
_COLUMNS = (
    *("recipe", "on", "programs", "the largest, GiB", "of", "attention of the train step"),
    *("products", "floating-point atomics", "compiling, s"),
)
_PROGRAM = re.compile(r"^(\w[^:\n]*): [^\n]*\n  memory(.*?)(?=^\w|\Z)", re.MULTILINE | re.DOTALL)
_TOTAL = re.compile(r"total +([\d.]+) GiB(?: \+ ([\d.]+) GiB[^\n]*?)? of ([\d.]+) GiB")


def main(argv: list[str] | None = None) -> None:
    """Runs the commands that have no output file yet, and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--recipes", help="names by comma; all of them if left out")
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES))
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of a recipe")
    flags = parser.parse_args(argv)
    out = pathlib.Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    for recipe in flags.recipes.split(",") if flags.recipes else recipes():
        size = UNKNOWN_VOCABULARY.get(recipe)
        settings = [f"--config.model.vocab_size={size}"] if size else []
        for topology in flags.topologies.split(","):
            path = out / f"{recipe}-{topology.replace(':', '-')}.txt"
            if not path.exists():
                said = compiled(command(recipe, topology, settings), flags.seconds)
                path.write_text(said, encoding="utf-8")
                print(row(path), flush=True)
    (out / "table.md").write_text("\n".join(table(out)) + "\n", encoding="utf-8")


def row(path: pathlib.Path) -> str:
    """Returns the row for an output file; if nothing was compiled, it quotes the output's end."""
    recipe, kind, sides = path.stem.rsplit("-", 2)
    text = path.read_text(encoding="utf-8")
    programs = dict(_PROGRAM.findall(text))
    on = f"{kind}:{sides}"
    if not programs:
        return f"| `{recipe}` | {on} | {text.splitlines()[-2]} |" + " |" * (len(_COLUMNS) - 3)
    sizes = {name: _TOTAL.search(told) for name, told in programs.items()}
    whole = {n: float(m[1]) + float(m[2] or 0) for n, m in sizes.items() if m}
    largest = max(whole, key=lambda name: whole[name])
    refused = [name for name, told in programs.items() if "DOES NOT FIT" in told]
    size = f"{whole[largest]:.2f} ({largest})"
    if refused:
        size = f"does not fit ({', '.join(refused)})"
    of = next(m[3] for m in sizes.values() if m)
    attention = _first(r"attention +(.*)", programs.get("train", ""))
    products = _first(r"products +(.*)", programs.get("train", ""))
    counted = {n: _first(r"atomics: (.*)", told) for n, told in programs.items()}
    atomics = ", ".join(f"{k} ({n})" for n, k in counted.items() if k not in ("none", "")) or "none"
    seconds = sum(map(float, re.findall(r"compiled in +([\d.]+) s", text)))
    ended = "" if re.search(r"exit code [01] after", text.splitlines()[-1]) else ", not all"
    cells = (f"`{recipe}`", on, f"{len(programs)}{ended}", size, of, attention, products, atomics)
    return f"| {' | '.join((*cells, f'{seconds:.0f}'))} |"


def table(out: pathlib.Path) -> Iterator[str]:
    """Yields the lines of the table for all output files in a folder."""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|---" * len(_COLUMNS) + "|"
    for path in sorted(out.glob("*.txt")):
        yield row(path)


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


if __name__ == "__main__":
    main()
