"""Scoring a token array: every target once, memory carried, division last.

The protocol (streams, segment, memory or context, clamp, window) is the config's and stands
beside every result, because the same parameters give other numbers under another protocol.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from txl_jax.config import ProtocolConfig, TransformerXLConfig
from txl_jax.data.batch import Batch, batch_of
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import read_ahead
from txl_jax.data.streams import Streams
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
    """Scores one token array under one protocol, compiled once, with any parameters.

    Args:
      model: its shape; clamp and window are the protocol's where it names them.
      protocol: see :class:`~txl_jax.config.ProtocolConfig`.
      tokens: 1-D integer array.
      mesh: devices to spread the streams over; they need not divide the batch.
      name: of the split, for error messages.

    Raises:
      DataError: more streams than the tokens allow, or a token out of range.
    """

    def __init__(
        self,
        model: TransformerXLConfig,
        protocol: ProtocolConfig,
        tokens: np.ndarray,
        mesh: Mesh,
        name: str = "tokens",
    ):
        self.protocol = protocol
        self.streams = Streams(
            tokens,
            protocol.batch_size,
            protocol.seg_len,
            name=name,
            vocab_size=model.vocab_size,
            context_len=protocol.context_len,
        )
        self.model = TransformerXL(under_protocol(model, protocol))
        self._placement = Placement(mesh)
        devices = mesh.shape["data"]
        self._rows = -(-protocol.batch_size // devices) * devices
        place = self._placement
        self._score = jax.jit(
            self._score_segment,
            in_shardings=(place.everywhere(), place.batch(), place.memory()),
            out_shardings=(place.everywhere(), place.memory()),
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
        """
        start = time.perf_counter()
        params = jax.device_put(params, self._placement.everywhere())
        mems = jax.device_put(self._first_memory(), self._placement.memory())
        total, count = 0.0, 0
        pending: list[tuple[jax.Array, int]] = []
        feed = read_ahead(self._batches())
        try:
            for index, (batch, targets) in enumerate(feed):
                if stop():
                    return None
                nll_sum, mems = self._score(params, batch, mems)
                pending.append((nll_sum, targets))
                if len(pending) > 1:  # fetched one segment late: the device never waits
                    value, n = pending.pop(0)
                    total, count = total + float(value), count + n
                progress(index + 1, self.segments)
        finally:
            feed.close()
        for value, n in pending:
            total, count = total + float(value), count + n
        return Score(total / count, count, time.perf_counter() - start)

    def _first_memory(self) -> Memory:
        """Memory before the first segment: all slots zeros, real ones if the protocol says so."""
        mems = self.model.init_mems(self._rows, self.protocol.mem_len)
        if self.protocol.first_memory == "zeros":
            return mems.replace(filled=jnp.full_like(mems.filled, mems.mem_len))
        return mems

    def _batches(self):
        extra = self._rows - self.protocol.batch_size
        for index in range(self.segments):
            batch = batch_of(self.streams.segment(index), forget=False)
            targets = int(batch.weights.sum())
            if extra:
                pad = lambda x: np.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1))
                batch = jax.tree.map(pad, batch)
            yield jax.device_put(batch, self._placement.batch()), targets

    def _score_segment(self, params, batch: Batch, mems):
        nll, mems = self.model.apply(
            {"params": params},
            batch.inputs,
            batch.targets,
            mems,
            method="nll",
            **batch.about_inputs(self.model.cfg.memory_free),
        )
        return jnp.sum(nll * batch.weights), mems


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
    if c.same_length:
        parts.append(f"window {c.same_length}")
    if c.clamp_len > 0:
        parts.append(f"clamp {c.clamp_len}")
    if protocol.max_segments:
        parts.append(f"first {protocol.max_segments} segments only")
    return ", ".join(parts)
