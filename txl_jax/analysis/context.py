"""What longer contexts are worth: loss of the same targets against the length of the context.

With kind ``window`` windows start every ``stride`` tokens, know nothing of what was before them,
and score at each length c the ``stride`` targets that follow their first c tokens. Stride 2, and
c of 2 and 4; a digit is the context that a target saw:

    text             a b c d e f g h i
    window of a:     . . 2 3 4 5              targets c d at c = 2, e f at c = 4
    window of c:         . . 2 3 4 5          targets e f at c = 2, g h at c = 4

A token does not see what follows it, so one run of the longest window has what it loses at every
shorter length too. The absolute forms count positions from the window's end: each length is a run.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.analysis import pictures
from txl_jax.analysis.recl import Losses
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir_files import check_outputs, print_on_error
from txl_jax.config import ContextConfig, TransformerXLConfig
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.data.sentences import Sentences
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation.errors import AnalysisError
from txl_jax.evaluation.evaluate import under_protocol
from txl_jax.evaluation.report import segment_bar
from txl_jax.files import write_csv, write_json
from txl_jax.model.footprint import of_reading
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import check_memory
from txl_jax.units import UNIT_NAMES, format_value, in_unit

Progress = Callable[[int, int], None]


def run(trained: TrainedModel, workdir: str) -> str:
    """Measures, prints a table and writes ``context.*`` in the workdir; the last line to print.

    Raises:
      AnalysisError: a corpus of sentences, or lengths that the text or the model does not have.
    """
    c = as_measured(trained.config.context, trained.config.model)
    trained = dataclasses.replace(trained, config=dataclasses.replace(trained.config, context=c))
    check_size(trained, c)
    check_outputs(workdir, "context")
    corpus = corpus_from_config(trained.config.data, trained.vocab)
    check(trained.config.model, getattr(corpus, c.split), c)
    with segment_bar(f"{c.split} split, contexts up to {c.lengths[-1]}") as progress:
        losses = measure(trained, corpus, c, trained.config.name, progress)
    result = summary(trained, corpus, losses)
    effective, longest = result["effective_length"], c.lengths[-1]
    last = f"effective context {effective} tokens of {longest}"
    if effective == longest:
        last = f"effective context at least {longest} tokens, the longest that was measured"
    print(_table(result), flush=True)
    with print_on_error(last):
        losses.save(os.path.join(workdir, "context_losses.npz"))
        write_json(os.path.join(workdir, "context.json"), result)
        write_csv(os.path.join(workdir, "context.csv"), result["results"])
        pictures.save(_picture(trained, result), workdir, "context")
    return last


def as_measured(c: ContextConfig, model: TransformerXLConfig) -> ContextConfig:
    """The settings, with kind ``window`` for a form of attention without memory."""
    return dataclasses.replace(c, kind="window") if model.memory_free else c


def check(model: TransformerXLConfig, tokens: np.ndarray | Sentences, c: ContextConfig) -> None:
    """Raises AnalysisError where the text, or the model's positions, do not reach so far."""
    if isinstance(tokens, Sentences):
        raise AnalysisError(
            "contexts are measured on one running text, and this corpus is of sentences in no"
            " order (lm1b); set data.name to another"
        )
    longest = c.lengths[-1]
    if longest >= len(tokens):
        raise AnalysisError(
            f"a context of {longest:,} tokens: the {c.split} split has {len(tokens):,}, and at"
            " least one must follow the context; use shorter lengths"
        )
    if model.attention == "absolute_per_layer":
        limit = (model.n_positions or 0) - c.stride + 1
        if longest > limit:
            raise AnalysisError(
                f"a context of {longest:,} tokens: attention 'absolute_per_layer' learnt"
                f" {model.n_positions} positions, so with context.stride={c.stride} lengths may be"
                f" up to {limit}"
            )


def measure(
    trained: TrainedModel, corpus: Corpus, c: ContextConfig, name: str, progress: Progress
) -> Losses:
    """:func:`losses_by_context` of a trained model under its protocol's clamp (and window)."""
    check_size(trained, c)
    tokens = getattr(corpus, c.split)
    model = under_protocol(trained.config.model, trained.config.evaluate)
    nll = losses_by_context(model, trained.params, tokens, c, progress)
    return Losses(name, c.lengths, nll, targets_hash(corpus.vocab, tokens[targets_of(tokens, c)]))


def check_size(trained: TrainedModel, c: ContextConfig) -> None:
    """Raises ConfigError where the longest windows, or memory, do not fit the device's memory."""
    exp = dataclasses.replace(trained.config, context=c)
    carried = c.kind == "memory" and not exp.model.memory_free
    longest = c.lengths[-1]
    length, mem_len = (c.stride, longest) if carried else (longest + c.stride - 1, 0)
    keys = tuple(f"context.{name}" for name in ("lengths", "batch_size", "stride"))
    needs = of_reading(exp.model, c.batch_size, length, mem_len, keys)
    check_memory("measuring contexts", needs, exp)


