"""Measures the loss of the same targets at several context lengths (``--mode=context``).

With kind ``window``, a window starts every ``stride`` tokens, and its tokens do not see any tokens
before the window. For a length c, the window scores the ``stride`` targets after its first c
tokens. An example with stride 2 and lengths c = 2 and 4, where a digit is the number of tokens that
the target sees:

    text             a b c d e f g h i
    window of a:     . . 2 3 4 5              targets c d at c = 2, e f at c = 4
    window of c:         . . 2 3 4 5          targets e f at c = 2, g h at c = 4

Attention is causal, so one run of the longest window also gives the losses at shorter lengths.
Absolute positions are counted from the end of a window, so a model with absolute positions needs
one run for each length.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.analysis import results
from txl_jax.analysis.recl import Losses
from txl_jax.analysis.results import AnalysisError, describe_model, write_results
from txl_jax.checkpoint.trained_model import TrainedModel, memory_shapes
from txl_jax.config import ContextConfig, TransformerXLConfig, override
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.data.pieces import Pieces, running_text
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation.evaluator import segment_bar
from txl_jax.evaluation.protocols import under_protocol
from txl_jax.evaluation.split import corpus_record
from txl_jax.model import self_check
from txl_jax.model.precision import arithmetic_record
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import Checked, Work, check_arrays
from txl_jax.units import UNIT_NAMES, format_value, in_unit

Progress = Callable[[int, int], None]
Batches = tuple[int, Iterator[tuple[tuple[int, ...], np.ndarray, np.ndarray]]]
"""The number of batches, and C lengths, target indices [C,B,T] and losses [C,B,T] of each batch."""

_WORK = Work.sized_by(
    "measuring contexts", "context.lengths", "context.batch_size", "context.stride"
)


def run(trained: TrainedModel, workdir: str) -> str:
    """Measures losses, prints a table, and writes ``context*``. Returns the last line to print."""
    if trained.config.model.memory_free:
        exp = override(trained.config, {"context.kind": "window"})
        trained = dataclasses.replace(trained, config=exp)
    c = trained.config.context
    corpus = corpus_from_config(trained.config.data, trained.vocab)
    with segment_bar(f"{c.split} split, contexts up to {c.lengths[-1]}") as progress:
        losses = measure(trained, corpus, c, trained.config.name, progress)
    result, unit = summary(trained, corpus, losses), corpus.vocab.unit
    last = f"effective context {result['effective_length']} tokens of {c.lengths[-1]}"
    if result["effective_is_longest"]:
        last = f"effective context at least {c.lengths[-1]} tokens, the longest that was measured"
    protocol = f"{c.kind}, stride {c.stride}, {result['targets']:,} targets"
    print(f"{c.split} split by context length in tokens ({protocol}):")
    for row in result["results"]:
        print(f"  {row['context']:>7,}  {format_value(row[unit], unit):>9} {unit}", flush=True)
    files = {
        "context_losses.npz": losses.arrays(),
        "context.json": result,
        "context.csv": result["results"],
        "context": lambda: _figure(trained, result),
    }
    return write_results(workdir, last, files)


def check(model: TransformerXLConfig, tokens: np.ndarray | Pieces, c: ContextConfig) -> None:
    """Raises AnalysisError if the text is too short, or the model has too few positions."""
    if isinstance(tokens, Pieces):
        raise AnalysisError(
            "contexts are measured on a continuous text, but this corpus has unordered sentences"
            " (lm1b); set data.name to another corpus"
        )
    longest = c.lengths[-1]
    if longest >= len(tokens):
        raise AnalysisError(
            f"a context of {longest:,} tokens: the {c.split} split has only {len(tokens):,} tokens,"
            " and needs one more than the context; use shorter lengths"
        )
    limit = model.segment_limit
    if limit is not None and longest + c.stride - 1 > limit:
        raise AnalysisError(
            f"a context of {longest:,} tokens: attention {model.attention!r} has only {limit}"
            f" positions; with context.stride={c.stride}, use lengths of at most"
            f" {limit - c.stride + 1}"
        )


def measure(
    trained: TrainedModel, corpus: Corpus, c: ContextConfig, name: str, progress: Progress
) -> Losses:
    """Returns a trained model's losses on a split of the corpus at each context length of ``c``.

    The evaluation protocol's ``clamp_len`` and ``same_length``, if set, replace those of the model.
    ``name`` becomes the name of the losses.
    """
    tokens = running_text(getattr(corpus, c.split))
    model = under_protocol(trained.config.model, trained.config.evaluate)
    nll = losses_by_context(model, trained.params, tokens, c, progress)
    return Losses(name, c.lengths, nll, targets_hash(corpus.vocab, tokens[target_slice(tokens, c)]))


def target_slice(tokens: np.ndarray, c: ContextConfig) -> slice:
    """Returns the slice of the N targets, which follow the longest context in the split."""
    first = c.lengths[-1]
    return slice(first, min(len(tokens), first + c.max_tokens) if c.max_tokens else len(tokens))


def targets_hash(vocab: Vocab, targets: np.ndarray) -> str:
    """Returns the SHA-256 of the targets' symbols, joined by newlines, independent of token ids."""
    text = "\n".join(vocab.symbols[i] for i in targets.tolist())
    return hashlib.sha256(text.encode()).hexdigest()


