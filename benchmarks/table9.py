"""Table 9 of the paper: evaluation with memory against a vanilla model's sliding windows.

    python -m benchmarks.table9 --size=12l_512 [--lengths=800,1800,2800,3800] [--out=FILE.json]

One stream; every token is predicted from the L tokens before and including it. Seconds per token of

    memory      segments of 128, memory L, window L (``--mode=evaluate``'s own loop)
    windows     a vanilla model (``attention="absolute"``, no memory) running a window of L tokens
                for each: several at a time, causal skipping of keys, and the last layer for the
                last position only, which is all that is asked for
    recomputed  the same, every layer for every position, one window at a time, all scores at once:
                what the paper's baseline did

Same widths and layers everywhere. Printed beside the ratios: the paper's (a 24-layer model on a
GPU), and what floating-point operations alone give for the first two, by the formulas below.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.eval_speed import random_params, scoring
from benchmarks.interleaved import (
    add_flags,
    changes,
    in_turn,
    machine,
    ratio,
    summary,
    timed,
    write,
)
from benchmarks.sizes import experiment, random_tokens
from txl_jax.config import ExperimentConfig, TransformerXLConfig
from txl_jax.model.block import OfAll, OfLayer
from txl_jax.model.kernels.xla import group_size
from txl_jax.model.masks import visible
from txl_jax.model.positions import sinusoids
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.model.variants import places

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Table 9, *paper*: how many times slower the vanilla model was at each attention length."""
SEGMENT = 128


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--lengths", default="800,1800,2800,3800")
    parser.add_argument("--windows", type=int, default=4, help="run at a time")
    flags = parser.parse_args(argv)
    rows = []
    for length in map(int, flags.lengths.split(",")):
        settings = {
            "model.scan_layers": False,
            "evaluate.batch_size": 1,
            "evaluate.seg_len": SEGMENT,
            "evaluate.mem_len": length,
            "evaluate.same_length": "pytorch",
            **changes(flags),
        }
        exp = experiment(flags.size, settings)
        with_memory = scoring(exp, 4)
        programs = {
            "memory": _of_a_token(with_memory),
            "windows": sliding(exp, length, flags.windows, honest=True),
            "recomputed": sliding(exp, length, 1, honest=False),
        }
        seconds = in_turn(programs, flags.rounds, warm_up=1)
        operations = of_windows(exp.model, length) / of_memory(exp.model, length)
        row: dict[str, Any] = {
            "length": length,
            "seconds_per_token": {name: summary(found) for name, found in seconds.items()},
            "windows_over_memory": ratio(seconds["windows"], seconds["memory"]),
            "recomputed_over_memory": ratio(seconds["recomputed"], seconds["memory"]),
            "operations": operations,
            "paper": PAPER.get(length),
        }
        rows.append(row)
        each = {name: 1e3 * took["median"] for name, took in row["seconds_per_token"].items()}
        times = row["windows_over_memory"]["median"]
        print(
            f"{length:>5}  memory {each['memory']:.3f} ms  windows {each['windows']:.1f} ms"
            f"  recomputed {each['recomputed']:.1f} ms  ratio {times:,.0f}"
            f" ({row['recomputed_over_memory']['median']:,.0f} recomputed;"
            f" operations {operations:,.0f}, {times / operations:.2f} of it;"
            f" paper {row['paper']})",
            flush=True,
        )
    write(
        flags.out, {"benchmark": "table9", "size": flags.size, "machine": machine(), "rows": rows}
    )


def _of_a_token(of_a_segment: Callable[[], float]) -> Callable[[], float]:
    return lambda: of_a_segment() / SEGMENT


def sliding(exp: ExperimentConfig, length: int, windows: int, honest: bool) -> Callable[[], float]:
    """A program: the predictions of so many neighbouring tokens, each from its own window."""
    kernel: Any = "xla" if honest else "reference"
    cfg = dataclasses.replace(
        exp.model, attention="absolute", same_length=False, clamp_len=-1, kernel=kernel
    )
    model, params = TransformerXL(cfg), random_params(dataclasses.replace(exp, model=cfg))
    text = random_tokens(length + windows, cfg.vocab_size or 0)
    inputs = jnp.stack([text[i : i + length] for i in range(windows)])
    targets = jnp.stack([text[i + length : i + length + 1] for i in range(windows)])

    def last_only(self: TransformerXL, inputs, targets):
        """nll [B,1] of the token after each window."""
        h = self.vocabulary.embed(inputs, False).astype(cfg.dtype)
        h = h + sinusoids(places(length, None), cfg.d_model).astype(cfg.dtype)
        b = inputs.shape[0]
        nothing = jnp.zeros((b, 0, cfg.d_model), cfg.dtype)
        encodings = jnp.zeros((length, cfg.d_model), cfg.dtype)
        everyone = visible(length, jnp.zeros(b, jnp.int32), 0)
        common = OfAll(encodings, everyone, places(length, None), False)
        for layer in self.layers[:-1]:
            h, _ = layer.step(h, OfLayer(nothing), common)
        last = visible(1, jnp.full(b, length - 1), length - 1)
        common = OfAll(encodings, last, places(1, None), False)
        h, _ = self.layers[-1].step(h[:, -1:], OfLayer(h[:, :-1]), common)
        return self.vocabulary.nll(h, targets, False)

    def every_position(self: TransformerXL, inputs, targets):
        mems = self.init_mems(inputs.shape[0], 0)
        return self.nll(inputs, targets, mems, context_len=length - 1)[0]

    method = last_only if honest else every_position
    score = jax.jit(
        lambda params, inputs, targets: model.apply(
            {"params": params}, inputs, targets, method=method
        )
    )
    return lambda: timed(lambda: score(params, inputs, targets)) / windows


def of_memory(c: TransformerXLConfig, length: int) -> float:
    """Operations per token with memory: projected once, K = L + T scores of three products."""
    nh, k = c.n_head * c.d_head, length + SEGMENT
    return c.n_layer * (8 * c.d_model * nh + 6 * k * nh + 4 * c.d_model * c.d_inner) + _words(c)


def of_windows(c: TransformerXLConfig, length: int) -> float:
    """Operations per token of the better windows: L positions a layer, the last layer's only one.

    Keys are read up to the end of each group of queries (model/kernels/xla.py).
    """
    nh, group = c.n_head * c.d_head, group_size(length)
    read = sum(
        min(start + group, length) * min(group, length - start) for start in range(0, length, group)
    )
    layer = length * (8 * c.d_model * nh + 4 * c.d_model * c.d_inner) + 4 * read * nh
    last = 4 * length * c.d_model * nh + 4 * c.d_model * nh + 4 * length * nh
    return (c.n_layer - 1) * layer + last + 4 * c.d_model * c.d_inner + _words(c)


def _words(c: TransformerXLConfig) -> float:
    return 2.0 * c.d_model * (c.vocab_size or 0)


if __name__ == "__main__":
    main()