def targets_of(tokens: np.ndarray, c: ContextConfig) -> slice:
    """The places of the N targets: from the longest context on, so that each has all of it."""
    first = c.lengths[-1]
    return slice(first, min(len(tokens), first + c.max_tokens) if c.max_tokens else len(tokens))


def targets_hash(vocab: Vocab, targets: np.ndarray) -> str:
    """Sha256 of the targets' symbols joined by newlines: what was predicted, whatever the ids."""
    text = "\n".join(vocab.symbols[i] for i in targets.tolist())
    return hashlib.sha256(text.encode()).hexdigest()


def losses_by_context(
    model: TransformerXLConfig,
    params: Any,
    tokens: np.ndarray,
    c: ContextConfig,
    progress: Progress = lambda done, total: None,
) -> np.ndarray:
    """Losses of the same targets at every length of ``c``: float32 [C,N], nats.

    Args:
      model: its shape, with the clamp to use; a window ``same_length`` acts with memory only.
      params: its parameters, layers one by one.
      tokens: int [text]; targets are those of :func:`targets_of`.
      c: lengths, kind, stride, batch size and number of targets; see its docstring.
      progress: told of every batch that is run.

    Raises:
      AnalysisError: see :func:`check`.
    """
    check(model, tokens, c)
    targets = targets_of(tokens, c)
    text = np.asarray(tokens[: targets.stop], np.int32)
    found = np.full((len(c.lengths), targets.stop - targets.start), np.nan, np.float32)
    runs: list[_Streams] | list[_Windows]
    if c.kind == "memory" and not model.memory_free:
        runs = [_Streams(model, params, text, c, m) for m in c.lengths]
    else:
        one_by_one = [(length,) for length in c.lengths]
        groups = one_by_one if model.memory_free else [c.lengths]
        runs = [_Windows(model, params, text, c, group) for group in groups]
    total, done = sum(r.batches for r in runs), 0
    for r in runs:
        for lengths, places, nll in r.results():
            rows = [c.lengths.index(length) for length in lengths]
            kept = (places >= 0) & (places < found.shape[1])
            for row, of_row, at, here in zip(rows, nll, places, kept, strict=True):
                found[row, at[here]] = of_row[here]
            done += 1
            progress(done, total)
    return found


Result = tuple[tuple[int, ...], np.ndarray, np.ndarray]
"""Lengths, and of each the targets [C,B,T], counted from the first, and their losses [C,B,T]."""


