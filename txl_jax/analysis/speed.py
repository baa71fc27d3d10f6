"""Compares the speed of evaluation with memory and with sliding windows (paper, table 9).

One stream is scored. Each token is predicted from L tokens. Three programs are timed:

    memory      segments with memory L and window L, in the loop of ``--mode=evaluate``
    windows     a vanilla model (``attention="absolute"``, no memory) with a window of L tokens for
                each token; it computes several windows at a time, skips masked blocks of keys, and
                computes the last layer only at the last position
    recomputed  the vanilla model with all layers at all positions; it computes one window at a time
                and all scores at once, like the paper's baseline

Weights and tokens are random. The mode prints the measured ratios, the paper's ratios (a 24-layer
model on a GPU), and the ratios of floating-point operations.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.analysis.results import write_results
from txl_jax.checkpoint.trained_model import TrainedModel, param_shapes
from txl_jax.config import MeshConfig, ProtocolConfig, SpeedConfig, TransformerXLConfig
from txl_jax.evaluation.evaluator import Evaluator
from txl_jax.model.attention import projection_flops
from txl_jax.model.block import SharedInputs, feed_forward_flops
from txl_jax.model.flops import layer_flops, vocabulary_flops
from txl_jax.model.kernels.xla import group_size
from txl_jax.model.masks import attention_mask
from txl_jax.model.positions import positions_from_end, sinusoids
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import Checked, Work
from txl_jax.parallel.mesh import scoring_mesh

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""How many times slower the vanilla model is at each attention length (table 9, *paper*)."""

Program = Callable[[], float]
"""A function that runs work to its end, and returns the seconds per update, segment or token."""

_WORK = Work.sized_by("measuring speed", "speed.lengths", "speed.seg_len", "speed.windows")


def run(trained: TrainedModel, workdir: str) -> str:
    """Measures models with the shape of a trained model. Prints rows and writes ``speed.json``."""
    shape = dataclasses.replace(trained.config.model, attention="relative", n_positions=None)
    rows = []
    for row in measure_rows(shape, trained.config.speed):
        print(format_row(row), flush=True)
        rows.append(row)
    times = rows[-1]["windows_over_memory"]["median"]
    last = f"attention length {rows[-1]['length']}: {times:,.0f} times quicker with memory"
    about = {"model": dataclasses.asdict(shape), "device": jax.devices()[0].device_kind}
    files = {"speed.json": {**about, "rows": rows}}
    return write_results(workdir, last, files)


def measure_rows(c: TransformerXLConfig, settings: SpeedConfig) -> Iterator[dict[str, Any]]:
    """Yields each row of the table when it is measured, with times in seconds per token."""
    for length in settings.lengths:
        programs = {
            "memory": with_memory(c, length, settings.seg_len),
            "windows": sliding_windows(c, length, settings.windows, efficient=True),
            "recomputed": sliding_windows(c, length, 1, efficient=False),
        }
        seconds = time_alternating(programs, settings.rounds, warm_up=1)
        yield {
            "length": length,
            "seconds_per_token": {name: summary(times) for name, times in seconds.items()},
            "windows_over_memory": ratio(seconds["windows"], seconds["memory"]),
            "recomputed_over_memory": ratio(seconds["recomputed"], seconds["memory"]),
            "operations": window_flops(c, length) / memory_flops(c, length, settings.seg_len),
            "paper": PAPER.get(length),
        }