def losses_by_context(
    model: TransformerXLConfig,
    params: Any,
    tokens: np.ndarray,
    c: ContextConfig,
    progress: Progress = lambda done, total: None,
) -> np.ndarray:
    """Computes the losses of the same targets at every length of ``c``: float32 [C,N], nats.

    ``model.same_length`` is used only with memory. The layers of ``params`` are not scanned.
    ``tokens`` is a 1-D integer array, and :func:`target_slice` selects the targets. ``progress`` is
    called with the numbers of finished and of all batches. Raises the errors of :func:`check`.
    """
    check(model, tokens, c)
    targets = target_slice(tokens, c)
    text = np.asarray(tokens[: targets.stop], np.int32)
    losses = np.full((len(c.lengths), targets.stop - targets.start), np.nan, np.float32)
    if c.kind == "memory" and not model.memory_free:
        runs = [_stream_batches(model, params, text, c, mem_len) for mem_len in c.lengths]
    else:
        groups = [(n,) for n in c.lengths] if model.memory_free else [c.lengths]
        runs = [_window_batches(model, params, text, c, group) for group in groups]
    total = sum(count for count, _ in runs)
    batches = itertools.chain.from_iterable(found for _, found in runs)
    for done, (lengths, indices, nll) in enumerate(batches, 1):
        for length, index, values in zip(lengths, indices, nll, strict=True):
            valid = (index >= 0) & (index < losses.shape[1])
            losses[c.lengths.index(length), index[valid]] = values[valid]
        progress(done, total)
    return losses


