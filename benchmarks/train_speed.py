"""Times training updates of txl_jax, and those of other programs in turn with them.

    python -m benchmarks.train_speed --size=12l_512 [--original=DIR] [--nvidia=DIR] [--plain-flax] \
        [--original-python=PYTHON] [--forms=eager,compile] [--dtypes=float32,bfloat16]

The timed update is that of the training loop, on random tokens: forward and backward pass with
dropout, gradient clipping, optimizer, and memory for the next update. One call of our compiled
program (a dispatch) makes ``train.steps_per_dispatch`` updates: ten for the CPU sizes of
benchmarks/sizes.py, or one with ``--set train.steps_per_dispatch=1``. In each turn, the other
programs make as many updates, one per call. Tokens per second are computed from median
times. The ratio of two programs is the median over the ratios of all rounds.

Model-FLOPs utilisation is the share of the device's peak speed that an update reaches: the
operations that the update needs, divided by its seconds and by ``--peak`` (operations per second).
An update needs three times the matrix products of a forward pass (txl_jax/model/flops.py). Products
that are computed again to save memory do not count. Without ``--peak``, the program uses the
published bfloat16 peak of the device, if txl_jax/planning/machines.py has it.
"""

import argparse
from typing import Any

from benchmarks import plain_transformer_xl
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
from benchmarks.sizes import experiment
from txl_jax.analysis.speed import random_tokens, time_alternating, timed
from txl_jax.config import ExperimentConfig
from txl_jax.data.feed import training_feed
from txl_jax.data.streams import shuffled_streams
from txl_jax.model.flops import update_flops
from txl_jax.parallel.mesh import make_mesh
from txl_jax.training.plan import StepSetup


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the results and writes them to the file ``--out``, if given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--steps", type=int, default=1, help="dispatches in a round")
    parser.add_argument("--peak", type=float, help="operations per second that the machine has")
    parser.add_argument("--plain-flax", action="store_true", help="beside plain_transformer_xl.py")
    flags = parser.parse_args(argv)
    exp = experiment(flags.size, changes(flags))
    here = in_dtypes(flags, lambda exp: training(exp, flags.steps))
    if flags.plain_flax:
        here["plain Flax"] = plain_flax(exp, flags.steps * exp.train.steps_per_dispatch)
    job = {
        "what": "train",
        "experiment": exp.to_dict(),
        "vocab_size": exp.model.vocab_size,
        "steps": flags.steps * exp.train.steps_per_dispatch,
    }
    with peers(flags, job) as others:
        seconds = time_alternating({**here, **others}, flags.rounds)
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


class Training:
    """The compiled update of an experiment, with the training state and random tokens."""

    def __init__(self, exp: ExperimentConfig):
        t, several = exp.train, exp.train.steps_per_dispatch
        mesh = make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches)
        setup = StepSetup.on(mesh, exp)
        self._state = setup.initial_state(exp)
        text = random_tokens(t.batch_size * (8 * t.seg_len + 1), exp.model.vocab_size)
        streams = shuffled_streams(text, t.batch_size, t.seg_len, seed=0)
        sharding = setup.shardings.rows(several > 1)
        feed = training_feed(streams, 0, 4 * several, t.epoch_memory, several, sharding)
        self._batches = list(feed)
        self._update = setup.update().lower(self._state, self._batches[0]).compile()
        self._done = 0

    def updates(self, dispatches: int) -> float:
        """Calls the compiled program ``dispatches`` times; returns the seconds of all calls.

        The next call continues the training.
        """

        def work():
            metrics: Any = None
            for _ in range(dispatches):
                batch = self._batches[self._done % len(self._batches)]
                self._state, metrics = self._update(self._state, batch)
                self._done += 1
            return self._state.step, metrics

        return timed(work)

    def program_text(self) -> str:
        """Returns the compiled HLO as text."""
        return self._update.as_text() or ""


def training(exp: ExperimentConfig, steps: int):
    """Returns a function that trains for ``steps`` dispatches and returns the seconds per update.

    A dispatch is one call of the compiled program, with ``train.steps_per_dispatch`` updates.
    """
    of = Training(exp)
    return lambda: of.updates(steps) / (steps * exp.train.steps_per_dispatch)


def plain_flax(exp: ExperimentConfig, updates: int):
    """Returns a function that makes ``updates`` updates in plain Flax and returns the mean time."""
    t, (state, update) = exp.train, plain_transformer_xl.training(exp)
    text = random_tokens(4 * t.batch_size * (t.seg_len + 1), exp.model.vocab_size)
    batches = text.reshape(4, t.batch_size, t.seg_len + 1)

    def work():
        nonlocal state
        for i in range(updates):
            state, loss = update(state, batches[i % 4, :, :-1], batches[i % 4, :, 1:])
        return state, loss

    return lambda: timed(work) / updates


if __name__ == "__main__":
    main()