class _Windows:
    """Windows without memory, of a group of lengths that one run of the longest window serves."""

    def __init__(self, model, params, text, c: ContextConfig, group: tuple[int, ...]):
        self.params, self.text, self.c, self.group = params, text, c, group
        self.model = TransformerXL(dataclasses.replace(model, same_length=False))
        first, end = c.lengths[-1], len(text)
        starts = np.arange(0, end - group[0], c.stride)
        serves = [(starts + n + c.stride > first) & (starts + n < end) for n in group]
        self.starts = starts[np.any(serves, axis=0)]

    @property
    def batches(self) -> int:
        return -(-len(self.starts) // self.c.batch_size)

    def results(self) -> Iterator[Result]:
        low, high, stride = self.group[0], self.group[-1], self.c.stride
        first, n = self.c.lengths[-1], high + stride
        cuts = [slice(length - low, length - low + stride) for length in self.group]
        mems = self.model.init_mems(self.c.batch_size, 0)

        @jax.jit
        def nll_of(params, rows, lengths):
            about: dict[str, Any] = {"context_len": low - 1}
            if self.model.cfg.memory_free:  # positions are counted from the last real token
                about["lengths"] = lengths
            variables = {"params": params}
            nll, _ = self.model.apply(
                variables, rows[:, :-1], rows[:, low:], mems, method="nll", **about
            )
            return jnp.stack([nll[:, cut] for cut in cuts])

        for i in range(self.batches):
            starts = self.starts[i * self.c.batch_size :][: self.c.batch_size]
            starts = np.pad(starts, (0, self.c.batch_size - len(starts)), mode="edge")
            rows, lengths = _cut(self.text, starts, n)
            nll = np.asarray(nll_of(self.params, rows, lengths - 1))
            begins = starts + np.array(self.group)[:, None] - first
            yield self.group, begins[..., None] + np.arange(stride), nll


class _Streams:
    """Streams with memory of one length, each read from ``longest`` tokens before its targets."""

    def __init__(self, model, params, text, c: ContextConfig, mem_len: int):
        self.params, self.text, self.c, self.mem_len = params, text, c, mem_len
        self.model = TransformerXL(model)
        self.each = -(-(len(text) - c.lengths[-1]) // c.batch_size)  # targets of a stream

    @property
    def batches(self) -> int:
        return -(-(self.c.lengths[-1] - 1 + self.each) // self.c.stride)

    def results(self) -> Iterator[Result]:
        b, stride = self.c.batch_size, self.c.stride
        variables = {"params": self.params}
        mems: Any = self.model.init_mems(b, self.mem_len)
        if not self.model.cfg.scan_layers:
            project = lambda v, m: self.model.apply(v, m, seg_len=stride, method="init_cache")
            mems = jax.jit(project)(variables, mems)

        def step(variables, rows, mems):
            return self.model.apply(variables, rows[:, :-1], rows[:, 1:], mems, method="nll")

        score = jax.jit(step, donate_argnums=(2,))
        for i in range(self.batches):
            starts = np.arange(b) * self.each + i * stride
            rows, _ = _cut(self.text, starts, stride + 1)
            nll, mems = score(variables, rows, mems)
            own = i * stride + 1 - self.c.lengths[-1] + np.arange(stride)  # from its own first
            places = np.arange(b)[:, None] * self.each + own
            places = np.where((own >= 0) & (own < self.each), places, -1)
            yield (self.mem_len,), places[None], np.asarray(nll)[None]


def _cut(text: np.ndarray, starts: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of n tokens from some starts, 0 after the text's end, and their real tokens [B]."""
    at = starts[:, None] + np.arange(n)
    inside = at < len(text)
    rows = np.where(inside, text[np.minimum(at, len(text) - 1)], 0)
    return rows, inside.sum(axis=1, dtype=np.int32)


def effective_length(losses: Losses, threshold: float) -> int:
    """The shortest length from which no longer one lowers perplexity by ``threshold`` (share)."""
    perplexity = np.exp(losses.mean())
    for i, length in enumerate(losses.contexts[:-1]):
        gain = 1 - perplexity[i + 1 :].min() / perplexity[i]
        if gain <= 0 or gain < threshold:
            return length
    return losses.contexts[-1]


def summary(trained: TrainedModel, corpus: Corpus, losses: Losses) -> dict[str, Any]:
    """What ``context.json`` holds: the protocol, the effective length, a row for each length."""
    c, unit = trained.config.context, corpus.vocab.unit
    effective = effective_length(losses, c.threshold)
    how = {"kind": c.kind, "stride": c.stride, "targets": losses.nll.shape[1]}
    rows = [
        {"context": length, "loss": float(loss), unit: in_unit(float(loss), unit), **how}
        for length, loss in zip(losses.contexts, losses.mean(), strict=True)
    ]
    return {
        "name": trained.config.name,
        "step": trained.step,
        "corpus": corpus.name,
        "source_hash": corpus.source_hash,
        "label": corpus.info["label"],
        "split": c.split,
        "unit": unit,
        **how,
        "first_target": losses.contexts[-1],
        "clamp_len": under_protocol(trained.config.model, trained.config.evaluate).clamp_len,
        "threshold": c.threshold,
        "effective_length": effective,
        "effective_is_longest": effective == losses.contexts[-1],
        "results": rows,
    }


def how_measured(c: ContextConfig) -> str:
    """Kind and stride in words."""
    if c.kind == "memory":
        return f"memory of that many states, segments of {c.stride}"
    return f"windows, stride {c.stride}"


def lengths_axis(axes, lengths: tuple[int, ...], c: ContextConfig) -> None:
    """Context lengths along x: their own ticks, logarithmic where they are so."""
    if lengths[-1] - lengths[-2] >= 4 * (lengths[1] - lengths[0]):
        axes.set_xscale("log", base=2)
    shown = lengths[:: -(-len(lengths) // 10)]
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.minorticks_off()
    sees = f"; a target sees c to c+{c.stride - 1}" if c.kind == "window" and c.stride > 1 else ""
    axes.set_xlabel(f"context length c (tokens{sees})")
    axes.grid(alpha=0.3)


def _table(result: dict[str, Any]) -> str:
    unit = result["unit"]
    rows = [
        f"  {r['context']:>7,}  {format_value(r[unit], unit):>9} {unit}" for r in result["results"]
    ]
    told = f"{result['kind']}, stride {result['stride']}, {result['targets']:,} targets"
    return "\n".join([f"{result['split']} split by context length in tokens ({told}):", *rows])


def _picture(trained: TrainedModel, result: dict[str, Any]):
    unit, c = result["unit"], trained.config.context
    figure = pictures.new_figure()
    axes = figure.add_subplot()
    axes.plot(c.lengths, [r[unit] for r in result["results"]], marker="o")
    at_least = "at least " if result["effective_is_longest"] else ""
    axes.axvline(
        result["effective_length"],
        color="C3",
        linestyle="--",
        label=f"effective length {at_least}{result['effective_length']:,} tokens"
        f" (no longer one lowers perplexity by {100 * c.threshold:.3g}%)",
    )
    lengths_axis(axes, c.lengths, c)
    axes.set_ylabel(UNIT_NAMES[unit])
    axes.legend()
    text = f"{result['label']}, {c.split} split, {result['targets']:,} targets, {how_measured(c)}"
    axes.set_title(f"{pictures.described(trained)}\n{text}", fontsize=10)
    return figure
