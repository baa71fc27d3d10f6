"""Scoring a token array or sentences: every target once, memory carried, division last.

The protocol (streams, segment, memory or context, clamp, window) is the config's and stands
beside every result, because the same parameters give other numbers under another protocol.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from txl_jax.config import ProtocolConfig, TransformerXLConfig
from txl_jax.data.batch import Batch, batch_of, warm_up
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import read_ahead
from txl_jax.data.sentences import Sentences, streams_of
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.training.sharding import Placement


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

    Raises:
      DataError: more streams than the tokens allow, or a token out of range.
    """

    def __init__(
        self,
        model: TransformerXLConfig,
        protocol: ProtocolConfig,
        tokens: np.ndarray | Sentences,
        mesh: Mesh,
        name: str = "tokens",
    ):
        self.protocol, self.name = protocol, name
        self.streams = streams_of(
            tokens,
            protocol.batch_size,
            protocol.seg_len,
            name=name,
            vocab_size=model.vocab_size,
            context_len=protocol.context_len,
        )
        self._placement = Placement(mesh)
        self.model = TransformerXL(under_protocol(model, protocol), self._placement.for_model)
        self._warm_segments = -(-protocol.warm_start // protocol.seg_len)
        devices = self._placement.row_devices
        self._rows = -(-protocol.batch_size // devices) * devices
        place = self._placement
        self._score = jax.jit(
            self._score_segment,
            in_shardings=(None, place.batch(), place.memory()),  # parameters as they lie
            out_shardings=(place.everywhere(), place.everywhere(), place.memory()),
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
        """The score of ``params``; ``None`` if ``stop()`` became true on the way.

        ``progress(done, total)`` is told of every segment.

        Raises:
          RuntimeError: not every target was scored once.
        """
        start = time.perf_counter()
        params = jax.device_put(params, self._placement.parameters(params))
        mems = jax.device_put(self._first_memory(), self._placement.memory())
        total, count = 0.0, 0
        pending: list[tuple[jax.Array, jax.Array]] = []

        def settle(keep: int) -> None:  # one segment late: the device never waits
            nonlocal total, count
            while len(pending) > keep:
                nll_sum, n = pending.pop(0)
                total, count = total + float(nll_sum), count + int(n)

        feed = read_ahead(self._batches())
        try:
            for done, batch in enumerate(feed, 1 - self._warm_segments):
                if stop():
                    return None
                nll_sum, n, mems = self._score(params, batch, mems)
                pending.append((nll_sum, n))
                settle(keep=1)
                if done > 0:
                    progress(done, self.segments)
        finally:
            feed.close()
        settle(keep=0)
        if not self.protocol.max_segments and count != self.streams.n_targets:
            raise RuntimeError(
                f"{self.name}: {count:,} targets were scored, and there are"
                f" {self.streams.n_targets:,}; every one must be scored once, please report this"
            )
        return Score(total / count, count, time.perf_counter() - start)

    def _first_memory(self) -> Memory:
        """Memory before the first segment: all slots zeros, real ones if the protocol says so."""
        mems = self.model.init_mems(self._rows, self.protocol.mem_len)
        if self.protocol.first_memory == "zeros":
            return mems.replace(filled=jnp.full_like(mems.filled, mems.mem_len))
        return mems

    def _batches(self) -> Iterator[Batch]:
        """What is read before the first segments, and the segments; on device, rows padded."""
        extra = self._rows - self.protocol.batch_size
        pad = lambda x: np.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1))
        before = warm_up(self.streams, self.protocol.warm_start)
        cold = ~np.any([batch.reset.any(axis=1) for batch in before], axis=0)  # nothing was read
        segments = (batch_of(self.streams.segment(i), forget=False) for i in range(self.segments))
        for index, batch in enumerate(itertools.chain(before, segments)):
            if before and index == len(before):
                batch = batch.replace(reset=cold)
            yield jax.device_put(jax.tree.map(pad, batch), self._placement.batch())

    def _score_segment(self, params, batch: Batch, mems):
        nll, mems = self.model.apply(
            {"params": params},
            batch.inputs,
            batch.targets,
            mems,
            method="nll",
            **batch.about_inputs(self.model.cfg.memory_free),
        )
        return jnp.sum(nll * batch.weights), jnp.sum(batch.weights), mems


def evaluator_of(
    model: TransformerXLConfig, protocol: ProtocolConfig, corpus: Corpus, mesh: Mesh
) -> Evaluator:
    """An evaluator of the corpus's split that the protocol names."""
    tokens = getattr(corpus, protocol.split)
    return Evaluator(model, protocol, tokens, mesh, name=f"the {protocol.split} split")


def under_protocol(model: TransformerXLConfig, protocol: ProtocolConfig) -> TransformerXLConfig:
    """The model's config with the clamp and the window that the protocol names."""
    changes: dict[str, Any] = {}
    if protocol.clamp_len is not None:
        changes["clamp_len"] = protocol.clamp_len
    if protocol.same_length is not None:
        changes["same_length"] = protocol.same_length
    return dataclasses.replace(model, **changes)


def describe(protocol: ProtocolConfig, model: TransformerXLConfig) -> str:
    """The protocol in one line, to stand beside its result."""
    c = under_protocol(model, protocol)
    parts = [
        f"{protocol.split} split",
        f"{protocol.batch_size} streams",
        f"segment {protocol.seg_len}",
        f"context {protocol.context_len}" if protocol.context_len else f"memory {protocol.mem_len}",
    ]
    if protocol.first_memory == "zeros" and protocol.mem_len:
        parts.append("zeros before the first segment")
    if protocol.warm_start:
        parts.append(f"warm start {protocol.warm_start}")
    if c.same_length:
        parts.append(f"window {c.same_length}")
    if c.clamp_len > 0:
        parts.append(f"clamp {c.clamp_len}")
    if protocol.max_segments:
        parts.append(f"first {protocol.max_segments} segments only")
    return ", ".join(parts)
