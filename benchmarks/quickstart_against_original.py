"""Trains the authors' PyTorch code with the model, data and time of a txl_jax run; scores it.

    python -m benchmarks.quickstart_against_original --original=DIR --workdir=DIR --tokens=DIR \
        --seconds=S [--schedule-steps=N|auto] [--steps=N] --out=FILE.json

Run it with a Python that has torch and numpy; JAX is not needed. ``--workdir`` is a finished
txl_jax run: its ``config.json`` gives shape, optimizer, schedule, batch, lengths and protocols.
``--tokens`` is a folder with the run's prepared text: ``train.npy``, ``valid.npy`` and
``test.npy``. ``--original`` is the authors' ``pytorch/`` folder; ``benchmarks/original.py`` names
the edits that this folder needs.

``--seconds`` limits the time of the updates alone. The time of start-up (imports, reading,
building) is reported separately, and the time of scoring is part of neither. There are four ways to
schedule the learning rate and to stop:

- default: the schedule of ``train.steps`` updates, cut off if the time is over first;
- ``--schedule-steps=N``: warm-up and cosine are scaled to N updates, and training stops after them;
- ``--schedule-steps=auto``: warm-up and cosine are scaled to fill ``--seconds`` exactly, at any
  speed. The position of an update in the schedule is the share of the time that has passed;
- ``--steps=N`` without ``--seconds``: N updates, however long they take. Use it to compare losses
  after equal numbers of updates.
"""

import argparse
import datetime
import json
import math
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

WINDOW = 10
"""Number of updates in a window of the speed report and of the loss curve."""


def main(argv: list[str] | None = None) -> None:
    """Trains and scores the original as the flags say, prints and writes the report."""
    started = time.perf_counter()
    flags = _flags(argv)
    import torch  # here, because the report has the time of imports

    torch.set_num_threads(flags.threads)
    report = compare(flags, started)
    text = json.dumps(report, indent=2)
    print(text)
    pathlib.Path(flags.out).write_text(text + "\n")


def compare(flags: argparse.Namespace, started: float) -> dict[str, Any]:
    """Trains and scores; returns the report: settings, machine, speed and bits per token."""
    import numpy as np
    import torch

    from benchmarks import original

    workdir = pathlib.Path(flags.workdir)
    experiment = json.loads((workdir / "config.json").read_text())
    tokens = {
        split: np.load(pathlib.Path(flags.tokens) / f"{split}.npy", mmap_mode="r")
        for split in ("train", "valid", "test")
    }
    vocab_size = _vocab_size(workdir, experiment)
    largest = max(int(text.max()) for text in tokens.values())
    if largest >= vocab_size:
        raise SystemExit(f"--tokens: token {largest} is outside a vocabulary of {vocab_size}")

    model = original.build(flags.original, experiment, vocab_size)
    steps, warmup = _schedule(experiment, flags.schedule_steps)
    by_clock = flags.schedule_steps == "auto"
    stalled = _cpu_stalled_seconds()
    began = time.perf_counter()

    def rate(update: int) -> float:
        passed = (time.perf_counter() - began) / flags.seconds if by_clock else 0
        place = max(1, passed * steps) if by_clock else update
        return original.learning_rate(place, experiment["optimizer"], steps, warmup)

    history = _timed(
        original.updates(model, tokens["train"], experiment, rate),
        began,
        flags.seconds,
        math.inf if by_clock else flags.steps or steps,
    )
    seconds = history[-1][0]
    training = {
        "updates": len(history),
        "training_seconds": seconds,
        "startup_seconds": began - started,
        "start_to_end_seconds": began - started + seconds,
        "last_learning_rate": rate(len(history)),
        "tokens_per_second": _speed(history),
        "cpu_stalled_share": (_cpu_stalled_seconds() - stalled) / seconds,
        "curve": _curve(history),
    }
    return {
        "program": "kimiyoung/transformer-xl pytorch/, eager",
        "command": _command(flags),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"cpu": _cpu_model(), "threads": torch.get_num_threads()},
        "versions": {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "text": {key: experiment.get("corpus", {}).get(key) for key in ("name", "source_hash")},
        "model": experiment["model"] | {"vocab_size": vocab_size},
        "parameters": sum(p.numel() for p in model.parameters()),
        "train": experiment["train"],
        "optimizer": experiment["optimizer"],
        "seed": experiment["seed"],
        "schedule": {"steps": steps, "warmup_steps": warmup, "by_clock": by_clock},
        "training": training,
        "scores": _scores(model, tokens, experiment, flags.score.split(",")),
    }


def _scores(model: Any, tokens: dict[str, Any], experiment: dict[str, Any], names: list[str]):
    """Returns bits per token, seconds and the protocol for each score in ``names``."""
    from benchmarks import original

    evaluate, validate = experiment["evaluate"], experiment["validate"]
    protocols = {
        "test": evaluate,
        "test_without_memory": evaluate | {"mem_len": 0},
        "valid": validate,
    }
    scores = {}
    for name in filter(None, names):
        began = time.perf_counter()
        text = tokens[name.partition("_")[0]]
        result = original.score(model, text, protocols[name], experiment["model"])
        seconds = time.perf_counter() - began
        scores[name] = {**result, "seconds": seconds, "protocol": protocols[name]}
    return scores


