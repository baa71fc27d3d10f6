"""The compiled functions that score one segment, and the memory before the first one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.config import ProtocolConfig
from txl_jax.data.batch import Batch
from txl_jax.evaluation.dynamic import Learner, Params, add_squares, score_and_learn
from txl_jax.evaluation.protocols import keeps_cache
from txl_jax.model.memory import Cache, Memory, cache_shardings, memory_shardings
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.processes import placed
from txl_jax.parallel.shardings import Shardings


class SegmentPrograms:
    """Functions of one model, protocol and mesh; each compiles at its first call.

    Attributes:
      score: ``(params, batch, mems) -> (nll_sum, count, mems)``.
      score_and_learn: ``(learner, batch, mems) -> (nll_sum, count, mems, learner)``.
      add_squares: ``(squares, params, batch, mems) -> (squares, mems)``.
    """

    def __init__(
        self, model: TransformerXL, protocol: ProtocolConfig, shardings: Shardings, rows: int
    ):
        self._model, self._protocol = model, protocol
        self._shardings, self._rows = shardings, rows
        batch, mems, whole = shardings.rows(), memory_shardings(shardings), shardings.replicated()
        self.score = jax.jit(
            self._score,
            in_shardings=(None, batch, None),  # parameters and memory stay where they are
            donate_argnums=(2,),
        )
        self.score_and_learn = jax.jit(
            functools.partial(score_and_learn, model=model, c=protocol.dynamic),
            in_shardings=(None, batch, mems),
            out_shardings=(whole, whole, mems, None),
        )
        self.add_squares = jax.jit(
            functools.partial(add_squares, model=model),
            in_shardings=(None, None, batch, mems),
            out_shardings=(None, mems),
        )
        self._project_memory = jax.jit(self._init_cache)

    def empty_memory(self) -> Memory:
        """The memory before the first segment, on the devices."""
        return placed(self._init_mems(), memory_shardings(self._shardings))

    def first_memory(self, params: Params) -> Memory | Cache:
        """What scoring starts from: :meth:`empty_memory`, as a cache if the protocol allows."""
        mems = self.empty_memory()
        return self._project_memory(params, mems) if self._keeps_cache else mems

    def first_memory_shapes(self, params: Params) -> Any:
        """Shapes and shardings of :meth:`first_memory`; nothing is computed."""
        mems: Any = jax.eval_shape(self._init_mems)
        if self._keeps_cache:
            mems = jax.eval_shape(self._init_cache, params, mems)
        with_sharding = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(with_sharding, mems, self._memory_shardings(mems))

    def lower(self, params: Params, batch: Batch) -> jax.stages.Lowered:
        """The program that scores a segment, not compiled yet; all arguments are shapes."""
        mems, rule = self.first_memory_shapes(params), self._protocol.dynamic.rule
        if rule == "none":
            return self.score.lower(params, batch, mems)
        learner = Learner(params, params, params) if rule == "rms" else Learner(params)
        return self.score_and_learn.lower(learner, batch, mems)

    @property
    def _keeps_cache(self) -> bool:
        return keeps_cache(self._model.cfg, self._protocol)

    def _init_mems(self) -> Memory:
        mems = self._model.init_mems(self._rows, self._protocol.mem_len)
        if self._protocol.first_memory == "zeros":  # counted as real states, as by the authors
            return mems.replace(filled=jnp.full_like(mems.filled, mems.mem_len))
        return mems

    def _init_cache(self, params: Params, mems: Memory) -> Cache:
        seg_len, variables = self._protocol.seg_len, {"params": params}
        cache: Any = self._model.apply(variables, mems, seg_len=seg_len, method="init_cache")
        return jax.lax.with_sharding_constraint(cache, self._memory_shardings(cache))

    def _memory_shardings(self, mems: Memory | Cache) -> Memory | Cache:
        place = self._shardings
        return cache_shardings(place, mems) if isinstance(mems, Cache) else memory_shardings(place)

    def _score(self, params: Params, batch: Batch, mems):
        apply = functools.partial(self._model.apply, {"params": params}, batch.inputs)
        kwargs = batch.model_kwargs(self._model.cfg.memory_free)
        if self._protocol.temperature == 1:
            nll, mems = apply(batch.targets, mems, method="nll", **kwargs)
        else:
            logits, mems = apply(mems, **kwargs)
            log_p = jax.nn.log_softmax(logits / self._protocol.temperature)
            nll = -jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
        sums = jnp.sum(nll * batch.weights), jnp.sum(batch.weights)
        constrain = jax.lax.with_sharding_constraint
        mems = constrain(mems, self._memory_shardings(mems))
        return *constrain(sums, self._shardings.replicated()), mems
