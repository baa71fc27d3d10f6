"""Scores a token array or sentences. Each target is scored once, with memory across segments.

The evaluation protocol (streams, segment, memory or context, clamp, window) comes from the config.
Every result names its protocol, because the score of the same parameters depends on the protocol.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from txl_jax.config import ProtocolConfig, TransformerXLConfig
from txl_jax.data.batch import Batch, make_batch, warm_up_batches
from txl_jax.data.corpus import Corpus
from txl_jax.data.feed import batch_on_device, prefetch
from txl_jax.data.pieces import Split
from txl_jax.data.streams import Streams, ordered_streams
from txl_jax.evaluation import dynamic
from txl_jax.evaluation.dynamic import Learner, Params, Rates
from txl_jax.evaluation.protocols import keeps_cache, memory_slots, under_protocol
from txl_jax.model import self_check
from txl_jax.model.attention import may_fuse_cache
from txl_jax.model.kernels.choice import compiler_options
from txl_jax.model.memory import Cache, Memory, cache_shardings, memory_shardings
from txl_jax.model.precision import in_compute_dtype
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import EVALUATION, Checked, Work, explained
from txl_jax.parallel.processes import is_process_zero, placed
from txl_jax.parallel.shardings import Shardings
from txl_jax.progress import work_bar


@dataclasses.dataclass(frozen=True)
class Score:
    """The loss in nats per target, the number of targets, and the seconds including compilation."""

    loss: float
    targets: int
    seconds: float


class EvaluationBatches:
    """The segments of B streams under a protocol, padded with empty rows to fill all devices.

    ``rows`` is B, rounded up to a multiple of the number of devices that rows are split over.
    ``warm_up`` is the number of segments before the first scored segment. ``scored`` is the number
    of scored segments.
    """

    def __init__(self, streams: Streams, protocol: ProtocolConfig, shardings: Shardings):
        self._streams, self._sharding = streams, shardings.rows()
        self.rows = -(-protocol.batch_size // shardings.row_devices) * shardings.row_devices
        last = protocol.batch_size - 1  # the stream with the most tokens before it
        self._warm_up_len = len(streams.preceding_tokens(last, protocol.warm_start))
        self.warm_up = -(-self._warm_up_len // protocol.seg_len)
        self.scored = min(streams.n_segments, protocol.max_segments or streams.n_segments)

    def shapes(self) -> Batch:
        """Returns the shapes and dtypes of a batch."""
        batch = make_batch(self._streams.segment(0, slice(0)), reset_memory=False)
        shape = lambda x: jax.ShapeDtypeStruct((self.rows, *x.shape[1:]), x.dtype)
        return jax.tree.map(shape, batch)

    def episodes(self) -> tuple[bool, ...]:
        """Tells for each compiled program whether its segments have memory resets within a row.

        Documents and warm-up segments have resets. Warm-up segments need a second program if the
        scored segments have no resets.
        """
        of_scored = self.shapes().reset.ndim == 2
        return (True, False) if self.warm_up and not of_scored else (of_scored,)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the warm-up segments, then the scored segments."""
        warm_up = functools.cache(
            lambda *rows: warm_up_batches(self._streams, self._warm_up_len, slice(*rows))
        )

        def read(index: int, rows: slice) -> Batch:
            if index < self.warm_up:
                return warm_up(rows.start, rows.stop)[index]
            batch = make_batch(self._streams.segment(index - self.warm_up, rows), False)
            if index and index == self.warm_up:  # streams without warm-up start with empty memory
                has_text = [b.reset.any(axis=1) for b in warm_up(rows.start, rows.stop)]
                batch = batch.replace(reset=~np.any(has_text, axis=0))
            return batch

        return self._on_device(read, self.warm_up + self.scored)

    def first(self, n: int) -> Iterator[Batch]:
        """Yields n segments without warm-up. After their last segment, the streams start again."""

        def read(index: int, rows: slice) -> Batch:
            segment = self._streams.at_step(index, rows)
            return make_batch(segment, reset_memory=segment.first and index > 0)

        return self._on_device(read, n)

    def _on_device(self, read: Callable[[int, slice], Batch], n: int) -> Iterator[Batch]:
        def padded(index: int, rows: slice) -> Batch:
            stop = max(rows.start, min(rows.stop, self._streams.batch_size))
            pad = lambda x: np.pad(x, [(0, rows.stop - stop)] + [(0, 0)] * (x.ndim - 1))
            return jax.tree.map(pad, read(index, slice(rows.start, stop)))

        for index in range(n):
            yield batch_on_device(functools.partial(padded, index), self._sharding, self.rows)


