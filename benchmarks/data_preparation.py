"""Measures time and memory to prepare and to stream texts as large as benchmark corpora.

    python -m benchmarks.data_preparation --folder=DIR [--scale=1.0] [--out=FILE.json] [--only=…]

Makes synthetic files in DIR (3 GB at scale 1; existing files are used again). Runs each row of this
table in a new process and prints a line of JSON for it, with the bar (the required value):

| name | text | bar |
|---|---|---|
| bytes | 100 MB as enwik8, the authors' protocol | 30 s, 1 GiB |
| words | 500 MB as WikiText-103: 267,735 words, Zipf | 8 min, 6 GiB |
| sentences | 10M words of One Billion Word, its 793,471 symbols | none |
| stream | these sentences, shuffled, batches of 224 x 32, with one seek | 1M tokens/s |

Seconds are wall-clock time. The processor time is printed too, because other programs can run on
the same machine. Peak memory is ``ru_maxrss`` of the process, which includes the pages of
memory-mapped files that the process read.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

BARS = {
    "bytes": {"seconds": 30, "peak_gib": 1},
    "words": {"seconds": 480, "peak_gib": 6},
    "sentences": {},
    "stream": {"tokens_per_second": 1_000_000},
}
WT103_SYMBOLS, LM1B_SYMBOLS = 267_735, 793_471


def main(argv: list[str] | None = None) -> None:
    """Makes the files, measures each in a child process, prints and writes the results."""
    flags = _flags(argv)
    folder = pathlib.Path(flags.folder)
    if flags.child:
        print(json.dumps(MEASURED[flags.child](folder)))
        return
    make_files(folder, flags.scale)
    results = [_in_a_child(name, flags) for name in flags.only]
    report = {"scale": flags.scale, "machine": machine(), "results": results}
    if flags.out:
        pathlib.Path(flags.out).write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Returns the date, the processor, how busy it is, and the versions of Python and numpy."""
    model = platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        model = next((x.split(": ")[1] for x in lines if x.startswith("model name")), model)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": model,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


# --------------------------------------------------------------------------------------
# The measurements, each in a process of its own.


def prepare_bytes(folder: pathlib.Path) -> dict[str, Any]:
    """Prepares the byte file; returns time, peak memory and size."""
    return _prepare("enwik8", folder / "enwik8", folder)


def prepare_words(folder: pathlib.Path) -> dict[str, Any]:
    """Prepares the word file; returns time, peak memory and size."""
    return _prepare("wt103", folder / "wt103", folder)


def prepare_sentences(folder: pathlib.Path) -> dict[str, Any]:
    """Prepares the sentences; returns time, peak memory and size."""
    return _prepare("lm1b", folder / "lm1b", folder)


