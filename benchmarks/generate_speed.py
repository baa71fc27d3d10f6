"""Tokens generated a second: ours, and the authors' PyTorch model beside it in the same run.

    python -m benchmarks.generate_speed --size=12l_512 [--set generate.mem_len=512] \
        [--batch-size=1] [--lengths=512,1024] [--original=DIR --original-python=PYTHON]

Ours is ``--mode=generate``'s own loop, drawing at temperature 1, timed from one piece of 64 tokens
to the next once it runs. Theirs has no loop: tokens are made one at a time from its forward pass.
With ``--lengths`` ours is timed at several memory lengths in turn, and cost for each is printed.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from benchmarks.interleaved import add_flags, changes, peers, report_of, tell, write
from benchmarks.sizes import experiment
from txl_jax.config import ExperimentConfig
from txl_jax.evaluation.speed import random_params
from txl_jax.evaluation.timing import in_turn
from txl_jax.generation.generate import generate


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--lengths", default="", help="memory lengths beside the size's own")
    flags = parser.parse_args(argv)
    settings = {"model.scan_layers": False, **changes(flags)}
    exp = experiment(flags.size, settings)
    programs = {"txl_jax": generating(exp, flags.batch_size)}
    for length in filter(None, flags.lengths.split(",")):
        of_length = experiment(flags.size, {**settings, "generate.mem_len": int(length)})
        programs[f"txl_jax, memory {length}"] = generating(of_length, flags.batch_size)
    job = {
        "what": "generate",
        "experiment": exp.to_dict(),
        "vocab_size": exp.model.vocab_size,
        "batch_size": flags.batch_size,
        "steps": 8,
    }
    with peers(flags, job) as others:
        seconds = in_turn({**programs, **others}, flags.rounds)
        about_others = {name: peer.about for name, peer in others.items()}
    report = {
        "benchmark": "generate_speed",
        "size": flags.size,
        "settings": changes(flags),
        "mem_len": exp.generate.mem_len,
        "others": about_others,
        **report_of(seconds, tokens=flags.batch_size),
    }
    tell(report)
    write(flags.out, report)


def generating(exp: ExperimentConfig, rows: int) -> Callable[[], float]:
    """A program: the next piece of an endless text of each row; seconds of a token of all rows."""
    settings = {"length": 2**30, "mem_len": exp.generate.mem_len, "temperature": 1.0}
    c = ExperimentConfig.from_dict({**exp.to_dict(), "generate": settings}).generate
    prompts = [np.array([1], np.int32)] * rows
    pieces = generate(exp.model, random_params(exp.model), prompts, c)

    def run() -> float:
        began = time.perf_counter()
        piece = next(pieces)
        return (time.perf_counter() - began) / piece.tokens.shape[1]

    return run


if __name__ == "__main__":
    main()
