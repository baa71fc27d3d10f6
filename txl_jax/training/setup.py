"""Builds the model, the optimizer, the shardings and the training streams of a run."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from txl_jax.config import ConfigError, ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.on_device import device_text
from txl_jax.data.pieces import flat_tokens
from txl_jax.data.streams import Streams, shuffled_streams
from txl_jax.evaluation.evaluator import Evaluator, split_evaluator
from txl_jax.model.attention import planned_attention
from txl_jax.model.kernels.choice import Choice
from txl_jax.model.layout import unstack_layers
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import TRAINING_STATE, VALIDATION, check_arrays
from txl_jax.parallel.shardings import Shardings, make_mesh
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import TrainState, abstract_state, init_state, with_shardings


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """The objects that every training step needs. Runs that differ only in their seed share them.

    ``exp`` is the experiment of one of them. ``evaluator`` scores the validation split.
    ``attention`` is how the train step computes it. ``abstract`` has the shapes and shardings of
    the state. ``on_disk`` has those of checkpoints, where layers are not stacked.
    """

    exp: ExperimentConfig
    model: TransformerXL
    optimizer: optax.GradientTransformation
    shardings: Shardings
    evaluator: Evaluator
    attention: Choice
    abstract: TrainState
    on_disk: TrainState

    def initial_state(self, exp: ExperimentConfig) -> TrainState:
        """Draws the state before the first update with the experiment's seed."""
        return self._initialise(jnp.uint32(exp.seed))

    @functools.cached_property
    def _initialise(self) -> Callable[[jax.Array], TrainState]:
        """The program of :meth:`initial_state` for any seed."""
        return initial_state_program(self.exp, self.model, self.optimizer, self.abstract)


def initial_state_program(
    exp: ExperimentConfig, model: TransformerXL, optimizer: Any, abstract: TrainState
) -> Any:
    """Returns the jitted function of a seed, uint32 [], that draws the first state."""
    init = lambda seed: init_state(exp, model, optimizer, seed)
    return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))


def build_setup(exp: ExperimentConfig, corpus: Corpus) -> TrainSetup:
    """Builds the setup of an experiment. Raises ConfigError or DataError if it is inconsistent."""
    mesh = training_mesh(exp)
    shardings = Shardings(mesh)
    model, optimizer = TransformerXL(exp.model, mesh), make_optimizer(exp)
    evaluator = split_evaluator(exp.model, exp.validate, corpus, mesh, VALIDATION)
    abstract = abstract_state(exp, model, optimizer, shardings)
    check_arrays(TRAINING_STATE, (abstract, abstract.params), mesh, copies=exp.train.num_seeds)
    on_disk = with_shardings(jax.eval_shape(unstack_layers, abstract), shardings)
    attention = training_attention(exp, mesh)
    return TrainSetup(exp, model, optimizer, shardings, evaluator, attention, abstract, on_disk)


def training_mesh(exp: ExperimentConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of training devices, or raises ConfigError if they do not fit the config."""
    t = exp.train
    return make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches, devices)


def training_attention(exp: ExperimentConfig, mesh: Mesh) -> Choice:
    """Returns the implementation of attention of the train step, and why it is not a fused one."""
    t, seg_len = exp.train, exp.train.context_len + exp.train.longest_seg_len
    rows = t.batch_size // t.micro_batches
    return planned_attention(exp.model, rows, seg_len, t.mem_len, True, mesh)


def unchecked_streams(exp: ExperimentConfig, split: Any, **options: Any) -> Streams:
    """Returns the training streams of a split, without the checks of :func:`training_streams`."""
    t = exp.train
    settings = {key: getattr(t, key) for key in ("context_len", "seg_len_std", "partial_shuffle")}
    return shuffled_streams(split, t.batch_size, t.seg_len, exp.seed, **settings, **options)


def training_streams(exp: ExperimentConfig, corpus: Corpus) -> Streams:
    """Returns the training split's streams, or raises ConfigError if they do not fit the config."""
    t, name = exp.train, "the train split"
    streams = unchecked_streams(exp, corpus.train, name=name, vocab_size=exp.model.vocab_size)
    if t.text_on_device:
        device_text(streams)  # raises ConfigError if the text has no fixed order
        if jax.process_count() > 1:
            raise ConfigError("config key train.text_on_device: needs a single process; omit it")
    longest = len(flat_tokens(corpus.train)) // t.batch_size
    for key, what in (("mem_len", "memory"), ("context_len", "context")):
        if getattr(t, key) > longest:
            raise ConfigError(
                f"config key train.{key} = {getattr(t, key)}: a stream of the train split has only"
                f" {longest} tokens at train.batch_size {t.batch_size}; use a shorter {what} or"
                " fewer streams"
            )
    return streams