def _timed(
    updates: Iterator[tuple[float, int]], began: float, seconds: float | None, limit: float
) -> list[tuple[float, float, int]]:
    """Makes updates; returns for each its end in seconds, its loss in nats and its tokens.

    Seconds count from ``began``. Stops after ``seconds``, or after ``limit`` updates.
    """
    history: list[tuple[float, float, int]] = []
    for loss, size in updates:
        history.append((time.perf_counter() - began, loss, size))
        if len(history) % 100 == 0:
            print(
                f"update {len(history)}  {history[-1][0]:.0f} s  {loss / math.log(2):.3f} bits",
                file=sys.stderr,
            )
        if len(history) >= limit or (seconds is not None and history[-1][0] >= seconds):
            break
    return history


def _schedule(experiment: dict[str, Any], squeezed: int | str | None) -> tuple[int, int]:
    """Returns the number of updates of the learning-rate schedule, and that of its warm-up.

    If ``squeezed`` is a number, the schedule gets this many updates, and its warm-up is scaled by
    the same factor. Otherwise both are those of the experiment: with ``auto``, only their ratio
    matters.
    """
    steps, warmup = experiment["train"]["steps"], experiment["optimizer"]["warmup_steps"]
    if not isinstance(squeezed, int):
        return steps, warmup
    return squeezed, math.ceil(warmup * squeezed / steps)


def _windows(history: list[tuple[float, float, int]]) -> Iterator[tuple[int, float, float, int]]:
    """Yields for each window its last update, the seconds at its end, mean loss and tokens/s."""
    before = 0.0
    for start in range(0, len(history), WINDOW):
        part = history[start : start + WINDOW]
        end = part[-1][0]
        tokens = sum(size for _, _, size in part)
        loss = sum(nats * size for _, nats, size in part) / tokens
        yield start + len(part), end, loss, round(tokens / (end - before))
        before = end


def _speed(history: list[tuple[float, float, int]]) -> dict[str, float]:
    """Returns the tokens/s of the complete run, and statistics of the tokens/s of its windows."""
    rates = sorted(rate for _, _, _, rate in _windows(history))
    quarter = len(rates) // 4
    return {
        "whole_run": round(sum(size for _, _, size in history) / history[-1][0]),
        "median": statistics.median(rates),
        "lower_quartile": rates[quarter],
        "upper_quartile": rates[-1 - quarter],
        "slowest": rates[0],
        "fastest": rates[-1],
        "updates_per_window": WINDOW,
    }


def _curve(history: list[tuple[float, float, int]]) -> list[tuple[int, float, float]]:
    """Returns update, seconds and mean training loss in bits per token, for each window."""
    return [
        (update, round(end, 2), round(loss / math.log(2), 4))
        for update, end, loss, _ in _windows(history)
    ]


def _vocab_size(workdir: pathlib.Path, experiment: dict[str, Any]) -> int:
    """Returns the vocabulary size: that of the experiment, else of vocab.json, else 256 (bytes)."""
    if experiment["model"]["vocab_size"]:
        return experiment["model"]["vocab_size"]
    vocab = workdir / "vocab.json"
    symbols = json.loads(vocab.read_text()).get("symbols") if vocab.is_file() else None
    return len(symbols) if symbols else 256


def _cpu_model() -> str:
    """Returns the processor's model name and its number of logical cores, as Linux gives them."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} logical cores" if names else platform.machine()


def _cpu_stalled_seconds() -> float:
    """Returns the seconds since boot in which a task waited for a core; 0 if unknown."""
    file = pathlib.Path("/proc/pressure/cpu")
    if not file.is_file():
        return 0.0
    return int(file.read_text().splitlines()[0].rpartition("total=")[2]) / 1e6


def _command(flags: argparse.Namespace) -> str:
    """Returns the command line, with names in place of this machine's paths."""
    places = {"original": "DIR", "workdir": "DIR", "tokens": "DIR", "out": "FILE"}
    given = {name: places.get(name, value) for name, value in flags.given.items()}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return " ".join(["python -m benchmarks.quickstart_against_original", *words])


def _flags(argv: list[str] | None) -> argparse.Namespace:
    """Returns the checked flags; ``given`` is a dict of those that are not ``None``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--original", required=True, help="the authors' pytorch/ folder, edited for this torch")
    add("--workdir", required=True, help="a finished txl_jax run; its config.json is read")
    add("--tokens", required=True, help="folder of train.npy, valid.npy, test.npy")
    add("--out", required=True, help="JSON file to write")
    add("--seconds", type=float, help="time for the updates; without it --steps must be given")
    add("--steps", type=int, help="stop after so many updates; the schedule stays as it is")
    add("--schedule-steps", type=_steps_or_auto, help="squeeze to N updates, or auto")
    add("--threads", type=int, default=2, help="torch threads")
    add("--score", default="test,test_without_memory,valid", help="what to score; may be empty")
    flags = parser.parse_args(argv)
    if flags.seconds is None and (flags.schedule_steps == "auto" or not _ends(flags)):
        parser.error("give --seconds, or --steps or --schedule-steps=N for a run without a limit")
    unknown = set(filter(None, flags.score.split(","))) - {"test", "test_without_memory", "valid"}
    if unknown:
        parser.error(f"--score={flags.score}: unknown {sorted(unknown)}")
    flags.given = {name: value for name, value in vars(flags).items() if value is not None}
    return flags


def _ends(flags: argparse.Namespace) -> bool:
    """Tells whether the flags give a number of updates after which training stops."""
    return flags.steps is not None or flags.schedule_steps is not None


def _steps_or_auto(text: str) -> int | str:
    return "auto" if text == "auto" else int(text)


if __name__ == "__main__":
    main()
