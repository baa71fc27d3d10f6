"""Times evaluation segments of txl_jax, and the authors' PyTorch code in turn with them.

    python -m benchmarks.eval_speed --size=12l_512 [--set evaluate.mem_len=3800] \
        [--set evaluate.clamp_len=1000] \
        [--original=DIR --original-python=PYTHON]

For txl_jax the program times the loop of ``--mode=evaluate`` with the protocol of the chosen size
(segment length, memory length, attention window, number of streams). The time of a segment is the
mean over several segments, after two that are not timed. All memory slots are allocated at the
start, so every segment costs the same. The authors' model gets a full memory at the start.
"""

import argparse

from benchmarks.interleaved import (
    add_flags,
    changes,
    in_dtypes,
    peers,
    published_peak,
    report_of,
    tell,
    write,
)
from benchmarks.measured_step import kernels_of, show
from benchmarks.sizes import experiment
from txl_jax.analysis.speed import random_params, scoring, time_alternating
from txl_jax.evaluation.protocols import under_protocol
from txl_jax.model.flops import layer_flops, vocabulary_flops

UNROLLED = {"model.scan_layers": False}


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the results and writes them to the file ``--out``, if given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--segments", type=int, default=4, help="in a round")
    parser.add_argument("--peak", type=float, help="operations per second that the machine has")
    parser.add_argument("--trace", action="store_true", help="list a segment's kernels on a GPU")
    flags = parser.parse_args(argv)
    exp = experiment(flags.size, {**UNROLLED, **changes(flags)})
    job = {
        "what": "evaluate",
        "experiment": exp.to_dict(),
        "vocab_size": exp.model.vocab_size,
        "steps": flags.segments,
    }
    with peers(flags, job) as others:
        score = lambda e: scoring(e.model, e.evaluate, random_params(e.model), flags.segments)
        ours = in_dtypes(flags, score, UNROLLED)
        seconds = time_alternating({**ours, **others}, flags.rounds)
        untimed = 2  # segments that :func:`scoring` runs before it times
        units = flags.segments + untimed
        kernels = kernels_of(ours["txl_jax"], units) if flags.trace else []
        about_others = {name: peer.about for name, peer in others.items()}
    p = exp.evaluate
    cfg, rows = under_protocol(exp.model, p), p.batch_size
    report = {
        "benchmark": "eval_speed",
        "size": flags.size,
        "settings": changes(flags),
        "others": about_others,
        "kernels": kernels,
        **report_of(
            seconds,
            tokens=p.batch_size * p.seg_len,
            needed=layer_flops(cfg, p, rows, cached=True) + vocabulary_flops(cfg, p, rows),
            peak=flags.peak or published_peak(),
        ),
    }
    tell(report)
    if kernels:
        show("kernels of a segment", kernels)
    write(flags.out, report)


if __name__ == "__main__":
    main()