def stream(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the tokens a second of shuffled batches of the prepared sentences.

    Also returns the seconds to read the first batch, and to jump to the batch of a far later step.
    """
    from txl_jax.data.corpus import load_corpus
    from txl_jax.data.streams import shuffled_streams

    corpus = load_corpus("lm1b", folder / "lm1b", cache_dir=folder / "cache-lm1b")
    batch = min(224, len(corpus.train))
    began = time.perf_counter()
    streams = shuffled_streams(corpus.train, batch, 32, seed=0)
    streams.at_step(0)
    first = time.perf_counter() - began
    steps = min(3 * streams.n_segments, 3000)
    began = time.perf_counter()
    n = sum(float(streams.at_step(step).weights.sum()) for step in range(steps))
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    streams.at_step(1_000_003)  # a step of an epoch that was not read before
    return {
        "seconds": seconds,
        "tokens": int(n),
        "tokens_per_second": round(n / seconds),
        "first_segment_seconds": first,
        "seek_seconds": time.perf_counter() - began,
    }


MEASURED = {
    "bytes": prepare_bytes,
    "words": prepare_words,
    "sentences": prepare_sentences,
    "stream": stream,
}


def _prepare(name: str, path: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    from txl_jax.data.corpus import load_corpus

    began = time.perf_counter()
    corpus = load_corpus(name, path, cache_dir=folder / f"cache-{name}")
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    load_corpus(name, path, cache_dir=folder / f"cache-{name}")
    return {
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_gib": used.ru_maxrss / 1024**2,
        "seconds_when_prepared": time.perf_counter() - began,
        "text_mb": sum(corpus.info["bytes"].values()) / 1e6,
        "tokens": corpus.info["tokens"],
        "symbols": len(corpus.vocab),
    }


def _in_a_child(name: str, flags: argparse.Namespace) -> dict[str, Any]:
    corpus = {"bytes": "enwik8", "words": "wt103", "sentences": "lm1b"}.get(name)
    if corpus is not None:
        for old in pathlib.Path(flags.folder).glob(f"cache-{corpus}/{corpus}-*"):
            subprocess.run(["rm", "-r", str(old)], check=True)  # from an earlier call
    command = [sys.executable, "-m", "benchmarks.data_preparation", f"--folder={flags.folder}"]
    output = subprocess.run([*command, f"--child={name}"], stdout=subprocess.PIPE, check=True)
    found = json.loads(output.stdout)
    result = {"name": name, **found, "bar": BARS[name] if flags.scale == 1 else {}}
    print(json.dumps(result), flush=True)
    return result


# --------------------------------------------------------------------------------------
# The files.


def make_files(folder: pathlib.Path, scale: float) -> None:
    """Writes the synthetic texts, unless they exist."""
    made = folder / f"made-{scale}"
    if made.exists():
        return
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "enwik8", _bytes(draw, int(100e6 * scale)))
    held_out = int(1.2e6 * min(scale, 1))
    for split, size in (("train", 500e6 * scale), ("valid", held_out), ("test", held_out)):
        words = _words(draw, WT103_SYMBOLS - 1, int(size), every=100)
        _write(folder / "wt103" / f"wiki.{split}.tokens", words)
    lm1b = folder / "lm1b"
    shard = lm1b / "training-monolingual.tokenized.shuffled" / "news.en-00001-of-00100"
    _write(shard, _words(draw, LM1B_SYMBOLS - 3, int(42e6 * scale), every=25))
    for split in ("valid", "test"):
        _write(lm1b / f"{split}.txt", _words(draw, LM1B_SYMBOLS - 3, held_out, every=25))
    ranked = (_word(i) for i in range(LM1B_SYMBOLS - 3))
    symbols = "".join(f"{symbol}\n" for symbol in ("<S>", "</S>", "<UNK>", *ranked))
    _write(lm1b / "1b_word_vocab.txt", [symbols.encode()])
    made.touch()


def _write(path: pathlib.Path, blocks: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.writelines(blocks)


def _bytes(draw: np.random.Generator, size: int) -> Iterator[bytes]:
    """Yields random bytes: 204 values and the newline, with frequencies like those of text."""
    values = np.array([10, *(v for v in range(32, 236))], np.uint8)
    shares = 1 / (np.arange(len(values)) + 3)
    for start in range(0, size, 1 << 22):
        n = min(1 << 22, size - start)
        yield draw.choice(values, n, p=shares / shares.sum()).tobytes()


def _word(rank: int) -> str:
    """Returns the word of a frequency rank from 0; frequent words are short."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    text = ""
    rank += 1
    while rank:
        rank, letter = divmod(rank, 26)
        text += letters[letter]
    return text


def _words(draw: np.random.Generator, symbols: int, size: int, every: int) -> Iterator[bytes]:
    """Yields ``size`` bytes of random words, which follow Zipf's law, in lines of ``every`` words.

    Each of the ``symbols`` words occurs at least once if the text is long enough.
    """
    words = np.array([_word(i) for i in range(symbols)], object)
    shares = 1 / (np.arange(symbols) + 2.7)
    ends = np.cumsum(shares / shares.sum())
    written, unseen = 0, 0
    while written < size:
        ranks = np.minimum(np.searchsorted(ends, draw.random(1 << 20)), symbols - 1)
        fresh = min(symbols - unseen, 1 << 16)
        ranks[:fresh] = np.arange(unseen, unseen + fresh)
        unseen += fresh
        chosen = words[ranks]
        chosen[every - 1 :: every] += " \n"
        block = " ".join(chosen.tolist()).encode()[: size - written]
        written += len(block)
        yield block


def _flags(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(MEASURED))
    parser.add_argument("--child", choices=list(MEASURED), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
