"""One update, as a pure function; and its compiled form over a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import ExperimentConfig, TrainConfig
from txl_jax.data.batch import Batch
from txl_jax.data.on_device import DeviceText
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.ordering import zero_after
from txl_jax.parallel.shardings import Shardings
from txl_jax.training.average import averaged
from txl_jax.training.loss import Array, batch_loss, scored, totals
from txl_jax.training.optimizer import gradient_norm, learning_rate, with_recent_norm
from txl_jax.training.skipping import may_skip, unless_bad
from txl_jax.training.state import TrainState, dropout_key, state_shardings

Metrics = dict[str, jax.Array]


def train_step(
    state: TrainState,
    batch: Batch,
    exp: ExperimentConfig,
    model: TransformerXL,
    optimizer: optax.GradientTransformation,
    seed: jax.Array | None = None,
) -> tuple[TrainState, Metrics]:
    """The state after one update on ``batch``, and what it measured.

    ``seed``: of its dropout, int32 []; ``None``: the experiment's.

    Metrics, float32 []: ``nll_sum`` (nats) and ``count`` of the targets that ``loss.positions``
    has scored, ``tokens`` that are not padding, ``grad_norm`` (before clipping),
    ``learning_rate``, and those of :func:`unless_bad` if the settings may skip an update.
    """
    tokens, share = jnp.sum(batch.weights), rate_share(batch.weights, exp.train)
    batch = batch.replace(weights=scored(batch.weights, exp.loss))
    key = dropout_key(exp.seed if seed is None else seed, state.step)
    gradient, nll_sum, mems = summed_gradient(state, batch, exp, model, key)
    metrics = {
        "nll_sum": nll_sum,
        "count": jnp.sum(batch.weights),
        "tokens": tokens,
        "grad_norm": gradient_norm(gradient),
        "learning_rate": learning_rate(exp)(state.step) * share,
    }
    optimizer = with_recent_norm(optimizer, exp.train)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    # Nothing is updated before the gradient of all is known: the state is overwritten, and a
    # compiler that may begin earlier keeps copies of parameters for what still reads them.
    share = share + zero_after(metrics["grad_norm"], state.step)
    updates = jax.tree.map(lambda x: x * share, updates)
    params = optax.apply_updates(state.params, updates)
    after = TrainState(state.step + 1, params, opt_state, mems, state.averages)
    if may_skip(exp.train):
        about = (nll_sum, metrics["grad_norm"], exp.train)
        after, skipped = unless_bad(after, state, *about)
        metrics |= skipped
    return averaged(after, exp.average), metrics


def summed_gradient(
    state: TrainState, batch: Batch, exp: ExperimentConfig, model: TransformerXL, key: jax.Array
) -> tuple[Any, jax.Array, Memory]:
    """The gradient of the loss of a batch, the sum of its nll in nats, and the memory after it.

    Summed over ``train.micro_batches`` parts of the batch, each with its own streams' memory.
    ``batch``: its weights are those of scored targets. ``key``: of the step's dropout.
    """
    parts = exp.train.micro_batches
    gradient_of = jax.grad(batch_loss, has_aux=True)
    taught = exp.distil.weight if exp.distil.teachers else 0.0
    terms = (exp.loss, totals(batch.weights), padded_amid(exp.train), taught)
    if parts == 1:
        gradient, (nll_sum, mems) = gradient_of(state.params, model, batch, state.mems, key, *terms)
        return gradient, nll_sum, mems

    def add_part(total, part):
        index, part_batch, part_mems = part
        part_key = jax.random.fold_in(key, index)
        gradient, (nll_sum, mems) = gradient_of(
            state.params, model, part_batch, part_mems, part_key, *terms
        )
        return jax.tree.map(jnp.add, total, (gradient, nll_sum)), mems

    zero = (jax.tree.map(jnp.zeros_like, state.params), jnp.zeros(()))
    cut = (jnp.arange(parts), _cut(batch, parts), _cut_memory(state.mems, parts))
    (gradient, nll_sum), mems = jax.lax.scan(add_part, zero, cut)
    return gradient, nll_sum, _join_memory(mems)


def padded_amid(t: TrainConfig) -> bool:
    """Whether more of the same memory's text may follow a padded segment."""
    return t.seg_len_std > 0 or t.epoch_memory == "carry"


def rate_share(weights: Array, t: TrainConfig) -> jax.Array | float:
    """What the learning rate is multiplied by: 1, or with drawn lengths this segment's over T.

    A short segment is a small sample of the text; at the full rate it would count for more than
    its tokens (Merity et al. 2018, variable length backpropagation). ``weights``: [B,T], before
    :func:`scored`.
    """
    if not t.seg_len_std:
        return 1.0
    return jnp.max(jnp.sum(weights, axis=1)) / t.seg_len


def compiled_step(
    exp: ExperimentConfig,
    model: TransformerXL,
    optimizer: optax.GradientTransformation,
    shardings: Shardings,
    abstract: TrainState,
    text: DeviceText | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """:func:`train_step` compiled for a mesh; ``train.steps_per_dispatch`` updates a call.

    It takes a state and a batch; with ``text`` (or its shapes) a state, the batch's places in the
    text, and the text. With S > 1 updates a call batch or places have a leading axis S, and so
    have the metrics.
    """
    several = exp.train.steps_per_dispatch > 1
    of_state, of_batch = state_shardings(shardings, abstract), shardings.rows(several)
    fed: tuple[Any, ...] = (of_batch,)
    if text is not None:
        fed = (shardings.replicated(), shardings.rows())
    return jax.jit(
        dispatch(exp, model, optimizer),
        in_shardings=(of_state, *fed),
        out_shardings=(of_state, shardings.replicated()),
        donate_argnums=(0,),
    )


def dispatch(
    exp: ExperimentConfig, model: TransformerXL, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The function that is compiled, of a state and a batch or of state, places and text.

    A fourth argument is the seed of the dropout, as in :func:`train_step`.
    """

    def updates(state, fed, text: DeviceText | None = None, seed=None):
        def one(s, fed_to_it):
            batch = fed_to_it if text is None else text.batch(fed_to_it)
            return train_step(s, batch, exp, model, optimizer, seed)

        several = exp.train.steps_per_dispatch > 1
        return jax.lax.scan(one, state, fed) if several else one(state, fed)

    return updates


# Row b goes to micro-batch b % parts, so that every device keeps rows of every part.


def _cut(batch: Batch, parts: int) -> Batch:
    return jax.tree.map(lambda x: _cut_rows(x, parts, 0), batch)


def _cut_rows(x: jax.Array, parts: int, axis: int) -> jax.Array:
    shape = (*x.shape[:axis], x.shape[axis] // parts, parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _join_rows(x: jax.Array, axis: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, axis + 1)
    rows = x.shape[axis] * x.shape[axis + 1]  # not -1: without memory the array is empty
    return x.reshape(*x.shape[:axis], rows, *x.shape[axis + 2 :])


def _cut_memory(mems: Memory, parts: int) -> Memory:
    return Memory(_cut_rows(mems.hidden, parts, 1), _cut_rows(mems.filled, parts, 0))


def _join_memory(mems: Memory) -> Memory:
    return Memory(_join_rows(mems.hidden, 1), _join_rows(mems.filled, 0))
