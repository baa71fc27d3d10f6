"""Averages attention over a text, by distance (``--mode=attention``; paper, appendix D).

    split ──▶ segments with memory ──▶ sums by distance ──▶ averages [L,N,K], mean distances [L,N]
                                                                 └──▶ heads with the largest means
    position ──▶ the preceding text ──▶ attention weights ──▶ figure of these heads

The averages include only queries with a full memory, in segments without padding. Later queries of
a segment can attend to larger distances, up to M+T-1. The average at a distance includes only
queries that can attend to this distance. ``seen`` is the number of these queries. A model without
memory (``evaluate.mem_len`` = 0) recomputes M tokens of context before each segment. The clamp and
the window come from the evaluation protocol. Layers and heads are numbered from 0.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from txl_jax.analysis import attention_figures as figures
from txl_jax.analysis.attention_figures import PositionAttention
from txl_jax.analysis.attention_weights import Averages, segment_attention
from txl_jax.analysis.results import AnalysisError, describe_model, write_results
from txl_jax.checkpoint.trained_model import TrainedModel, memory_shapes
from txl_jax.config import ProtocolConfig
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.pieces import running_text
from txl_jax.data.streams import Streams, ordered_streams
from txl_jax.evaluation.evaluator import segment_bar
from txl_jax.evaluation.protocols import describe, under_protocol
from txl_jax.evaluation.split import vocab_note
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import Checked, Work, check_arrays

_WORK = Work.sized_by(
    "reading attention", "attention.batch_size", "attention.seg_len", "attention.mem_len"
)


def run(trained: TrainedModel, workdir: str) -> str:
    """Writes figures, JSON, CSV and arrays ``attention*`` in the workdir. Returns the last line."""
    exp, c, vocab = trained.config, trained.config.attention, trained.vocab
    if vocab.kind == "sentence":
        raise AnalysisError(
            f"attention maps need a continuous text, but data.name={exp.data.name!r} has"
            " unordered sentences; use a model of another corpus"
        )
    reader = AttentionReader(trained)
    corpus = corpus_from_config(exp.data, vocab)
    tokens, name = running_text(getattr(corpus, c.split)), f"the {c.split} split"
    reader.check(tokens, name)
    with segment_bar(f"{c.split} split, attention") as progress:
        averages = reader.averages(tokens, name, progress)
    before = np.asarray(tokens[: c.position + 1][-reader.n_keys :])
    at_position = PositionAttention(
        c.position, reader.at_position(tokens, c.position), before, averages.widest(c.widest), vocab
    )
    source = describe(reader.protocol, exp.model) + vocab_note(corpus, c.split)
    about = {"model": describe_model(trained), "data": f"{corpus.name}, {source}"}
    about["label"] = corpus.info["label"]
    last = "widest heads: " + ", ".join(
        f"layer {layer} head {head} (mean distance {averages.spans[layer, head]:.0f} tokens)"
        for layer, head in at_position.heads
    )
    files = {
        "attention.json": {
            **about,
            "queries": averages.queries,
            "distances": averages.n_keys,
            "terms": sorted(averages.terms) or "left out: this attention has only one term",
            "heads": averages.rows(),
            "position": at_position.to_json(averages.spans),
        },
        "attention.csv": [
            {k: v for k, v in row.items() if k != "share_by_distance"}
            | {f"share_{name}": share for name, share in row["share_by_distance"].items()}
            for row in averages.rows()
        ],
        "attention.npz": averages.arrays(),
        "attention": lambda: figures.averages(about, averages),
        "attention_terms": (lambda: figures.terms(about, averages)) if averages.terms else None,
        "attention_heads": lambda: figures.heads(about, averages, at_position),
    }
    return write_results(workdir, last, files)


class AttentionReader:
    """Measures the attention of a trained model on a text, with one compilation.

    ``n_keys`` is K, the number of keys of the last query of a segment. Raises AnalysisError if the
    model does not allow the lengths of ``config.attention``.
    """

    def __init__(self, trained: TrainedModel):
        self.settings, evaluate = trained.config.attention, trained.config.evaluate
        c, past = self.settings, "mem_len" if evaluate.mem_len else "context_len"
        lengths: dict[str, Any] = {"seg_len": c.seg_len, "mem_len": 0, past: c.mem_len}
        own = {key: getattr(evaluate, key) for key in ("clamp_len", "same_length")}
        self.protocol = ProtocolConfig(split=c.split, batch_size=c.batch_size, **lengths, **own)
        self._params = jax.device_put(trained.params)
        self.n_keys = c.mem_len + c.seg_len
        self._warm_up = -(-c.mem_len // c.seg_len)  # segments until memory or context is full
        model = under_protocol(trained.config.model, self.protocol)
        if model.same_length and not self.protocol.mem_len:
            raise AnalysisError(
                f"attention.mem_len = 0: the window same_length={model.same_length!r} needs a"
                " memory; use evaluate.same_length=False"
            )
        limit = model.segment_limit
        if limit is not None and self.n_keys > limit:
            raise AnalysisError(
                f"attention.mem_len = {c.mem_len} + attention.seg_len = {c.seg_len} is larger than"
                f" model.n_positions = {limit}; use smaller lengths"
            )
        self._model = TransformerXL(model)
        check_arrays(_WORK, memory_shapes(model, c.batch_size, self.protocol.mem_len))
        measure = functools.partial(segment_attention, self._model)
        self._measure = Checked(jax.jit(measure, donate_argnums=2), _WORK)
        read = lambda params, *args: self._model.apply({"params": params}, *args)[1]
        self._read = Checked(jax.jit(read, donate_argnums=2), _WORK)

    def check(self, tokens: np.ndarray, name: str) -> None:
        """Raises AnalysisError if the split is too short, or ``attention.position`` is invalid."""
        p, c = self.protocol, self.settings
        if self._streams(tokens, name)[1] <= self._warm_up:
            raise AnalysisError(
                f"attention.mem_len = {c.mem_len}: no segment of {c.seg_len} tokens has so many"
                f" preceding tokens in {name}, which has {len(tokens):,} tokens in {p.batch_size}"
                " streams; lower attention.mem_len or attention.batch_size"
            )
        least = (self._warm_up + 1) * p.seg_len - 1 if p.mem_len else self.n_keys - 1
        if not least <= c.position < len(tokens):
            raise AnalysisError(
                f"attention.position = {c.position}: must be from {least}, where memory is full,"
                f" to {len(tokens) - 1}, the last token of {name}"
            )

    def averages(
        self,
        tokens: np.ndarray,
        name: str = "tokens",
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Averages:
        """Returns attention averaged over the first segments in which memory or context is full.

        The segments have at least ``attention.max_tokens`` queries in all. If the setting is 0, or
        the text is too short for it, all segments without padding are read.
        """
        p, limit = self.protocol, self.settings.max_tokens
        (streams, end), first = self._streams(tokens, name), self._warm_up
        begin = 0 if p.mem_len else first
        if limit:
            end = min(end, first - (-limit // (p.batch_size * p.seg_len)))
        weights = np.ones((p.batch_size, p.seg_len), np.float32)
        mems: Any = self._model.init_mems(p.batch_size, p.mem_len)
        total: Any = None
        for index in range(begin, end):
            inputs = streams.segment(index).inputs
            if index < first:
                mems = self._advance(inputs, mems)
            else:
                sums, _, mems = self._measure(self._params, inputs, mems, weights)
                sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
                total = sums if total is None else jax.tree.map(np.add, total, sums)
            progress(index + 1 - begin, end - begin)
        return Averages.of(total)

    def at_position(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Computes the attention of one token by distance: float32 [L,N,K], 0 where masked.

        The token is the last of its segment. The model first reads the text before the segment: L
        memory lengths, or less near the start of the text.
        """
        p = self.protocol
        start = position + 1 - p.seg_len - p.context_len  # start of the segment or its context
        before = min(self._warm_up * self._model.cfg.n_layer, start // p.seg_len)
        mems: Any = self._model.init_mems(1, p.mem_len)
        text = np.asarray(tokens[: position + 1], np.int32)[None]
        if p.mem_len:
            for begin in range(start - before * p.seg_len, start, p.seg_len):
                mems = self._advance(text[:, begin : begin + p.seg_len], mems)
        weights = np.ones((1, p.seg_len), np.float32)
        _, last, _ = self._measure(self._params, text[:, start:], mems, weights)
        return np.asarray(last[:, :, 0, ::-1])

    def _advance(self, inputs: np.ndarray, mems: Memory) -> Memory:
        """Returns the memory after a segment, once it is computed.

        Without waiting, several segments in the queue would occupy the device's memory.
        """
        return jax.block_until_ready(self._read(self._params, inputs, mems))

    def _streams(self, tokens: np.ndarray, name: str) -> tuple[Streams, int]:
        """Returns the streams of the text, and the number of segments without padding."""
        p, size = self.protocol, self._model.cfg.vocab_size
        options: Any = {"name": name, "vocab_size": size, "context_len": p.context_len}
        streams = ordered_streams(tokens, p.batch_size, p.seg_len, **options)
        before_last = (p.batch_size - 1) * streams.targets_per_stream  # the last stream is shortest
        return streams, max(0, streams.n_targets - before_last) // p.seg_len
