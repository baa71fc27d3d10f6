"""Table 9 of the paper: evaluation with memory against a vanilla model's sliding windows.

One stream; every token is predicted from the L tokens before and including it. Seconds per token of

    memory      segments with memory L, window L (``--mode=evaluate``'s own loop)
    windows     a vanilla model (``attention="absolute"``, no memory) running a window of L tokens
                for each: several at a time, causal skipping of keys, and the last layer for the
                last position only, which is all that is asked for
    recomputed  the same, every layer for every position, one window at a time, all scores at once:
                what the paper's baseline did

Same widths and layers everywhere; weights and tokens are random, a token takes as long on them as
on any other. Printed beside the ratios: the paper's (a 24-layer model on a GPU), and what
floating-point operations alone give for the first two, by the formulas below.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.analysis.timing import Program, in_turn, ratio, summary, timed
from txl_jax.checkpoint.trained_model import TrainedModel, param_shapes
from txl_jax.checkpoint.workdir_files import check_outputs, print_on_error
from txl_jax.config import MeshConfig, ProtocolConfig, SpeedConfig, TransformerXLConfig
from txl_jax.evaluation.evaluate import Evaluator
from txl_jax.files import write_json
from txl_jax.model.block import LayerInputs, SharedInputs
from txl_jax.model.footprint import of_reading
from txl_jax.model.kernels.xla import SHORT_GROUP, group_size
from txl_jax.model.masks import attention_mask
from txl_jax.model.positions import sinusoids
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.model.variants import places
from txl_jax.parallel.device_memory import check_memory
from txl_jax.parallel.shardings import make_mesh

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Table 9, *paper*: how many times slower the vanilla model was at each attention length."""


def run(trained: TrainedModel, workdir: str) -> str:
    """Measures a trained model's shape (``--mode=speed``), prints and writes ``speed.json``."""
    check_outputs(workdir, "speed")
    shape = dataclasses.replace(trained.config.model, attention="relative", n_positions=None)
    check_size(trained)
    rows = []
    for row in rows_of(shape, trained.config.speed):
        print(line_of(row), flush=True)
        rows.append(row)
    ratio_of_last = rows[-1]["windows_over_memory"]["median"]
    last = f"attention length {rows[-1]['length']}: {ratio_of_last:,.0f} times quicker with memory"
    about = {"model": dataclasses.asdict(shape), "device": jax.devices()[0].device_kind}
    with print_on_error(last):
        write_json(os.path.join(workdir, "speed.json"), {**about, "rows": rows})
    return last


def check_size(trained: TrainedModel) -> None:
    """Raises ConfigError where the longest windows, or memory, do not fit the device's memory."""
    exp, c = trained.config, trained.config.speed
    longest, keys = c.lengths[-1], ("speed.lengths", "speed.seg_len", "speed.windows")
    all_at_once = dataclasses.replace(exp.model, kernel="reference")
    check_memory("sliding windows", of_reading(all_at_once, 1, longest, 0, keys), exp)
    check_memory("sliding windows", of_reading(exp.model, c.windows, longest, 0, keys), exp)
    check_memory("evaluation", of_reading(exp.model, 1, c.seg_len, longest, keys), exp)


def rows_of(c: TransformerXLConfig, settings: SpeedConfig) -> Iterator[dict[str, Any]]:
    """The table's rows, one by one as they are measured; times in seconds per token."""
    for length in settings.lengths:
        programs = {
            "memory": with_memory(c, length, settings.seg_len),
            "windows": sliding(c, length, settings.windows, honest=True),
            "recomputed": sliding(c, length, 1, honest=False),
        }
        seconds = in_turn(programs, settings.rounds, warm_up=1)
        yield {
            "length": length,
            "seconds_per_token": {name: summary(found) for name, found in seconds.items()},
            "windows_over_memory": ratio(seconds["windows"], seconds["memory"]),
            "recomputed_over_memory": ratio(seconds["recomputed"], seconds["memory"]),
            "operations": of_windows(c, length) / of_memory(c, length, settings.seg_len),
            "paper": PAPER.get(length),
        }


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    each = {name: 1e3 * took["median"] for name, took in row["seconds_per_token"].items()}
    times, operations = row["windows_over_memory"]["median"], row["operations"]
    paper = f"; paper {row['paper']}" if row["paper"] else ""
    return (
        f"{row['length']:>5}  memory {each['memory']:.3f} ms  windows {each['windows']:.1f} ms"
        f"  recomputed {each['recomputed']:.1f} ms  ratio {times:,.0f}"
        f" ({row['recomputed_over_memory']['median']:,.0f} recomputed;"
        f" operations {operations:,.0f}, {times / operations:.2f} of it{paper})"
    )


def with_memory(c: TransformerXLConfig, length: int, seg_len: int, segments: int = 4) -> Program:
    """Evaluation of one stream with memory and window of ``length``, as a program."""
    protocol = ProtocolConfig(
        batch_size=1, seg_len=seg_len, mem_len=length, same_length="pytorch", clamp_len=-1
    )
    cfg = dataclasses.replace(c, scan_layers=False)
    score = scoring(cfg, protocol, random_params(cfg), segments)
    return lambda: score() / seg_len


