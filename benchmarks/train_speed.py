"""Updates a second: ours, and the authors' PyTorch code beside it in the same run.

    python -m benchmarks.train_speed --size=12l_512 [--original=DIR --original-python=PYTHON]

An update is the training loop's own: forward, backward, clip, optimizer, memory carried, dropout
as the size has it, on random tokens, and as many of them a dispatch as it has (the sizes for a CPU
ten; ``--set train.steps_per_dispatch=1``: one). Theirs makes as many a turn.
Tokens a second are of the medians, the ratio of each round's two. Model-FLOPs utilisation is what
the model needs (three forward passes' matrix products, by the formulas of
txl_jax/planning/flops.py: nothing that is computed twice counts), over seconds, over ``--peak``
operations a second; without it, over the published bfloat16 peak of the device where
txl_jax/planning/machines.py has it.
"""

import argparse
from typing import Any

import jax

from benchmarks.interleaved import (
    add_flags,
    changes,
    peers,
    published_peak,
    report_of,
    tell,
    write,
)
from benchmarks.sizes import experiment
from txl_jax.analysis.speed import random_tokens, time_alternating, timed
from txl_jax.config import ExperimentConfig
from txl_jax.data.feed import training_feed
from txl_jax.data.sentences import shuffled_streams
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.shardings import Shardings, make_mesh
from txl_jax.planning.flops import update_flops
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import init_state, state_shardings
from txl_jax.training.step import compiled_step


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--steps", type=int, default=1, help="dispatches in a round")
    parser.add_argument("--peak", type=float, help="operations per second that the machine has")
    flags = parser.parse_args(argv)
    exp = experiment(flags.size, changes(flags))
    ours = training(exp, flags.steps)
    job = {
        "what": "train",
        "experiment": exp.to_dict(),
        "vocab_size": exp.model.vocab_size,
        "steps": flags.steps * exp.train.steps_per_dispatch,
    }
    with peers(flags, job) as others:
        seconds = time_alternating({"txl_jax": ours, **others}, flags.rounds)
        about_others = {name: peer.about for name, peer in others.items()}
    report = {
        "benchmark": "train_speed",
        "size": flags.size,
        "settings": changes(flags),
        "others": about_others,
        **report_of(
            seconds,
            tokens=exp.train.batch_size * exp.train.seg_len,
            needed=update_flops(exp)[0],
            peak=flags.peak or published_peak(),
        ),
    }
    tell(report)
    write(flags.out, report)


def training(exp: ExperimentConfig, steps: int):
    """A program: so many dispatches, each call from where the last one ended; seconds an update."""
    t = exp.train
    shardings = Shardings(make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches))
    model = TransformerXL(exp.model, shardings.mesh)
    optimizer = make_optimizer(exp)
    make = lambda: init_state(exp, model, optimizer)
    abstract = jax.eval_shape(make)
    state = jax.jit(make, out_shardings=state_shardings(shardings, abstract))()
    update = compiled_step(exp, model, optimizer, shardings, abstract)
    text = random_tokens(t.batch_size * (8 * t.seg_len + 1), exp.model.vocab_size)
    streams = shuffled_streams(text, t.batch_size, t.seg_len, seed=0)
    several = t.steps_per_dispatch
    sharding = shardings.rows(several > 1)
    batches = list(training_feed(streams, 0, 4 * several, t.epoch_memory, several, sharding))
    done = 0

    def work():
        nonlocal state, done
        metrics: Any = None
        for _ in range(steps):
            state, metrics = update(state, batches[done % len(batches)])
            done += 1
        return state.step, metrics

    return lambda: timed(work) / (steps * several)


if __name__ == "__main__":
    main()
