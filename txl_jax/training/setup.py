"""Model, optimizer and shardings of a run; checks against text and devices."""

import dataclasses

import jax
import optax
from jax.sharding import Mesh

from txl_jax.config import ConfigError, ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.on_device import device_text
from txl_jax.data.sentences import TrainingStreams, flat_tokens, shuffled_streams
from txl_jax.evaluation.evaluator import Evaluator, split_evaluator
from txl_jax.model import footprint
from txl_jax.model.kernels.choice import check_platform
from txl_jax.model.layout import unstack_layers
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import check_memory, shares_of
from txl_jax.parallel.shardings import Shardings, make_mesh
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import (
    TrainState,
    abstract_state,
    init_state,
    state_shardings,
    with_shardings,
)


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """What every step is computed with; runs that differ only in their seed share one.

    ``abstract`` has shapes and shardings of the state; ``on_disk`` has them with unstacked layers,
    the layout of checkpoints. ``evaluator`` scores the validation split.
    """

    model: TransformerXL
    optimizer: optax.GradientTransformation
    shardings: Shardings
    evaluator: Evaluator
    abstract: TrainState
    on_disk: TrainState

    def initial_state(self, exp: ExperimentConfig) -> TrainState:
        """The state before the first update, drawn with the experiment's seed."""
        init = lambda: init_state(exp, self.model, self.optimizer)
        return jax.jit(init, out_shardings=state_shardings(self.shardings, self.abstract))()


def build_setup(exp: ExperimentConfig, corpus: Corpus) -> TrainSetup:
    """The setup of an experiment. Raises as :func:`check_corpus`."""
    mesh = _mesh(exp)
    shardings = Shardings(mesh)
    model, optimizer = TransformerXL(exp.model, mesh), make_optimizer(exp)
    evaluator = split_evaluator(exp.model, exp.validate, corpus, mesh)
    abstract = abstract_state(exp, model, optimizer, shardings)
    on_disk = with_shardings(jax.eval_shape(unstack_layers, abstract), shardings)
    return TrainSetup(model, optimizer, shardings, evaluator, abstract, on_disk)


def check_training_memory(exp: ExperimentConfig) -> None:
    """Checks that training and everything after it fits the memory of the devices.

    Before the vocabulary is known, the parameters that depend on its size are not counted.

    Raises:
      ConfigError: something does not fit, or the attention kernel is for other devices.
    """
    mesh = _mesh(exp)
    shares = shares_of(mesh)
    check_platform(exp.model.kernel, mesh)
    check_memory("training", footprint.of_training(exp, shares), exp, mesh)
    check_memory("validation", footprint.of_validating(exp, shares), exp, mesh)
    check_evaluation_memory(exp)
    if exp.generate.length:
        check_memory("generation", footprint.of_generating(exp.model, exp.generate), exp)


def check_evaluation_memory(exp: ExperimentConfig, name: str = "evaluation") -> None:
    """Raises ConfigError where evaluation, called ``name``, does not fit the devices' memory."""
    unstacked = dataclasses.replace(exp.model, scan_layers=False)  # as a trained model is loaded
    mesh = make_mesh(exp.mesh, exp.model, exp.train.batch_size)
    needs = footprint.of_scoring(unstacked, exp.evaluate, "evaluate", shares_of(mesh))
    check_memory(name, needs, exp, mesh)


def check_corpus(exp: ExperimentConfig, corpus: Corpus) -> None:
    """Raises ConfigError or DataError where corpus or devices do not fit the config."""
    check_training_memory(exp)
    training_streams(exp, corpus)
    for protocol in (exp.validate, exp.evaluate):
        split_evaluator(exp.model, protocol, corpus, _mesh(exp))


def training_streams(exp: ExperimentConfig, corpus: Corpus) -> TrainingStreams:
    """The streams of the training split, checked against batch, memory and vocabulary."""
    t = exp.train
    streams = shuffled_streams(
        corpus.train,
        t.batch_size,
        t.seg_len,
        seed=exp.seed,
        name="the train split",
        vocab_size=exp.model.vocab_size,
        context_len=t.context_len,
        seg_len_std=t.seg_len_std,
        partial_shuffle=t.partial_shuffle,
    )
    if t.text_on_device:
        device_text(streams)  # raises where the text has no fixed order
        if jax.process_count() > 1:
            raise ConfigError("config key train.text_on_device: is for one process; leave it out")
    longest = len(flat_tokens(corpus.train)) // t.batch_size
    for key, what in (("mem_len", "memory"), ("context_len", "context")):
        if getattr(t, key) > longest:
            raise ConfigError(
                f"config key train.{key} = {getattr(t, key)}: a stream of the train split has only"
                f" {longest} tokens at train.batch_size {t.batch_size}; use a shorter {what} or"
                " fewer streams"
            )
    return streams


def _mesh(exp: ExperimentConfig) -> Mesh:
    return make_mesh(exp.mesh, exp.model, exp.train.batch_size, exp.train.micro_batches)
