"""Scoring a token array or sentences: every target once, memory carried, division last.

The protocol (streams, segment, memory or context, clamp, window) comes from the config and is
reported with every result, because the same parameters score differently under another protocol.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from txl_jax.config import ProtocolConfig, TransformerXLConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import prefetch
from txl_jax.data.sentences import Sentences, ordered_streams
from txl_jax.evaluation.batches import EvaluationBatches
from txl_jax.evaluation.dynamic import Learner, Params
from txl_jax.evaluation.programs import SegmentPrograms
from txl_jax.evaluation.protocols import under_protocol
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.processes import placed
from txl_jax.parallel.shardings import Shardings


@dataclasses.dataclass(frozen=True)
class Score:
    """Nats per target, number of targets, and wall seconds, compilation included."""

    loss: float
    targets: int
    seconds: float


class Evaluator:
    """Scores one split under one protocol with any parameters, compiled once.

    Args:
      model: the model's config; the protocol may replace its clamp and window.
      protocol: see :class:`~txl_jax.config.ProtocolConfig`.
      tokens: 1-D integer array, or sentences, scored in their order.
      mesh: devices to spread the streams over; they need not divide the batch.
      name: name of the split, for error messages.
      training: the training split, for the statistics of dynamic evaluation ``rms``.

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
        self.protocol, self.name, self._shardings = protocol, name, Shardings(mesh)
        self.model = TransformerXL(under_protocol(model, protocol), mesh)
        streams = functools.partial(
            ordered_streams,
            batch_size=protocol.batch_size,
            seg_len=protocol.seg_len,
            vocab_size=model.vocab_size,
            context_len=protocol.context_len,
        )
        self.streams = streams(tokens, name=name)
        self.batches = EvaluationBatches(self.streams, protocol, self._shardings)
        self.programs = SegmentPrograms(self.model, protocol, self._shardings, self.batches.rows)
        self._training: EvaluationBatches | None = None
        if protocol.dynamic.rule == "rms":
            if training is None:
                raise ValueError("dynamic evaluation 'rms' needs the training split")
            train = streams(training, name="the train split")
            self._training = EvaluationBatches(train, protocol, self._shardings)

    def run(
        self,
        params: Params,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Score | None:
        """The score of ``params``, which do not change; ``None`` if ``stop()`` became true.

        ``progress(done, total)`` is called for each segment, those of statistics included.

        Raises:
          RuntimeError: not every target was scored once.
        """
        start = time.perf_counter()
        params = placed(params, self._shardings.parameters(params))
        n_statistics = self.protocol.dynamic.statistics if self._training else 0
        first_scored = n_statistics + self.batches.warm_up
        total, count, previous = 0.0, 0, (0.0, 0)
        with contextlib.closing(self._sums(params)) as sums:
            for index, latest in enumerate(sums):
                # Fetched after the next segment is dispatched, so the device never waits.
                total, count = total + float(previous[0]), count + int(previous[1])
                previous = latest
                if stop():
                    return None
                if not n_statistics <= index < first_scored:
                    done = index + 1 - (self.batches.warm_up if index >= first_scored else 0)
                    progress(done, n_statistics + self.batches.scored)
        total, count = total + float(previous[0]), count + int(previous[1])
        if not self.protocol.max_segments and count != self.streams.n_targets:
            raise RuntimeError(
                f"{self.name}: {count:,} targets were scored, but the split has"
                f" {self.streams.n_targets:,}, and each must be scored once; please report this"
            )
        return Score(total / count, count, time.perf_counter() - start)

    def lower(self, params: Params) -> jax.stages.Lowered:
        """The program that scores a segment, not compiled; ``params``: shapes with shardings."""
        return self.programs.lower(params, self.batches.shapes())

    def _sums(self, params: Params) -> Generator[tuple[Any, Any], None, None]:
        """Dispatches segments; nll sum and target count of each, 0 where nothing is scored."""
        learner, programs = Learner(params), self.programs
        if self._training:
            zeros = functools.partial(jax.tree.map, jnp.zeros_like)
            squares = jax.jit(zeros, out_shardings=self._shardings.parameters(params))(params)
            mems: Any = programs.empty_memory()
            segments = self._training.first(self.protocol.dynamic.statistics)
            with contextlib.closing(prefetch(segments)) as batches:
                for batch in batches:
                    squares, mems = programs.add_squares(squares, params, batch, mems)
                    jax.block_until_ready(mems)  # queued steps would each hold a copy of the sums
                    yield 0.0, 0
            learner = Learner(params, params, jax.tree.map(jnp.sqrt, squares))
        mems = programs.first_memory(params)
        with contextlib.closing(prefetch(iter(self.batches))) as batches:
            for batch in batches:
                if self.protocol.dynamic.rule == "none":
                    nll_sum, n, mems = programs.score(params, batch, mems)
                else:
                    nll_sum, n, mems, learner = programs.score_and_learn(learner, batch, mems)
                yield nll_sum, n


def split_evaluator(
    model: TransformerXLConfig, protocol: ProtocolConfig, corpus: Corpus, mesh: Mesh
) -> Evaluator:
    """An evaluator for the split of the corpus that the protocol names."""
    tokens, name = getattr(corpus, protocol.split), f"the {protocol.split} split"
    return Evaluator(model, protocol, tokens, mesh, name, training=corpus.train)
