"""Segments scored a second: ours, and the authors' PyTorch code beside it in the same run.

    python -m benchmarks.eval_speed --size=12l_512 [--set evaluate.mem_len=3800] \
        [--original=DIR --original-python=PYTHON]

Ours is ``--mode=evaluate``'s own loop under the size's protocol (segment, memory, window, streams),
timed from one segment to the next once it runs; the memory's slots are all there from the start, so
that every segment costs the same. Theirs has its memory full.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.interleaved import (
    add_flags,
    changes,
    in_turn,
    peers,
    published_peak,
    report_of,
    tell,
    write,
)
from benchmarks.sizes import experiment, random_tokens
from txl_jax.config import ExperimentConfig
from txl_jax.evaluation.evaluate import Evaluator
from txl_jax.planning.products import cut_of_protocol, of_layers, of_words
from txl_jax.training.sharding import make_mesh
from txl_jax.workdir import param_shapes


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--segments", type=int, default=4, help="in a round")
    parser.add_argument("--peak", type=float, help="operations per second that the machine has")
    flags = parser.parse_args(argv)
    exp = experiment(flags.size, {"model.scan_layers": False, **changes(flags)})
    job = {
        "what": "evaluate",
        "experiment": exp.to_dict(),
        "vocab_size": exp.model.vocab_size,
        "steps": flags.segments,
    }
    with peers(flags, job) as others:
        seconds = in_turn({"txl_jax": scoring(exp, flags.segments), **others}, flags.rounds)
        about_others = {name: peer.about for name, peer in others.items()}
    p, cut = exp.evaluate, cut_of_protocol(exp.evaluate)
    report = {
        "benchmark": "eval_speed",
        "size": flags.size,
        "settings": changes(flags),
        "others": about_others,
        **report_of(
            seconds,
            tokens=p.batch_size * p.seg_len,
            needed=of_layers(exp.model, cut, cached=True) + of_words(exp.model, cut),
            peak=flags.peak or published_peak(),
        ),
    }
    tell(report)
    write(flags.out, report)


def scoring(exp: ExperimentConfig, segments: int) -> Callable[[], float]:
    """A program: so many segments scored, after two that are not timed."""
    p = exp.evaluate
    text = random_tokens(p.batch_size * p.seg_len * (segments + 2) + 1, exp.model.vocab_size or 0)
    evaluator = Evaluator(exp.model, p, text, make_mesh(exp.mesh, exp.model, p.batch_size))
    params = random_params(exp)

    def run() -> float:
        times: list[float] = []
        evaluator.run(params, progress=lambda done, total: times.append(time.perf_counter()))
        return (times[-1] - times[1]) / (len(times) - 2)

    return run


def random_params(exp: ExperimentConfig) -> Any:
    """Parameters of the model's shapes, small random numbers."""
    shapes, treedef = jax.tree.flatten(param_shapes(exp.model))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = jax.jit(
        lambda keys: [
            0.02 * jax.random.normal(k, x.shape) for k, x in zip(keys, shapes, strict=True)
        ]
    )
    return jax.tree.unflatten(treedef, draw(keys))


if __name__ == "__main__":
    main()
