"""The training step: one update, and a dispatch of several, as pure functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import ExperimentConfig, TrainConfig
from txl_jax.data.batch import Batch
from txl_jax.data.feed import training_batch
from txl_jax.data.on_device import BatchPosition, DeviceText, training_position
from txl_jax.data.streams import Streams
from txl_jax.model.memory import Memory
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.shardings import equal_on_copies, zero_after
from txl_jax.training.loss import batch_loss, denominators, scored_weights
from txl_jax.training.optimizer import schedule
from txl_jax.training.skipping import skip_bad_update
from txl_jax.training.state import TrainState, update_averages

Metrics = dict[str, jax.Array]


def train_step(
    state: TrainState,
    batch: Batch,
    exp: ExperimentConfig,
    model: TransformerXL,
    optimizer: optax.GradientTransformation,
    seed: jax.Array | None = None,
) -> tuple[TrainState, Metrics]:
    """Returns the state after one update on ``batch``, and the metrics of the step.

    ``seed`` is the seed of dropout, uint32 [], or ``None`` for the seed of the experiment. The
    metrics are float32 []: ``nll_sum`` (nats) and ``count`` of the scored targets, ``tokens`` (the
    number of tokens without padding), ``grad_norm`` before clipping, ``learning_rate``, and the
    metrics of :func:`skip_bad_update`.
    """
    tokens = jnp.sum(batch.weights)
    scale: jax.Array | float = 1.0
    if exp.train.seg_len_std:
        # At the full learning rate, a token of a short segment would have more weight than a token
        # of a long segment (Merity et al. 2018, variable length backpropagation).
        scale = jnp.max(jnp.sum(batch.weights, axis=1)) / exp.train.seg_len
    batch = batch.replace(weights=scored_weights(batch.weights, exp.loss))
    _, run_key = jax.random.split(jax.random.key(exp.seed if seed is None else seed))
    key = jax.random.fold_in(run_key, state.step)  # of dropout: depends only on seed and step
    gradient, nll_sum, mems = accumulate_gradient(state, batch, exp, model, key)
    gradient, nll_sum = equal_on_copies((gradient, nll_sum), model.mesh)
    rate = schedule(exp.optimizer, exp.train.steps, exp.average)
    metrics = {
        "nll_sum": nll_sum,
        "count": jnp.sum(batch.weights),
        "tokens": tokens,
        "grad_norm": optax.tree.norm(gradient),
        "learning_rate": rate(state.step) * scale,
    }
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    # No parameter is updated before the whole gradient is computed. Otherwise the compiler would
    # copy donated parameters, because the rest of the computation of the gradient still reads them.
    scale = scale + zero_after(metrics["grad_norm"], state.step)
    updates = jax.tree.map(lambda x: x * scale, updates)
    params = optax.apply_updates(state.params, updates)
    after = TrainState(state.step + 1, params, opt_state, mems, state.averages)
    after, skipped = skip_bad_update(after, state, nll_sum, metrics["grad_norm"], exp.train)
    return update_averages(after, exp.average), metrics | skipped


def accumulate_gradient(
    state: TrainState, batch: Batch, exp: ExperimentConfig, model: TransformerXL, key: jax.Array
) -> tuple[Any, jax.Array, Memory]:
    """Returns a batch's gradient, its sum of negative log-likelihoods in nats, and the new memory.

    The gradient is accumulated over ``train.micro_batches`` parts of the batch and of the memory.
    Row b belongs to part b % ``micro_batches``, so that every device holds rows of every part.
    ``batch`` has the weights of :func:`scored_weights`. ``key`` is the dropout key.
    """
    parts = exp.train.micro_batches
    gradient_of = jax.grad(batch_loss, has_aux=True)
    distil_weight = exp.distil.weight if exp.distil.teachers else 0.0
    padded = text_may_follow_padding(exp.train)
    terms = (exp.loss, denominators(batch.weights), padded, distil_weight)

    if parts == 1:
        gradient, sums = gradient_of(state.params, model, batch, state.mems, key, *terms)
        return gradient, *sums

    def add_part(total, part):
        index, batch, mems = part
        part_key = jax.random.fold_in(key, index)
        gradient, (nll_sum, mems) = gradient_of(state.params, model, batch, mems, part_key, *terms)
        return jax.tree.map(jnp.add, total, (gradient, nll_sum)), mems

    zero = (jax.tree.map(jnp.zeros_like, state.params), jnp.zeros_like(batch.weights, shape=()))
    split = lambda tree, axis: jax.tree.map(lambda x: _split_rows(x, parts, axis), tree)
    mems = Memory(split(state.mems.hidden, 1), split(state.mems.filled, 0))
    inputs = (jnp.arange(parts), split(batch, 0), mems)
    (gradient, nll_sum), mems = jax.lax.scan(add_part, zero, inputs)
    return gradient, nll_sum, Memory(_join_rows(mems.hidden, 1), _join_rows(mems.filled, 0))


def text_may_follow_padding(t: TrainConfig) -> bool:
    """Tells whether a padded segment can be followed by text that uses the same memory."""
    return t.seg_len_std > 0 or t.epoch_memory == "carry"


def make_dispatch(
    exp: ExperimentConfig, model: TransformerXL, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns a function that makes S = ``train.steps_per_dispatch`` updates.

    The arguments are a state and a batch. With a text on the device, the arguments are a state, the
    batch's position in the text, the text, and optionally the seed of :func:`train_step`. With
    S > 1, inputs and metrics have a leading axis of length S.
    """

    def updates(state, inputs, text: DeviceText | None = None, seed=None):
        def one(state, step_inputs):
            batch = step_inputs if text is None else text.batch(step_inputs)
            return train_step(state, batch, exp, model, optimizer, seed)

        several = exp.train.steps_per_dispatch > 1
        return jax.lax.scan(one, state, inputs) if several else one(state, inputs)

    return updates


def dispatch_shapes(t: TrainConfig, streams: Streams) -> Batch | BatchPosition:
    """Returns the shapes of a dispatch's inputs: batches, or positions in a text on the device."""
    read: Callable[..., Any] = training_position if t.text_on_device else training_batch
    no_rows = read(streams, 0, t.epoch_memory, t.reset_every, slice(0))
    lead = (t.steps_per_dispatch,) if t.steps_per_dispatch > 1 else ()
    rows = lambda x: (t.batch_size, *x.shape[1:]) if x.ndim else ()
    shape = lambda x: jax.ShapeDtypeStruct((*lead, *rows(x)), x.dtype)
    return jax.tree.map(shape, no_rows)


def _split_rows(x: jax.Array, parts: int, axis: int) -> jax.Array:
    shape = (*x.shape[:axis], x.shape[axis] // parts, parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _join_rows(x: jax.Array, axis: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, axis + 1)
    rows = x.shape[axis] * x.shape[axis + 1]  # not -1, because an empty memory has size 0
    return x.reshape(*x.shape[:axis], rows, *x.shape[axis + 2 :])
