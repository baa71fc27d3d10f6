"""Scoring a token array or sentences: every target once, memory carried, division last.

The protocol (streams, segment, memory or context, clamp, window) is the config's and stands
beside every result, because the same parameters give other numbers under another protocol.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from txl_jax.config import ProtocolConfig, TransformerXLConfig
from txl_jax.data.batch import Batch, make_batch, warm_up_batches
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import batch_on_device, prefetch
from txl_jax.data.sentences import AnyStreams, Sentences, ordered_streams
from txl_jax.evaluation.dynamic import Learner, add_squares, describe_dynamic, score_and_learn
from txl_jax.model.memory import Cache, Memory, cache_shardings, memory_shardings
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.processes import placed
from txl_jax.parallel.shardings import Shardings


@dataclasses.dataclass(frozen=True)
class Score:
    """What scoring gave.

    Attributes:
      loss: nats per target.
      targets: how many were scored.
      seconds: wall time, compilation included.
    """

    loss: float
    targets: int
    seconds: float


class Evaluator:
    """Scores one split under one protocol, compiled once, with any parameters.

    Args:
      model: its shape; clamp and window are the protocol's where it names them.
      protocol: see :class:`~txl_jax.config.ProtocolConfig`.
      tokens: 1-D integer array, or sentences, scored in their order.
      mesh: devices to spread the streams over; they need not divide the batch.
      name: of the split, for error messages.
      training: the training split, for the statistics of dynamic evaluation ``rms``.

    Attributes:
      keeps_cache: memory is kept as layers project it, so that no segment projects it again.

    Raises:
      DataError: more streams than the tokens allow, or a token out of range.
      ValueError: ``rms`` without a training split.
    """

    def __init__(
        self,
        model: TransformerXLConfig,
        protocol: ProtocolConfig,
        tokens: np.ndarray | Sentences,
        mesh: Mesh,
        name: str = "tokens",
        training: np.ndarray | Sentences | None = None,
    ):
        self.protocol, self.name = protocol, name
        cut = functools.partial(
            ordered_streams,
            batch_size=protocol.batch_size,
            seg_len=protocol.seg_len,
            vocab_size=model.vocab_size,
            context_len=protocol.context_len,
        )
        self.streams = cut(tokens, name=name)
        self._training: AnyStreams | None = None
        if protocol.dynamic.rule == "rms":
            if training is None:
                raise ValueError("dynamic evaluation 'rms' needs the training split")
            self._training = cut(training, name="the train split")
        self._shardings = Shardings(mesh)
        self.model = TransformerXL(under_protocol(model, protocol), self._shardings.mesh)
        self._warm_start = 0  # no more than the text has before the last stream
        if protocol.warm_start:
            self._warm_start = len(
                self.streams.preceding_tokens(protocol.batch_size - 1, protocol.warm_start)
            )
        self._warm_segments = -(-self._warm_start // protocol.seg_len)
        devices = self._shardings.row_devices
        self._rows = -(-protocol.batch_size // devices) * devices
        place = self._shardings
        self.keeps_cache = (
            not (model.scan_layers or model.memory_free)
            and protocol.mem_len > 0
            and not protocol.context_len  # part of a segment is run again
            and protocol.dynamic.rule == "none"  # which changes what a cache is projected by
        )
        self._score = jax.jit(
            self._score_segment,
            in_shardings=(None, place.rows(), None),  # parameters and memory as they lie
            donate_argnums=(2,),
        )
        self._project = jax.jit(self._projected)
        self._score_and_learn = jax.jit(
            functools.partial(score_and_learn, model=self.model, c=protocol.dynamic),
            in_shardings=(None, place.rows(), memory_shardings(place)),
            out_shardings=(*[place.replicated()] * 2, memory_shardings(place), None),
        )
        self._add_squares = jax.jit(
            functools.partial(add_squares, model=self.model),
            in_shardings=(None, None, place.rows(), memory_shardings(place)),
            out_shardings=(None, memory_shardings(place)),
        )

    @property
    def segments(self) -> int:
        """How many segments of each stream are scored."""
        limit = self.protocol.max_segments
        return min(self.streams.n_segments, limit) if limit else self.streams.n_segments

    def run(
        self,
        params: Any,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Score | None:
        """The score of ``params``, which stay as they are; ``None`` if ``stop()`` became true.

        ``progress(done, total)`` is told of every segment, those of statistics included.

        Raises:
          RuntimeError: not every target was scored once.
        """
        start = time.perf_counter()
        params = placed(params, self._shardings.parameters(params))
        dynamic = self.protocol.dynamic
        ahead = dynamic.statistics if self._training else 0
        tell = lambda done: progress(done, ahead + self.segments)
        learner = Learner(params)
        if self._training:
            root = self._root(params, stop, tell)
            if root is None:
                return None
            learner = Learner(params, trained=params, root=root)
        mems: Any = self._placed_first_memory()
        if self.keeps_cache:
            mems = self._project(params, mems)
        total, count = 0.0, 0
        pending: list[tuple[jax.Array, jax.Array]] = []

        def settle(keep: int) -> None:  # one segment late: the device never waits
            nonlocal total, count
            while len(pending) > keep:
                nll_sum, n = pending.pop(0)
                total, count = total + float(nll_sum), count + int(n)

        feed = prefetch(self._batches())
        try:
            for done, batch in enumerate(feed, 1 - self._warm_segments):
                if stop():
                    return None
                if dynamic.rule == "none":
                    nll_sum, n, mems = self._score(params, batch, mems)
                else:
                    nll_sum, n, mems, learner = self._score_and_learn(learner, batch, mems)
                pending.append((nll_sum, n))
                settle(keep=1)
                if done > 0:
                    tell(ahead + done)
        finally:
            feed.close()
        settle(keep=0)
        if not self.protocol.max_segments and count != self.streams.n_targets:
            raise RuntimeError(
                f"{self.name}: {count:,} targets were scored, and there are"
                f" {self.streams.n_targets:,}; every one must be scored once, please report this"
            )
        return Score(total / count, count, time.perf_counter() - start)

    def lower(self, params: Any) -> jax.stages.Lowered:
        """The program that scores a segment, not compiled yet; nothing is computed or moved.

        ``params``: shapes, with where they lie.
        """
        batch = make_batch(self.streams.segment(0), reset_memory=False)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self._rows, *x.shape[1:]), x.dtype), batch
        )
        mems: Any = jax.eval_shape(self._first_memory)
        if self.keeps_cache:
            mems = jax.eval_shape(self._projected, params, mems)
        lie = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        mems = jax.tree.map(lie, mems, self._places(mems))
        rule = self.protocol.dynamic.rule
        if rule == "none":
            return self._score.lower(params, shapes, mems)
        learner = Learner(params, params, params) if rule == "rms" else Learner(params)
        return self._score_and_learn.lower(learner, shapes, mems)

    def _root(
        self, params: Any, stop: Callable[[], bool], tell: Callable[[int], None]
    ) -> Any | None:
        """Root of the squared gradients, summed over training segments; ``None`` if stopped."""
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        squares = jax.jit(zeros, out_shardings=self._shardings.parameters(params))(params)
        mems = self._placed_first_memory()
        feed = prefetch(self._training_batches())
        try:
            for done, batch in enumerate(feed, 1):
                if stop():
                    return None
                squares, mems = self._add_squares(squares, params, batch, mems)
                jax.block_until_ready(mems)  # a queue of steps would hold as many sums
                tell(done)
        finally:
            feed.close()
        return jax.tree.map(jnp.sqrt, squares)

    def _placed_first_memory(self) -> Memory:
        return placed(self._first_memory(), memory_shardings(self._shardings))

    def _first_memory(self) -> Memory:
        """Memory before the first segment: all slots zeros, real ones if the protocol says so."""
        mems = self.model.init_mems(self._rows, self.protocol.mem_len)
        if self.protocol.first_memory == "zeros":
            return mems.replace(filled=jnp.full_like(mems.filled, mems.mem_len))
        return mems

    def _batches(self) -> Iterator[Batch]:
        """What is read before the first segments, and the segments; on device, rows padded."""
        before = self._warm_segments
        n = self._warm_start
        warm = functools.cache(
            lambda first, end: warm_up_batches(self.streams, n, slice(first, end))
        )

        def read(index: int, rows: slice) -> Batch:
            if index < before:
                return warm(rows.start, rows.stop)[index]
            segment = make_batch(self.streams.segment(index - before, rows), reset_memory=False)
            if not before or index > before:
                return segment
            read_before = [batch.reset.any(axis=1) for batch in warm(rows.start, rows.stop)]
            return segment.replace(reset=~np.any(read_before, axis=0))

        for index in range(before + self.segments):
            yield self._placed(functools.partial(read, index))

    def _training_batches(self) -> Iterator[Batch]:
        """The segments of the statistics, from the start again where the split is over."""
        assert self._training is not None
        for index in range(self.protocol.dynamic.statistics):
            yield self._placed(functools.partial(self._training_batch, index))

    def _training_batch(self, index: int, rows: slice) -> Batch:
        assert self._training is not None
        segment = self._training.at_step(index, rows)
        return make_batch(segment, reset_memory=segment.first and index > 0)

    def _placed(self, read: Callable[[slice], Batch]) -> Batch:
        """The rows that ``read`` gives, on device, with as many of padding as the devices need."""

        def padded(rows: slice) -> Batch:
            real = slice(rows.start, min(rows.stop, self.protocol.batch_size))
            batch = read(slice(real.start, max(real.start, real.stop)))
            fill = lambda x: np.pad(
                x, [(0, rows.stop - rows.start - len(x))] + [(0, 0)] * (x.ndim - 1)
            )
            return jax.tree.map(fill, batch)

        return batch_on_device(padded, self._shardings.rows(), self._rows)

    def _score_segment(self, params, batch: Batch, mems):
        nll, mems = self._nll(params, batch, mems)
        sums = jnp.sum(nll * batch.weights), jnp.sum(batch.weights)
        lie = jax.lax.with_sharding_constraint
        return *lie(sums, self._shardings.replicated()), lie(mems, self._places(mems))

    def _nll(self, params, batch: Batch, mems):
        """Nats of each target, float32 [B,T], and the memory after."""
        apply = functools.partial(self.model.apply, {"params": params}, batch.inputs)
        about = batch.model_kwargs(self.model.cfg.memory_free)
        if self.protocol.temperature == 1:
            return apply(batch.targets, mems, method="nll", **about)
        logits, mems = apply(mems, **about)
        log_p = jax.nn.log_softmax(logits / self.protocol.temperature)
        return -jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0], mems

    def _projected(self, params, mems: Memory) -> Cache:
        """The memory as every layer projects it, for segments of the protocol's length."""
        cache: Any = self.model.apply(
            {"params": params}, mems, seg_len=self.protocol.seg_len, method="init_cache"
        )
        return jax.lax.with_sharding_constraint(cache, self._places(cache))

    def _places(self, mems: Memory | Cache) -> Memory | Cache:
        """Where each array of a memory or cache lies."""
        place = self._shardings
        return cache_shardings(place, mems) if isinstance(mems, Cache) else memory_shardings(place)


