"""Times token generation of txl_jax, and the authors' PyTorch model in turn with it.

    python -m benchmarks.generate_speed --size=12l_512 [--set generate.mem_len=512] \
        [--batch-size=1] [--lengths=512,1024] [--original=DIR --original-python=PYTHON]

For txl_jax the program times the loop of ``--mode=generate`` at temperature 1, from one piece of 64
tokens to the next. The authors have no code for generation, so the benchmark generates tokens one
at a time with their forward pass. With ``--lengths`` it also times txl_jax at several memory
lengths.

To generate one text, a program must read every weight and every memory slot for each token, so it
cannot be faster than this reading. On a CPU the benchmark also times the reading alone
(``reading``): numpy reads as many bytes, with a thread for each core.
"""

import argparse
import concurrent.futures
import os
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks.interleaved import add_flags, changes, in_dtypes, peers, report_of, tell, write
from benchmarks.measured_step import kernels_of, show
from benchmarks.sizes import experiment
from txl_jax.analysis.speed import random_params, time_alternating
from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import ExperimentConfig
from txl_jax.generation.generate import PER_DISPATCH, generate


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the results and writes them to the file ``--out``, if given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--lengths", default="", help="memory lengths beside the size's own")
    parser.add_argument("--trace", action="store_true", help="list a token's kernels on a GPU")
    flags = parser.parse_args(argv)
    unrolled = {"model.scan_layers": False}
    settings = {**unrolled, **changes(flags)}
    exp = experiment(flags.size, settings)
    programs = in_dtypes(flags, lambda exp: generating(exp, flags.batch_size), unrolled)
    for length in filter(None, flags.lengths.split(",")):
        of_length = experiment(flags.size, {**settings, "generate.mem_len": int(length)})
        programs[f"txl_jax, memory {length}"] = generating(of_length, flags.batch_size)
    n_bytes = bytes_of_token(exp, flags.batch_size)
    if jax.default_backend() == "cpu":
        programs["reading"] = reading(n_bytes)
    job = {
        "what": "generate",
        "experiment": exp.to_dict(),
        "vocab_size": exp.model.vocab_size,
        "batch_size": flags.batch_size,
        "steps": 8,
    }
    with peers(flags, job) as others:
        seconds = time_alternating({**programs, **others}, flags.rounds)
        kernels = kernels_of(programs["txl_jax"], PER_DISPATCH) if flags.trace else []
        about_others = {name: peer.about for name, peer in others.items()}
    report = {
        "benchmark": "generate_speed",
        "size": flags.size,
        "settings": changes(flags),
        "mem_len": exp.generate.mem_len,
        "bytes_of_token": n_bytes,
        "others": about_others,
        "kernels": kernels,
        **report_of(seconds, tokens=flags.batch_size),
    }
    tell(report)
    if kernels:
        show("kernels of a token", kernels)
    write(flags.out, report)


def bytes_of_token(exp: ExperimentConfig, rows: int) -> int:
    """Returns the bytes that a program must read to generate one token of each of ``rows`` texts.

    It reads the weights, and the cached keys, values and projected positions, all in float32. It
    does not read the weights that project positions, because the cache has the result.
    """
    c, m = exp.model, exp.generate.mem_len
    weights = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(c)):
        if not jax.tree_util.keystr(path).endswith("['position']"):
            weights += leaf.size
    return 4 * (weights + c.n_layer * c.n_head * c.d_head * m * (2 * rows + 1))


def reading(n_bytes: int) -> Callable[[], float]:
    """Returns a function that reads ``n_bytes`` with a thread per core; it returns the seconds."""
    threads = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(n_bytes // 4, np.float32), threads)
    pool = concurrent.futures.ThreadPoolExecutor(threads)

    def run() -> float:
        began = time.perf_counter()
        list(pool.map(np.max, parts))
        return time.perf_counter() - began

    return run


def generating(exp: ExperimentConfig, rows: int) -> Callable[[], float]:
    """Returns a function that generates the next piece of ``rows`` texts, all at the same time.

    The function returns the seconds divided by the number of tokens of one text's piece.
    """
    settings = {"length": 10_000_000, "mem_len": exp.generate.mem_len, "temperature": 1.0}
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