def time_alternating(
    programs: Mapping[str, Program], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Times programs in alternation, so that a busy machine slows all equally. Returns seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(warm_up + rounds):
        for name, program in programs.items():
            seconds[name].append(program())
    return {name: times[warm_up:] for name, times in seconds.items()}


def timed(work: Callable[[], Any]) -> float:
    """Measures the seconds until the result of ``work`` is ready."""
    start = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start


def summary(seconds: list[float]) -> dict[str, float]:
    """Returns the median, the quartiles and the extremes of times in seconds."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return {
        "median": statistics.median(ordered),
        "lower_quartile": ordered[quarter],
        "upper_quartile": ordered[-1 - quarter],
        "least": ordered[0],
        "most": ordered[-1],
        "rounds": len(ordered),
    }


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """Returns the :func:`summary` of the ratios slow / fast of all rounds."""
    return summary([a / b for a, b in zip(slow, fast, strict=True)])


def format_row(row: dict[str, Any]) -> str:
    """Formats a row of the table as text."""
    ms = {name: 1e3 * seconds["median"] for name, seconds in row["seconds_per_token"].items()}
    times, operations = row["windows_over_memory"]["median"], row["operations"]
    paper = f"; paper {row['paper']}" if row["paper"] else ""
    return (
        f"{row['length']:>5}  memory {ms['memory']:.3f} ms  windows {ms['windows']:.1f} ms"
        f"  recomputed {ms['recomputed']:.1f} ms  ratio {times:,.0f}"
        f" ({row['recomputed_over_memory']['median']:,.0f} recomputed;"
        f" operations {operations:,.0f}, {times / operations:.2f} of it{paper})"
    )


def with_memory(c: TransformerXLConfig, length: int, seg_len: int) -> Program:
    """Builds a program that scores one stream with M = ``length``; it returns seconds per token."""
    lengths: dict[str, Any] = {"seg_len": seg_len, "mem_len": length}
    protocol = ProtocolConfig(batch_size=1, same_length="pytorch", clamp_len=-1, **lengths)
    cfg = dataclasses.replace(c, scan_layers=False)
    score = scoring(cfg, protocol, random_params(cfg), segments=4)
    return lambda: score() / seg_len


def scoring(c: TransformerXLConfig, p: ProtocolConfig, params: Any, segments: int) -> Program:
    """Builds a program that scores ``segments`` segments, and returns the seconds per segment.

    Two more segments come first and are not timed.
    """
    text = random_tokens(p.batch_size * p.seg_len * (segments + 2) + 1, c.vocab_size)
    mesh = scoring_mesh(MeshConfig(), c, p.batch_size)
    evaluator = Evaluator(c, p, text, mesh, work=_WORK)

    def score() -> float:
        times: list[float] = []
        evaluator.run(params, progress=lambda done, total: times.append(time.perf_counter()))
        return (times[-1] - times[1]) / (len(times) - 2)

    return score


def random_params(c: TransformerXLConfig) -> Any:
    """Draws small random parameters with the shapes of the model.

    Each shape has its own compiled program, because XLA takes minutes on a GPU to compile a single
    program for all shapes.
    """
    shapes, treedef = jax.tree.flatten(param_shapes(c))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape), static_argnums=1)
    drawn = [draw(key, x.shape) for key, x in zip(keys, shapes, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


def random_tokens(count: int, vocab_size: int | None) -> np.ndarray:
    """Draws token ids, int32 [count], from a Zipf distribution, like words of a text."""
    assert vocab_size is not None
    rank = np.exp(np.random.default_rng(0).uniform(0, np.log(vocab_size), count))
    return np.minimum(rank.astype(np.int32), vocab_size - 1)


def sliding_windows(c: TransformerXLConfig, length: int, windows: int, efficient: bool) -> Program:
    """Builds a program that predicts ``windows`` successive tokens, each from its own window.

    It returns the seconds per token. If ``efficient``, it is the program ``windows`` of this
    module's docstring, and otherwise ``recomputed``.
    """
    model = vanilla(c, efficient)
    text = random_tokens(length + windows, c.vocab_size)
    inputs = jnp.stack([text[i : i + length] for i in range(windows)])
    targets = jnp.stack([text[i + length : i + length + 1] for i in range(windows)])
    params, score = random_params(model.cfg), Checked(jax.jit(window_nll(model, efficient)), _WORK)
    return lambda: timed(lambda: score(params, inputs, targets)) / windows


def vanilla(c: TransformerXLConfig, efficient: bool) -> TransformerXL:
    """Builds a model with the same widths and layers, but absolute positions and no memory."""
    changes: dict[str, Any] = {"attention": "absolute", "same_length": False, "clamp_len": -1}
    changes |= {"kernel": "xla" if efficient else "reference", "n_positions": None}
    return TransformerXL(dataclasses.replace(c, scan_layers=False, **changes))


def window_nll(model: TransformerXL, efficient: bool) -> Callable[..., Any]:
    """Builds a function of params, inputs [B,L] and targets [B,1] that returns losses [B,1]."""
    cfg = model.cfg

    def last_position(self: TransformerXL, inputs, targets):
        b, length = inputs.shape
        h = self.vocabulary.embed(inputs, False).astype(cfg.dtype)
        h = h + sinusoids(positions_from_end(length, None), cfg.d_model).astype(cfg.dtype)
        no_memory, no_biases = jnp.zeros((b, 0, cfg.d_model), cfg.dtype), (None, None)
        encodings = jnp.zeros((length, cfg.d_model), cfg.dtype)
        mask = attention_mask(length, jnp.zeros(b, jnp.int32), 0)
        shared = SharedInputs(encodings, mask, positions_from_end(length, None), False)
        for layer in self.layers[:-1]:
            h, _ = layer.step(h, no_memory, no_biases, shared)
        mask = attention_mask(1, jnp.full(b, length - 1), length - 1)
        shared = SharedInputs(encodings, mask, positions_from_end(1, None), False)
        h, _ = self.layers[-1].step(h[:, -1:], h[:, :-1], no_biases, shared)
        return self.vocabulary.nll(h, targets, False)

    def every_position(self: TransformerXL, inputs, targets):
        mems = self.init_mems(inputs.shape[0], 0)
        return self.nll(inputs, targets, mems, context_len=inputs.shape[1] - 1)[0]

    method = last_position if efficient else every_position
    return lambda params, *text: model.apply({"params": params}, *text, method=method)


def memory_flops(c: TransformerXLConfig, length: int, seg_len: int) -> float:
    """Counts operations per token with a memory whose keys and values are already projected."""
    p = ProtocolConfig(batch_size=1, seg_len=seg_len, mem_len=length)
    layers = layer_flops(dataclasses.replace(c, clamp_len=-1), p, rows=1, cached=True)
    return (layers + vocabulary_flops(c, p, rows=1)) / seg_len


def window_flops(c: TransformerXLConfig, length: int) -> float:
    """Counts operations per token of efficient windows, with the query groups of kernels/xla.py."""
    nh, group = c.n_head * c.d_head, group_size(length, jax.default_backend())
    starts = range(0, length, group)
    keys_read = sum(min(start + group, length) * min(group, length - start) for start in starts)
    layer = projection_flops(c, length, length) + length * feed_forward_flops(c)
    layer += 4 * keys_read * nh
    last = projection_flops(c, 1, length) + 4 * length * nh
    norms = c.n_layer * projection_flops(c, 0, 1) if c.pre_lnorm else 0
    p = ProtocolConfig(batch_size=1, seg_len=1, mem_len=0, context_len=length - 1)
    words = vocabulary_flops(c, p, rows=1)
    return (c.n_layer - 1) * layer + last + feed_forward_flops(c) + norms + words