class Evaluator:
    """Scores one split under one protocol with any parameters, with one compilation.

    Args:
      model: the configuration of the model. The protocol can replace its clamp and window.
      protocol: the evaluation protocol.
      tokens: a 1-D integer array, sentences or documents. DataError is raised if there are too few
        tokens for the streams, or if an id is out of range.
      mesh: the devices that streams are split over. Their number need not divide the batch size.
      name: the name of the split, for error messages.
      training: the training split, which dynamic evaluation ``rms`` needs for its statistics.
      work: the name of this work and the settings to change, for an error about device memory.
    """

    def __init__(
        self,
        model: TransformerXLConfig,
        protocol: ProtocolConfig,
        tokens: Split,
        mesh: Mesh,
        name: str = "tokens",
        training: Split | None = None,
        work: Work = EVALUATION,
    ):
        self.protocol, self.name, self._shardings = protocol, name, Shardings(mesh)
        self.model = TransformerXL(under_protocol(model, protocol), mesh)
        b, t = protocol.batch_size, protocol.seg_len
        options: dict[str, Any] = {
            "vocab_size": model.vocab_size,
            "context_len": protocol.context_len,
            "key": work.batch_key,
        }
        self.streams = ordered_streams(tokens, b, t, name=name, **options)
        self.batches = EvaluationBatches(self.streams, protocol, self._shardings)
        self._training: EvaluationBatches | None = None
        if protocol.dynamic.rule == "rms":
            if training is None:
                raise ValueError("dynamic.rule = 'rms' needs the training split; give training")
            train = ordered_streams(training, b, t, name="the train split", **options)
            self._training = EvaluationBatches(train, protocol, self._shardings)
        self._programs = _programs(self.model.cfg, mesh, protocol.temperature == 1, t)
        self._temperature = np.float32(protocol.temperature)
        self._rates = dynamic.rates_of(protocol.dynamic)
        self._work, self._score = work, Checked(self._programs.score, work)
        self._learn = Checked(self._programs.score_and_learn, work)

    def run(
        self,
        params: Params,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Score | None:
        """Scores ``params`` without changing them. Returns ``None`` if ``stop()`` became true.

        ``progress(done, total)`` is called after each segment, except those of a warm start.
        """
        self.check_attention()
        start = time.perf_counter()
        params = self._matrices(placed(params, self._shardings.parameters(params)))
        n_statistics = self.protocol.dynamic.statistics if self._training else 0
        first_scored = n_statistics + self.batches.warm_up
        total, count, previous = 0.0, 0, (0.0, 0)
        with explained(self._work), contextlib.closing(self._sums(params)) as sums:
            for index, latest in enumerate(sums):
                # The sums are read after the next segment is dispatched, so the device never waits.
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
                f" {self.streams.n_targets:,} targets; please report this error"
            )
        return Score(total / count, count, time.perf_counter() - start)

    def check_attention(self) -> None:
        """Runs the self-check of the attention that scoring computes (model/self_check.py)."""
        (c, mesh), p = (self.model.cfg, self._shardings.mesh), self.protocol
        cached = keeps_cache(c, p)
        if cached and not may_fuse_cache(c, mesh):
            return
        sizes = self.batches.rows, p.context_len + p.seg_len, memory_slots(c, p)
        for episodes in self.batches.episodes():
            self_check.check(c, mesh, *sizes, train=False, episodes=episodes, cached=cached)

    def lower(self, params: Params, warm_up: bool = False) -> jax.stages.Lowered:
        """Lowers the program of a scored segment or, with ``warm_up``, of a warm-up segment.

        ``params`` has shapes with shardings.
        """
        params = self._matrices(params)
        mems, batch = self.first_memory_shapes(params), self.batches.shapes()
        if warm_up:
            batch = batch.replace(reset=jax.ShapeDtypeStruct(batch.inputs.shape, bool))
        rule = self.protocol.dynamic.rule
        if rule == "none":
            return self._score.lower(params, batch, mems, self._temperature)
        learner = Learner(params, params, params) if rule == "rms" else Learner(params)
        return self._learn.lower(learner, batch, mems, self._rates)

    def lower_before(self, params: Params) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Returns functions that lower the programs before the first scored segment, by name."""
        found: dict[str, Callable[[], jax.stages.Lowered]] = {}
        if self.batches.episodes() == (True, False):
            found["warm-up"] = functools.partial(self.lower, params, warm_up=True)
        params = self._matrices(params)
        programs, mems = self._programs, self._placed(jax.eval_shape(self._init_mems))
        if keeps_cache(self.model.cfg, self.protocol):
            found["cache"] = functools.partial(programs.init_cache.lower, params, mems)
        if self._training:
            found["zeros"] = functools.partial(programs.zeros.lower, params)
            inputs = params, params, self._training.shapes(), mems
            found["squares"] = functools.partial(programs.add_squares.lower, *inputs)
        return found

    def _matrices(self, params: Params) -> Params:
        """Casts matrices to the compute dtype once, unless they are learnt or scaled in float32.

        Dynamic evaluation learns the matrices. A model with ``pre_lnorm`` scales some of them.
        """
        c = self.model.cfg
        learnt = self.protocol.dynamic.rule != "none"
        return params if learnt or c.pre_lnorm else in_compute_dtype(c, params)

    def first_memory_shapes(self, params: Params) -> Any:
        """Returns the shapes and shardings of the memory or cache before the first segment."""
        mems: Any = jax.eval_shape(self._init_mems)
        if keeps_cache(self.model.cfg, self.protocol):
            mems = jax.eval_shape(self._programs.init_cache, params, mems)
        return self._placed(mems)

    def _placed(self, mems: Any) -> Any:
        place = lambda x, sharding: x.update(sharding=sharding)
        return jax.tree.map(place, mems, _memory_shardings(self._shardings, mems))

    def _sums(self, params: Params) -> Generator[tuple[Any, Any], None, None]:
        """Dispatches segments. Yields the loss sum and number of scored targets of each segment."""
        learner, empty = Learner(params), memory_shardings(self._shardings)
        mems: Any = placed(self._init_mems(), empty)
        if self._training:
            squares = self._programs.zeros(params)
            segments = self._training.first(self.protocol.dynamic.statistics)
            with contextlib.closing(prefetch(segments)) as batches:
                for batch in batches:
                    squares, mems = self._programs.add_squares(squares, params, batch, mems)
                    jax.block_until_ready(mems)  # each queued step would hold a copy of the sums
                    yield 0.0, 0
            learner = Learner(params, params, jax.tree.map(jnp.sqrt, squares))
            mems = placed(self._init_mems(), empty)
        if keeps_cache(self.model.cfg, self.protocol):
            mems = self._programs.init_cache(params, mems)
        with contextlib.closing(prefetch(iter(self.batches))) as batches:
            for batch in batches:
                if self.protocol.dynamic.rule == "none":
                    nll_sum, n, mems = self._score(params, batch, mems, self._temperature)
                else:
                    nll_sum, n, mems, learner = self._learn(learner, batch, mems, self._rates)
                yield nll_sum, n

    def _init_mems(self) -> Memory:
        mems = self.model.init_mems(self.batches.rows, self.protocol.mem_len)
        # As in the authors' code, these zeros count as real states.
        if self.protocol.first_memory == "zeros":
            return mems.replace(filled=jnp.full_like(mems.filled, mems.mem_len))
        return mems


class _Programs(NamedTuple):
    """The compiled functions of an evaluator, with their arguments and results."""

    score: Any  # (params, batch, mems, temperature) -> nll_sum, count, mems
    score_and_learn: Any  # (learner, batch, mems, rates) -> nll_sum, count, mems, learner
    add_squares: Any  # (squares, params, batch, mems) -> squares, mems
    init_cache: Any  # (params, mems) -> cache
    zeros: Any  # params -> squares


@functools.lru_cache(maxsize=8)
def _programs(
    cfg: TransformerXLConfig, mesh: Mesh, own_temperature: bool, seg_len: int
) -> _Programs:
    """Returns the programs of all evaluators with these settings, so that each compiles once.

    The programs hold no parameters and no text. ``own_temperature`` tells whether the temperature
    is 1; then the program does not divide the logits.
    """
    model, place = TransformerXL(cfg, mesh), Shardings(mesh)
    rows, mems, whole = place.rows(), memory_shardings(place), place.replicated()
    constrain = jax.lax.with_sharding_constraint

    def score(params: Params, batch: Batch, mems, temperature):
        apply = functools.partial(model.apply, {"params": params}, batch.inputs)
        kwargs = batch.model_kwargs(model.cfg.memory_free)
        if own_temperature:
            nll, mems = apply(batch.targets, mems, method="nll", **kwargs)
        else:
            logits, mems = apply(mems, **kwargs)
            log_p = jax.nn.log_softmax(logits / temperature)
            nll = -jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
        sums = jnp.sum(nll * batch.weights), jnp.sum(batch.weights)
        return *constrain(sums, whole), constrain(mems, _memory_shardings(place, mems))

    def learn(learner: Learner, batch: Batch, mems: Memory, rates: Rates):
        return dynamic.score_and_learn(learner, batch, mems, model, rates)

    def init_cache(params: Params, mems: Memory) -> Cache:
        cache: Any = model.apply({"params": params}, mems, seg_len=seg_len, method="init_cache")
        return constrain(cache, _memory_shardings(place, cache))

    def zeros(params: Params) -> Params:
        return constrain(jax.tree.map(jnp.zeros_like, params), place.parameters(params))

    return _Programs(
        jax.jit(
            score,
            in_shardings=(None, rows, None, None),  # parameters and memory keep their shardings
            donate_argnums=(2,),
        ),
        jax.jit(
            learn,
            in_shardings=(None, rows, mems, None),
            out_shardings=(whole, whole, mems, None),
            compiler_options=compiler_options(mesh),
        ),
        jax.jit(
            functools.partial(dynamic.add_squares, model=model),
            in_shardings=(None, None, rows, mems),
            out_shardings=(None, mems),
            compiler_options=compiler_options(mesh),
        ),
        jax.jit(init_cache),
        jax.jit(zeros),
    )


def _memory_shardings(place: Shardings, mems: Memory | Cache) -> Memory | Cache:
    return cache_shardings(place, mems) if isinstance(mems, Cache) else memory_shardings(place)


def split_evaluator(
    model: TransformerXLConfig,
    protocol: ProtocolConfig,
    corpus: Corpus,
    mesh: Mesh,
    work: Work = EVALUATION,
) -> Evaluator:
    """Builds an evaluator for the corpus split of the protocol."""
    tokens, name = getattr(corpus, protocol.split), f"the {protocol.split} split"
    return Evaluator(model, protocol, tokens, mesh, name, corpus.train, work)


@contextlib.contextmanager
def segment_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on stderr. Yields a function ``progress`` for :meth:`Evaluator.run`."""
    with work_bar(title, None, "segment", disable=not is_process_zero()) as shown:

        def progress(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield progress