def _window_batches(model, params, text, c: ContextConfig, group: tuple[int, ...]) -> Batches:
    """Scores windows without memory. One run scores the targets of all lengths of a group."""
    module = TransformerXL(dataclasses.replace(model, same_length=False))
    first, shortest, stride = c.lengths[-1], group[0], c.stride
    lengths = np.array(group)[:, None]
    starts = np.arange(0, len(text) - shortest, stride)
    has_targets = (starts + lengths + stride > first) & (starts + lengths < len(text))
    starts = starts[has_targets.any(axis=0)]
    mems = module.init_mems(c.batch_size, 0)

    def score(params, rows, n_real):
        kwargs: dict[str, Any] = {"context_len": shortest - 1}
        if model.memory_free:  # positions are counted from the last real token
            kwargs["lengths"] = n_real
        inputs, targets = rows[:, :-1], rows[:, shortest:]
        nll, _ = module.apply({"params": params}, inputs, targets, mems, method="nll", **kwargs)
        return jnp.stack([nll[:, n - shortest : n - shortest + stride] for n in group])

    checked = Checked(jax.jit(score), _WORK)

    def batches():
        for i in range(0, len(starts), c.batch_size):
            batch = starts[i : i + c.batch_size]
            batch = np.pad(batch, (0, c.batch_size - len(batch)), mode="edge")
            rows, n_real = _padded_rows(text, batch, group[-1] + stride)
            self_check.check_on_one_device(module.cfg, len(rows), rows.shape[1] - 1, 0)
            nll = np.asarray(checked(params, rows, n_real - 1))
            yield group, (batch + lengths - first)[..., None] + np.arange(stride), nll

    return -(-len(starts) // c.batch_size), batches()


def _stream_batches(model, params, text, c: ContextConfig, mem_len: int) -> Batches:
    """Scores streams with memory.

    Before its first target, a stream has as many tokens as the longest context of ``c``.
    """
    module, variables = TransformerXL(model), {"params": params}
    b, stride, first = c.batch_size, c.stride, c.lengths[-1]
    per_stream = -(-(len(text) - first) // b)  # number of targets of a stream
    count = -(-(first - 1 + per_stream) // stride)

    def step(variables, rows, mems):
        return module.apply(variables, rows[:, :-1], rows[:, 1:], mems, method="nll")

    def batches():
        check_arrays(_WORK, memory_shapes(model, b, mem_len))
        if model.scan_layers:  # otherwise the model reads a cache
            self_check.check_on_one_device(model, b, stride, mem_len)
        mems: Any = module.init_mems(b, mem_len)
        if not model.scan_layers:
            project = lambda v, m: module.apply(v, m, seg_len=stride, method="init_cache")
            mems = Checked(jax.jit(project), _WORK)(variables, mems)
        score = Checked(jax.jit(step, donate_argnums=(2,)), _WORK)
        for i in range(count):
            rows, _ = _padded_rows(text, np.arange(b) * per_stream + i * stride, stride + 1)
            nll, mems = score(variables, rows, mems)
            index = i * stride + 1 - first + np.arange(stride)  # index among the stream's targets
            indices = np.arange(b)[:, None] * per_stream + index
            indices = np.where((index >= 0) & (index < per_stream), indices, -1)
            yield (mem_len,), indices[None], np.asarray(nll)[None]

    return count, batches()


def _padded_rows(text: np.ndarray, starts: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows [B,n] of the text, with 0 after its end, and the numbers of real tokens [B]."""
    index = starts[:, None] + np.arange(n)
    rows = np.where(index < len(text), text[np.minimum(index, len(text) - 1)], 0)
    return rows, (index < len(text)).sum(axis=1, dtype=np.int32)


def effective_length(losses: Losses, threshold: float) -> int:
    """Returns the shortest context length from which longer ones gain less than ``threshold``.

    The gain is the largest relative decrease of perplexity at any longer length.
    """
    perplexity = np.exp(losses.mean())
    for i, length in enumerate(losses.contexts[:-1]):
        gain = 1 - perplexity[i + 1 :].min() / perplexity[i]
        if gain <= 0 or gain < threshold:
            return length
    return losses.contexts[-1]


def summary(trained: TrainedModel, corpus: Corpus, losses: Losses) -> dict[str, Any]:
    """Returns the content of ``context.json``: the protocol, the effective length, all losses."""
    c, unit = trained.config.context, corpus.vocab.unit
    effective = effective_length(losses, c.threshold)
    protocol = {"kind": c.kind, "stride": c.stride, "targets": losses.nll.shape[1]}
    return {
        "name": trained.config.name,
        "step": trained.step,
        **corpus_record(corpus),
        **arithmetic_record(trained.config.model, None),
        "split": c.split,
        **protocol,
        "first_target": losses.contexts[-1],
        "clamp_len": under_protocol(trained.config.model, trained.config.evaluate).clamp_len,
        "threshold": c.threshold,
        "effective_length": effective,
        "effective_is_longest": effective == losses.contexts[-1],
        "results": [
            {"context": length, "loss": loss, unit: in_unit(loss, unit), **protocol}
            for length, loss in zip(losses.contexts, losses.mean().tolist(), strict=True)
        ],
    }


def set_length_axis(axes, c: ContextConfig) -> None:
    """Sets an x axis for context lengths, which is logarithmic if the lengths grow unevenly."""
    lengths = c.lengths
    if lengths[-1] - lengths[-2] >= 4 * (lengths[1] - lengths[0]):
        axes.set_xscale("log", base=2)
    ticks = lengths[:: -(-len(lengths) // 10)]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    sees = f"; a target sees c to c+{c.stride - 1}" if c.kind == "window" and c.stride > 1 else ""
    axes.set_xlabel(f"context length c (tokens{sees})")
    axes.grid(alpha=0.3)


def _figure(trained: TrainedModel, result: dict[str, Any]):
    unit, c, effective = result["unit"], trained.config.context, result["effective_length"]
    figure = results.new_figure()
    axes = figure.add_subplot(ylabel=UNIT_NAMES[unit])
    axes.plot(c.lengths, [r[unit] for r in result["results"]], marker="o")
    at_least = "at least " if result["effective_is_longest"] else ""
    label = f"effective length {at_least}{effective:,} tokens"
    axes.axvline(effective, color="C3", linestyle="--", label=label)
    set_length_axis(axes, c)
    results.show_share(axes)
    axes.legend()
    text = f"{result['label']}, {c.split} split, {result['targets']:,} targets"
    axes.set_title(f"{describe_model(trained)}\n{text}, {c.kind}, stride {c.stride}", fontsize=10)
    return figure