def evaluator_of(
    model: TransformerXLConfig, protocol: ProtocolConfig, corpus: Corpus, mesh: Mesh
) -> Evaluator:
    """An evaluator of the corpus's split that the protocol names."""
    tokens, name = getattr(corpus, protocol.split), f"the {protocol.split} split"
    return Evaluator(model, protocol, tokens, mesh, name, training=corpus.train)


def under_protocol(model: TransformerXLConfig, protocol: ProtocolConfig) -> TransformerXLConfig:
    """The model's config with the clamp and the window that the protocol names."""
    changes: dict[str, Any] = {}
    if protocol.clamp_len is not None:
        changes["clamp_len"] = protocol.clamp_len
    if protocol.same_length is not None:
        changes["same_length"] = protocol.same_length
    return dataclasses.replace(model, **changes)


def past(protocol: ProtocolConfig) -> str:
    """What a segment sees of the text before it, in words."""
    parts = [f"context {protocol.context_len}"] if protocol.context_len else []
    if protocol.mem_len or not parts:
        parts.append(f"memory {protocol.mem_len}")
    return " and ".join(parts)


def describe(protocol: ProtocolConfig, model: TransformerXLConfig) -> str:
    """The protocol in one line, to stand beside its result."""
    c = under_protocol(model, protocol)
    parts = [f"{protocol.split} split", *_streams(protocol), past(protocol)]
    # with a context, nothing attends to what is before the text
    if protocol.first_memory == "zeros" and protocol.mem_len and not protocol.context_len:
        parts.append("zeros before the first segment")
    if protocol.warm_start and protocol.batch_size > 1:  # nothing is before the first stream
        parts.append(f"warm start {protocol.warm_start}")
    if c.same_length:
        parts.append(f"window {c.same_length}")
    if c.clamp_len > 0 and c.attention != "absolute_per_layer":  # which has a table of positions
        parts.append(f"clamp {c.clamp_len}")
    if protocol.temperature != 1:
        parts.append(f"temperature {protocol.temperature:g}")
    parts += _part(protocol)
    if protocol.dynamic.rule != "none":
        parts.append(describe_dynamic(protocol.dynamic))
    return ", ".join(parts)


def describe_targets(protocol: ProtocolConfig) -> str:
    """Which targets a protocol scores, in one line: all that a baseline depends on."""
    split = f"{protocol.split} split"
    return ", ".join([split, *_streams(protocol), *_part(protocol)]) if _part(protocol) else split


def is_part(told: str) -> bool:
    """Whether a line of :func:`describe` or :func:`describe_targets` is of a part of a split."""
    return _ONLY in told


_ONLY = " segments only"


def _streams(protocol: ProtocolConfig) -> list[str]:
    streams = "1 stream" if protocol.batch_size == 1 else f"{protocol.batch_size} streams"
    return [streams, f"segment {protocol.seg_len}"]


def _part(protocol: ProtocolConfig) -> list[str]:
    return [f"first {protocol.max_segments}{_ONLY}"] if protocol.max_segments else []
