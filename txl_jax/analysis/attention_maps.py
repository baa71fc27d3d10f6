"""Where heads look: attention averaged over a text, by distance (paper, appendix D).

    split ──▶ segments, memory carried ──▶ sums by distance ──▶ averages [L,N,K], spans [L,N]
                                                                      └──▶ the widest heads
    position ──▶ the text before it ───────▶ its own probabilities ──▶ what these look at there

Which queries are averaged: those with all of their memory before them, so that none had less to
look at than the others; whole segments only. Each of them sees the distances 0 to M (a window
less). Larger ones, up to M+T-1, only the later queries of a segment see: the average at a distance
is over the queries that see it, and ``seen`` counts them.

A model that is evaluated without memory (``evaluate.mem_len`` = 0, as every form of attention that
has none) is given the M tokens before each segment again instead, as context; its queries are those
of the segment. Clamp and window are those of the evaluation protocol. Layers and heads are counted
from 0, as in the parameters.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from txl_jax.analysis.attention_averages import Averages, write_numbers
from txl_jax.analysis.attention_pictures import Attended, draw
from txl_jax.analysis.attention_weights import Sums, watched_segment
from txl_jax.analysis.pictures import described
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir_files import check_outputs, print_on_error
from txl_jax.config import ProtocolConfig, TransformerXLConfig
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.streams import Streams
from txl_jax.evaluation.errors import AnalysisError
from txl_jax.evaluation.evaluate import describe, under_protocol
from txl_jax.evaluation.report import of_vocab, segment_bar
from txl_jax.model.footprint import of_reading
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import check_memory


def run(trained: TrainedModel, workdir: str) -> str:
    """Writes ``attention*`` in the workdir: pictures, JSON, CSV and arrays; the widest heads."""
    c = trained.config.attention
    _check_kind(trained)
    check_size(trained)
    check_outputs(workdir, "attention")
    reader = Reader(trained)
    corpus = corpus_from_config(trained.config.data, trained.vocab)
    tokens, name = getattr(corpus, c.split), f"the {c.split} split"
    reader.check(tokens, name)
    with segment_bar(f"{c.split} split, attention") as progress:
        averages = reader.averages(tokens, name, progress)
    attended = Attended(
        c.position,
        reader.at(tokens, c.position),
        np.asarray(tokens[: c.position + 1][-reader.n_keys :]),
        averages.widest(c.widest),
    )
    about = {
        "model": described(trained),
        "data": f"{corpus.name}, {describe(reader.protocol, trained.config.model)}"
        + of_vocab(corpus, c.split),
        "label": corpus.info["label"],
    }
    widest = "widest heads: " + ", ".join(
        f"layer {layer} head {head} (mean distance {averages.spans[layer, head]:.0f} tokens)"
        for layer, head in attended.heads
    )
    with print_on_error(widest):
        write_numbers(workdir, about, averages, attended.to_json(trained.vocab, averages.spans))
        longest = _longest_in_training(trained)
        draw(workdir, about, averages, attended, trained.vocab, longest)
    return widest


def check_size(trained: TrainedModel) -> None:
    """Raises ConfigError where a segment's attention weights do not fit the device's memory."""
    exp, c = trained.config, trained.config.attention
    model = dataclasses.replace(exp.model, kernel="reference")  # all weights of a layer at once
    again = exp.evaluate.mem_len == 0
    length, mem_len = (c.mem_len + c.seg_len, 0) if again else (c.seg_len, c.mem_len)
    keys = tuple(f"attention.{name}" for name in ("batch_size", "seg_len", "mem_len"))
    check_memory("reading attention", of_reading(model, c.batch_size, length, mem_len, keys), exp)


class Reader:
    """Reads a text with a trained model and watches its attention; compiled once.

    Args:
      trained: the model; ``config.attention`` says how it reads.

    Attributes:
      protocol: that of evaluation, with the lengths that attention is read with.
      n_keys: K, the keys of the last query of a segment.

    Raises:
      AnalysisError: lengths that this model cannot be read with.
    """

    def __init__(self, trained: TrainedModel):
        exp, c = trained.config, trained.config.attention
        again = exp.evaluate.mem_len == 0
        self.settings, self._params = c, jax.device_put(trained.params)
        self.protocol = ProtocolConfig(
            split=c.split,
            batch_size=c.batch_size,
            seg_len=c.seg_len,
            mem_len=0 if again else c.mem_len,
            context_len=c.mem_len if again else 0,
            clamp_len=exp.evaluate.clamp_len,
            same_length=exp.evaluate.same_length,
        )
        self.n_keys = c.mem_len + c.seg_len
        model = under_protocol(exp.model, self.protocol)
        _check_lengths(model, self.protocol)
        self._model = TransformerXL(model)
        self._watch = jax.jit(functools.partial(watched_segment, self._model), donate_argnums=2)
        self._advance = jax.jit(self._memory_after, donate_argnums=2)

    def check(self, tokens: np.ndarray, name: str) -> None:
        """Raises AnalysisError for a split or a position with less before it than is asked."""
        p, c = self.protocol, self.settings
        if self._whole(self._streams(tokens, name)) <= self._unread:
            raise AnalysisError(
                f"attention.mem_len = {c.mem_len}: no segment of {c.seg_len} tokens has so many"
                f" before it in {name}, which has {len(tokens):,} tokens in {p.batch_size}"
                " streams; use less memory, or fewer streams"
            )
        least = (self._unread + 1) * p.seg_len - 1 if p.mem_len else self.n_keys - 1
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
        """Attention averaged over so many queries as the config says, whole segments of them.

        ``progress(done, total)`` is told of every segment.
        """
        p, limit = self.protocol, self.settings.max_tokens
        streams, first = self._streams(tokens, name), self._unread
        asked = -(-limit // (p.batch_size * p.seg_len)) if limit else len(streams)
        end = min(first + asked, self._whole(streams))
        begin = 0 if p.mem_len else first
        weights = np.ones((p.batch_size, p.seg_len), np.float32)
        mems: Any = self._model.init_mems(p.batch_size, p.mem_len)
        total: Sums | None = None
        for index in range(begin, end):
            inputs = streams.segment(index).inputs
            if index < first:
                mems = self._advanced(inputs, mems)
            else:
                sums, _, mems = self._watch(self._params, inputs, mems, weights)
                sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
                total = sums if total is None else jax.tree.map(np.add, total, sums)
            progress(index + 1 - begin, end - begin)
        assert total is not None, "check() lets no such text pass"
        return Averages.of(total)

    def at(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """What the token at a position gives to each distance: float32 [L,N,K], 0 where unseen.

        It is in the last place of its segment. Memory is read from as far back as its states can
        depend on, L memories, or from the start of the text.
        """
        p = self.protocol
        start = position + 1 - p.seg_len - p.context_len  # of its segment, or of its context
        before = min(self._unread * self._model.cfg.n_layer, start // p.seg_len)
        mems: Any = self._model.init_mems(1, p.mem_len)
        cut = lambda i, j: np.asarray(tokens[i:j], np.int32)[None]
        if p.mem_len:
            for begin in range(start - before * p.seg_len, start, p.seg_len):
                mems = self._advanced(cut(begin, begin + p.seg_len), mems)
        weights = np.ones((1, p.seg_len), np.float32)
        _, last, _ = self._watch(self._params, cut(start, position + 1), mems, weights)
        return np.asarray(last[:, :, 0, ::-1])

    @property
    def _unread(self) -> int:
        """Segments before the first one whose queries have all of their memory, or context."""
        return -(-self.settings.mem_len // self.protocol.seg_len)

    def _streams(self, tokens: np.ndarray, name: str) -> Streams:
        p = self.protocol
        return Streams(
            tokens,
            p.batch_size,
            p.seg_len,
            name=name,
            vocab_size=self._model.cfg.vocab_size,
            context_len=p.context_len,
        )

    def _whole(self, streams: Streams) -> int:
        """Segments that no stream has padding in; the last stream is the shortest."""
        before_last = (streams.batch_size - 1) * streams.targets_per_stream
        return max(0, streams.n_targets - before_last) // streams.seg_len

    def _advanced(self, inputs: np.ndarray, mems: Memory) -> Memory:
        """Memory after a segment, once it is there: a queue of segments would hold as many."""
        return jax.block_until_ready(self._advance(self._params, inputs, mems))

    def _memory_after(self, params, inputs, mems):
        return self._model.apply({"params": params}, inputs, mems)[1]


def _check_kind(trained: TrainedModel) -> None:
    if trained.vocab.kind == "sentence":
        raise AnalysisError(
            f"--mode=attention reads one text, and data.name={trained.config.data.name!r} is"
            " sentences in no order; use a model of another corpus"
        )


def _check_lengths(model: TransformerXLConfig, p: ProtocolConfig) -> None:
    """Raises AnalysisError where the model cannot be read with these lengths."""
    if model.same_length and not p.mem_len:
        raise AnalysisError(
            f"attention.mem_len = {p.mem_len}: the window same_length={model.same_length!r} lets"
            " nothing be seen without memory; use evaluate.same_length=False"
        )
    learnt = model.n_positions if model.attention == "absolute_per_layer" else None
    if learnt is not None and p.context_len + p.seg_len > learnt:
        raise AnalysisError(
            f"attention.mem_len = {p.context_len}: with attention.seg_len {p.seg_len} is more than"
            f" the {learnt} positions that the model has learnt (model.n_positions); use"
            f" attention.mem_len={max(0, learnt - p.seg_len)}"
        )


def _longest_in_training(trained: TrainedModel) -> int:
    """The largest distance that the model was trained to look back."""
    model, c = trained.config.model, trained.config.train
    if model.same_length:
        return c.mem_len - (model.same_length == "pytorch")
    return c.seg_len + c.mem_len + c.context_len - 1
