"""What a run is computed with, made from its config and checked against text and devices."""

import dataclasses

import jax
import optax
from jax.sharding import NamedSharding

from txl_jax.config import ConfigError, ExperimentConfig
from txl_jax.data.batch import SoftTargets
from txl_jax.data.corpus import Corpus
from txl_jax.data.on_device import DeviceText, device_text
from txl_jax.data.sentences import TrainingStreams, flat_tokens, shuffled_streams
from txl_jax.evaluation.evaluate import Evaluator, evaluator_of
from txl_jax.model import footprint
from txl_jax.model.kernels.choice import check_platform
from txl_jax.model.layout import unstack_layers
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import check_memory, spread_of
from txl_jax.parallel.shardings import Shardings, make_mesh
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import TrainState, init_state, state_shardings


@dataclasses.dataclass(frozen=True)
class Parts:
    """All but the text and the state; runs that differ by their seed alone have it in common.

    Attributes:
      model, optimizer: of the step.
      shardings: where state and batches lie.
      evaluator: of the validation split.
      abstract: shapes of the state and where they lie, in the run's own layout.
      on_disk: the same, layers one by one.
    """

    model: TransformerXL
    optimizer: optax.GradientTransformation
    shardings: Shardings
    evaluator: Evaluator
    abstract: TrainState
    on_disk: TrainState

    def first_state(self, exp: ExperimentConfig) -> TrainState:
        """The state before the first update, drawn by the experiment's seed."""
        init = lambda: init_state(exp, self.model, self.optimizer)
        return jax.jit(init, out_shardings=state_shardings(self.shardings, self.abstract))()


def parts_of(exp: ExperimentConfig, corpus: Corpus) -> Parts:
    """The parts of an experiment. Raises as :func:`check_fit`."""
    t = exp.train
    mesh = make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches)
    shardings = Shardings(mesh)
    model = TransformerXL(exp.model, shardings.mesh)
    optimizer = make_optimizer(exp)
    evaluator = evaluator_of(exp.model, exp.validate, corpus, mesh)
    shapes = jax.eval_shape(lambda: init_state(exp, model, optimizer))
    abstract = _with_shardings(shapes, shardings)
    on_disk = _with_shardings(jax.eval_shape(unstack_layers, abstract), shardings)
    return Parts(model, optimizer, shardings, evaluator, abstract, on_disk)


def check_size(exp: ExperimentConfig) -> None:
    """Raises ConfigError where training, or what follows it, cannot fit the devices' memory.

    So it does for an attention kernel that is for other devices.
    Where the size of the vocabulary is not known yet its parameters are not counted.
    """
    t, c = exp.train, exp.model
    mesh = make_mesh(exp.mesh, c, t.batch_size, t.micro_batches)
    spread = spread_of(mesh)
    check_platform(c.kernel, mesh)
    check_memory("training", footprint.of_training(exp, spread), exp, mesh)
    check_memory("validation", footprint.of_validating(exp, spread), exp, mesh)
    check_scoring(exp)
    if exp.generate.length:
        check_memory("generation", footprint.of_generating(c, exp.generate), exp)


def check_scoring(exp: ExperimentConfig, what: str = "evaluation") -> None:
    """Raises ConfigError where evaluation, called ``what``, cannot fit the devices' memory."""
    one_by_one = dataclasses.replace(exp.model, scan_layers=False)  # as a trained model is loaded
    mesh = make_mesh(exp.mesh, exp.model, exp.train.batch_size)
    needs = footprint.of_scoring(one_by_one, exp.evaluate, "evaluate", spread_of(mesh))
    check_memory(what, needs, exp, mesh)


def check_fit(exp: ExperimentConfig, corpus: Corpus) -> None:
    """Raises ConfigError or DataError where the corpus or the devices cannot serve the config."""
    check_size(exp)
    training_streams(exp, corpus)
    t = exp.train
    mesh = make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches)
    for protocol in (exp.validate, exp.evaluate):
        evaluator_of(exp.model, protocol, corpus, mesh)


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
        device_text(streams)  # refuses what it cannot lay out
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


def text_on_device(
    exp: ExperimentConfig,
    streams: TrainingStreams,
    shardings: Shardings,
    soft: SoftTargets | None = None,
) -> DeviceText | None:
    """The training text, on device, where ``train.text_on_device`` asks for it."""
    if not exp.train.text_on_device:
        return None
    return jax.device_put(device_text(streams, soft), shardings.rows())


def _with_shardings(abstract: TrainState, shardings: Shardings) -> TrainState:
    def place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, abstract, state_shardings(shardings, abstract))
