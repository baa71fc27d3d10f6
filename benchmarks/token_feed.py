"""Measures time and memory to load a large array of token ids, and the speed of its batches.

    python -m benchmarks.token_feed [--tokens=1000000000] [--rounds=7] [--out=FILE.json]

Writes an array of uint16 (2 GB for 1e9 tokens) to a temporary folder. It is measured twice: without
documents, and with a file of the starts of documents, which have 1000 tokens on average. Each time
a new process loads the array, and reads every token to find the largest id. Then it reads batches
(`read`), and feeds batches to the device through a thread as training does (`fed`). This table has
the requirements for 1e9 tokens (the program does not check them):

| figure | bar |
|---|---|
| `peak_gib`, resident memory of the process with Python, JAX and the pages of the file | 1 |
| tokens a second of `fed` for each size | 5,000,000 |

All rounds read equally many tokens, each round from another place of the array. The output has the
median and the extremes over the rounds. The array was just written, so the operating system still
has it in its file cache.
"""

import argparse
import collections
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.data_preparation import machine

SIZES = ((8, 64), (22, 512))  # rows and tokens of a segment: a small run, and enwik8_12l
READ = 4_000_000  # tokens per round
MEAN = 1000  # average tokens of a document
CHUNK = 1 << 24


def main(argv: list[str] | None = None) -> None:
    """Writes the array, measures it in child processes, prints and writes the results."""
    flags = _flags(argv)
    if flags.child:
        print(json.dumps(measure(pathlib.Path(flags.child), flags.rounds)))
        return
    report: dict[str, Any] = {"tokens": flags.tokens, "machine": machine(), "results": []}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "ids.bin"
        write_tokens(path, flags.tokens)
        for documents in (False, True):
            if documents:
                np.save(path.with_suffix(".starts.npy"), draw_starts(flags.tokens))
            command = [sys.executable, "-m", "benchmarks.token_feed", f"--child={path}"]
            command.append(f"--rounds={flags.rounds}")
            output = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            result = {"documents": documents, **json.loads(output.stdout)}
            print(json.dumps(result), flush=True)
            report["results"].append(result)
    if flags.out:
        pathlib.Path(flags.out).write_text(json.dumps(report, indent=1) + "\n")


def write_tokens(path: pathlib.Path, n: int) -> None:
    """Writes ``n`` random ids below 50,257 as uint16."""
    rng = np.random.default_rng(0)
    with open(path, "wb") as file:
        for start in range(0, n, CHUNK):
            size = min(CHUNK, n - start)
            rng.integers(50257, size=size, dtype=np.uint16).tofile(file)


def draw_starts(n: int) -> np.ndarray:
    """Returns random positions (int64) in ``n`` tokens at which documents start.

    A document has 2 to ``2 * MEAN - 1`` tokens.
    """
    sizes = np.random.default_rng(1).integers(2, 2 * MEAN, n // MEAN + n // (20 * MEAN) + 2)
    starts = np.cumsum([0, *sizes])
    return starts[starts < n - 1]


def measure(path: pathlib.Path, rounds: int) -> dict[str, Any]:
    """Loads the array and reads batches of it; returns seconds, peak memory and tokens a second."""
    import jax

    from txl_jax.data.corpus import load_corpus
    from txl_jax.data.streams import shuffled_streams

    began = time.perf_counter()
    corpus = load_corpus("tokens", path)
    ready = time.perf_counter() - began
    read, fed = {}, {}
    for b, t in SIZES:
        streams = shuffled_streams(corpus.train, b, t, seed=0)
        rates = [_rates(streams, n / rounds) for n in range(rounds)]
        read[f"{b}x{t}"], fed[f"{b}x{t}"] = map(_spread, zip(*rates, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    found = {"ready_seconds": ready, "peak_gib": peak, "read": read, "fed": fed}
    return {**found, "jax": jax.__version__}


def _spread(rates: Sequence[float]) -> dict[str, int]:
    middle = round(statistics.median(rates))
    return {"tokens_per_second": middle, "lowest": round(min(rates)), "highest": round(max(rates))}


def _rates(streams: Any, share: float) -> tuple[float, float]:
    """Returns tokens a second of reading batches, and of feeding them to the device.

    Each is timed for about READ tokens; the first is at ``share`` (0 to 1) of the array.
    """
    import jax

    from txl_jax.data.feed import training_batch, training_feed

    size = streams.batch_size * streams.seg_len
    steps = max(1, min(READ // size, streams.n_segments // 4))
    first = min(int(share * streams.n_segments), streams.n_segments - 2 * steps - 1)
    began = time.perf_counter()
    for step in range(first, first + steps):
        training_batch(streams, step, "reset")
    read, first = time.perf_counter() - began, first + steps
    feed = training_feed(streams, first, first + steps + 1, "reset", 1, None)
    next(feed)  # compiles
    began = time.perf_counter()
    (last,) = collections.deque(feed, maxlen=1)
    jax.block_until_ready(last)
    return steps * size / read, steps * size / (time.perf_counter() - began)


def _flags(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