def scoring(
    c: TransformerXLConfig, protocol: ProtocolConfig, params: Any, segments: int
) -> Program:
    """So many segments scored after two that are not timed, as a program; seconds per segment."""
    text = random_tokens(protocol.batch_size * protocol.seg_len * (segments + 2) + 1, _words_of(c))
    evaluator = Evaluator(c, protocol, text, make_mesh(MeshConfig(), c, protocol.batch_size))

    def score() -> float:
        times: list[float] = []
        evaluator.run(params, progress=lambda done, total: times.append(time.perf_counter()))
        return (times[-1] - times[1]) / (len(times) - 2)

    return score


def random_params(c: TransformerXLConfig) -> Any:
    """Parameters of the model's shapes, small random numbers."""
    shapes, treedef = jax.tree.flatten(param_shapes(c))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = jax.jit(
        lambda keys: [
            0.02 * jax.random.normal(k, x.shape) for k, x in zip(keys, shapes, strict=True)
        ]
    )
    return jax.tree.unflatten(treedef, draw(keys))


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Token ids int32 [count], of Zipf's distribution: clusters of rare words get their share."""
    rank = np.exp(np.random.default_rng(seed).uniform(0, np.log(vocab_size), count))
    return np.minimum(rank.astype(np.int32), vocab_size - 1)


def sliding(c: TransformerXLConfig, length: int, windows: int, honest: bool) -> Program:
    """The predictions of so many neighbouring tokens, each from its own window, as a program."""
    model = vanilla(c, honest)
    text = random_tokens(length + windows, _words_of(c))
    inputs = jnp.stack([text[i : i + length] for i in range(windows)])
    targets = jnp.stack([text[i + length : i + length + 1] for i in range(windows)])
    params, score = random_params(model.cfg), jax.jit(of_windows_ends(model, honest))
    return lambda: timed(lambda: score(params, inputs, targets)) / windows


def vanilla(c: TransformerXLConfig, honest: bool) -> TransformerXL:
    """The model without memory and with absolute positions that has the same widths and layers."""
    kernel: Any = "xla" if honest else "reference"
    plain: dict[str, Any] = {"attention": "absolute", "same_length": False, "clamp_len": -1}
    return TransformerXL(
        dataclasses.replace(c, kernel=kernel, scan_layers=False, n_positions=None, **plain)
    )


def of_windows_ends(model: TransformerXL, honest: bool) -> Callable[..., Any]:
    """``(params, inputs [B,L], targets [B,1]) -> nll`` [B,1] of the token after each window.

    ``honest``: nothing is computed that the last position does not need.
    """
    cfg = model.cfg

    def last_only(self: TransformerXL, inputs, targets):
        b, length = inputs.shape
        h = self.vocabulary.embed(inputs, False).astype(cfg.dtype)
        h = h + sinusoids(places(length, None), cfg.d_model).astype(cfg.dtype)
        nothing = jnp.zeros((b, 0, cfg.d_model), cfg.dtype)
        encodings = jnp.zeros((length, cfg.d_model), cfg.dtype)
        everyone = attention_mask(length, jnp.zeros(b, jnp.int32), 0)
        common = SharedInputs(encodings, everyone, places(length, None), False)
        for layer in self.layers[:-1]:
            h, _ = layer.step(h, LayerInputs(nothing), common)
        last = attention_mask(1, jnp.full(b, length - 1), length - 1)
        common = SharedInputs(encodings, last, places(1, None), False)
        h, _ = self.layers[-1].step(h[:, -1:], LayerInputs(h[:, :-1]), common)
        return self.vocabulary.nll(h, targets, False)

    def every_position(self: TransformerXL, inputs, targets):
        mems = self.init_mems(inputs.shape[0], 0)
        return self.nll(inputs, targets, mems, context_len=inputs.shape[1] - 1)[0]

    method = last_only if honest else every_position
    return lambda params, inputs, targets: model.apply(
        {"params": params}, inputs, targets, method=method
    )


def of_memory(c: TransformerXLConfig, length: int, seg_len: int) -> float:
    """Operations per token with memory: projected once, K = L + T scores of three products."""
    nh, k = c.n_head * c.d_head, length + seg_len
    return c.n_layer * (8 * c.d_model * nh + 6 * k * nh + 4 * c.d_model * c.d_inner) + _words(c)


def of_windows(c: TransformerXLConfig, length: int) -> float:
    """Operations per token of the better windows: L positions a layer, the last layer's only one.

    Keys are read up to the end of each group of queries (model/kernels/xla.py).
    """
    nh, group = c.n_head * c.d_head, group_size(length, SHORT_GROUP.get(jax.default_backend()))
    read = sum(
        min(start + group, length) * min(group, length - start) for start in range(0, length, group)
    )
    layer = length * (8 * c.d_model * nh + 4 * c.d_model * c.d_inner) + 4 * read * nh
    last = 4 * length * c.d_model * nh + 4 * c.d_model * nh + 4 * length * nh
    return (c.n_layer - 1) * layer + last + 4 * c.d_model * c.d_inner + _words(c)


def _words(c: TransformerXLConfig) -> float:
    return 2.0 * c.d_model * _words_of(c)


def _words_of(c: TransformerXLConfig) -> int:
    assert c.vocab_size is not None
    return c.vocab_size
