"""The plan of a run: all objects that it needs, each built once. Building them checks the run.

    settings ──▶ mesh ──▶ text ──▶ evaluators, streams, model, optimizer ──▶ locked workdirs

The objects are built in this order. Settings, text, devices or folders that do not fit together
raise an error then, before the workdir exists. Nothing is built or checked again later.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from txl_jax.checkpoint.lock import training_lock
from txl_jax.checkpoint.trained_model import memory_shapes
from txl_jax.checkpoint.workdir import begun_dtype, check_shared, init_workdir, with_vocab
from txl_jax.checkpoint.workdir_files import (
    WRITTEN_IN,
    check_file,
    check_free,
    check_outputs,
    check_writable,
)
from txl_jax.config import (
    ConfigError,
    ExperimentConfig,
    ProtocolConfig,
    TrainConfig,
    TransformerXLConfig,
    with_absolute_paths,
)
from txl_jax.config.folders import data_folder
from txl_jax.data.corpus import Corpus
from txl_jax.data.errors import DataError
from txl_jax.data.feed import training_batch
from txl_jax.data.on_device import DeviceText, check_single_process, device_text
from txl_jax.data.pieces import flat_tokens
from txl_jax.data.streams import Streams, shuffled_streams
from txl_jax.data.vocab import encode_prompts
from txl_jax.evaluation.baselines import check_baselines
from txl_jax.evaluation.evaluator import Evaluator, split_evaluator
from txl_jax.evaluation.split import split_evaluators
from txl_jax.generation.generate import check_generation_memory
from txl_jax.generation.prompts import prompt_key, read_prompts
from txl_jax.messages import argument
from txl_jax.model import self_check
from txl_jax.model.attention import planned_attention
from txl_jax.model.initializers import shared_draws
from txl_jax.model.kernels.choice import Choice, check_platform, compiler_options
from txl_jax.model.layout import unstack_layers
from txl_jax.model.precision import resolved
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import (
    EVALUATION,
    TRAINING_STATE,
    VALIDATION,
    Work,
    check_arrays,
)
from txl_jax.parallel.mesh import make_mesh, scoring_mesh
from txl_jax.parallel.processes import on_process_zero, process_zero_first
from txl_jax.parallel.shardings import Shardings
from txl_jax.training.fine_tuning import load_encoded_corpus, resolve_experiment
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.state import TrainState, init_state, state_shardings, with_shardings
from txl_jax.training.step import make_dispatch

_SEED = jax.ShapeDtypeStruct((), jnp.uint32)


@dataclasses.dataclass(frozen=True)
class StepSetup:
    """The parts of the training program. Runs that differ only in their seed share them.

    ``abstract`` has the shapes and shardings of the training state. ``draw`` returns the initial
    state for a seed, uint32 []. All callers use this one function object, so JAX traces it once.
    """

    exp: ExperimentConfig
    model: TransformerXL
    optimizer: optax.GradientTransformation
    shardings: Shardings
    abstract: TrainState
    draw: Callable[[jax.Array], TrainState]

    @classmethod
    def on(cls, mesh: Mesh, exp: ExperimentConfig) -> "StepSetup":
        """Builds the setup of an experiment with a known vocabulary on the devices of a mesh."""
        shardings, optimizer = Shardings(mesh), make_optimizer(exp)
        model = TransformerXL(exp.model, mesh)

        def draw(seed: jax.Array) -> TrainState:
            return init_state(exp, model, optimizer, seed)

        with shared_draws():  # as in lower_initialise: with another setting, JAX would trace twice
            shapes = jax.eval_shape(draw, _SEED)
        return cls(exp, model, optimizer, shardings, with_shardings(shapes, shardings), draw)

    @functools.cached_property
    def on_disk(self) -> TrainState:
        """The shapes and shardings of the state in a checkpoint, which never stacks layers."""
        return with_shardings(jax.eval_shape(unstack_layers, self.abstract), self.shardings)

    @functools.cached_property
    def attention(self) -> Choice:
        """The attention implementation of the training step, with the reason if it is not fused."""
        sizes = attention_sizes(self.exp.train)
        return planned_attention(self.exp.model, *sizes, True, self.shardings.mesh)

    def lower_initialise(self) -> jax.stages.Lowered:
        """Lowers the program that draws the initial state from a seed, uint32 []."""
        out = jax.tree.map(lambda x: x.sharding, self.abstract)
        with shared_draws():
            return jax.jit(self.draw, out_shardings=out).lower(_SEED)

    @functools.cached_property
    def _initialise(self) -> jax.stages.Compiled:
        return self.lower_initialise().compile()

    def initial_state(self, exp: ExperimentConfig) -> TrainState:
        """Draws the state before the first update with the experiment's seed."""
        return self._initialise(jnp.uint32(exp.seed))

    def check_state_memory(self) -> None:
        """Raises ConfigError if the training state and one gradient exceed the device memory."""
        arrays, copies = (self.abstract, self.abstract.params), self.exp.train.num_seeds
        check_arrays(TRAINING_STATE, arrays, self.shardings.mesh, copies)

    def update(self, text: DeviceText | None = None) -> Any:
        """Returns the function of :func:`~txl_jax.training.step.make_dispatch` under ``jax.jit``.

        The function donates the state: JAX reuses the memory of this argument. With one seed, its
        arguments and results have shardings. With ``train.num_seeds`` > 1, all arguments except the
        text have a leading axis of seeds instead.
        """
        t, on = self.exp.train, self.shardings
        function = make_dispatch(self.exp, self.model, self.optimizer)
        placed: dict[str, Any] = {}
        if t.num_seeds > 1:
            function = jax.vmap(function, in_axes=(0, 0, None, 0))
        else:
            state, whole = state_shardings(on, self.abstract), on.replicated()
            inputs = (on.rows(t.steps_per_dispatch > 1),) if text is None else (whole, on.rows())
            placed = {"in_shardings": (state, *inputs), "out_shardings": (state, whole)}
        options = compiler_options(on.mesh)
        return jax.jit(function, donate_argnums=(0,), compiler_options=options, **placed)


class SeedRun(NamedTuple):
    """The run of one seed: its experiment, its workdir and its training streams."""

    exp: ExperimentConfig
    workdir: str
    streams: Streams


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked run of one or several seeds. The seeds share all fields except ``runs``.

    ``validation`` scores the validation split. ``evaluators`` has one evaluator per protocol for
    the final evaluation, and ``evaluated`` has the model's settings in this evaluation.
    ``auto_dtype`` tells whether ``model.dtype`` was ``auto``, which lets the devices decide.
    """

    corpus: Corpus
    setup: StepSetup
    runs: list[SeedRun]
    validation: Evaluator
    evaluators: Mapping[ProtocolConfig, Evaluator]
    evaluated: TransformerXLConfig
    auto_dtype: bool


def plan_run(exp: ExperimentConfig, workdir: str) -> Plan:
    """Reads the text, completes the settings and the paths of a run, and returns its plan.

    Raises ConfigError or DataError if settings, text and devices are incompatible, KernelError if a
    kernel that the user named fails, and WorkdirError if a workdir cannot be used.
    """
    given, auto_dtype = exp, exp.model.dtype == "auto"
    exp = with_absolute_paths(exp)
    data_folder(exp.data.cache_dir)  # raises an error for an unusable path
    folders = [folder for _, folder in seed_runs(exp, workdir)]
    for folder in folders:
        on_process_zero(functools.partial(check_free, folder))
    on_process_zero(lambda: check_writable(workdir))
    exp, vocab = resolve_experiment(exp, folders[0])
    (mesh, scoring), model = build_meshes(exp), exp.model
    if model.dtype == "auto":  # a run with a checkpoint keeps the dtype of its first start
        dtype = on_process_zero(lambda: begun_dtype(folders[0]))
        model = dataclasses.replace(model, dtype=dtype)
    exp = dataclasses.replace(exp, model=resolved(model, mesh))
    check_training_memory(exp, mesh, scoring)
    corpus = process_zero_first(lambda: load_encoded_corpus(exp, vocab))
    plan = build_plan(with_vocab(exp, corpus), corpus, workdir, (mesh, scoring), auto_dtype)
    check_final_outputs(given, corpus)
    return plan


def build_plan(
    exp: ExperimentConfig,
    corpus: Corpus,
    workdir: str,
    meshes: tuple[Mesh, Mesh] | None = None,
    auto_dtype: bool = False,
) -> Plan:
    """Returns the plan of a run from complete settings; raises the errors of :func:`plan_run`."""
    mesh, scoring = meshes or build_meshes(exp)
    # The text is checked first (for example its length), then what depends only on the devices.
    validation = split_evaluator(exp.model, exp.validate, corpus, mesh, VALIDATION)
    # The final evaluation loads the model from its checkpoint. If the user chose dtype auto, the
    # evaluation uses auto again, provided that auto gives the dtype of training there.
    auto = dataclasses.replace(exp.model, dtype="auto")
    same = auto_dtype and resolved(auto, None).dtype == exp.model.dtype
    model = auto if same else exp.model
    evaluated = dataclasses.replace(model, scan_layers=False, remat="none")
    evaluators = split_evaluators(dataclasses.replace(exp, model=evaluated), corpus, scoring)
    runs = [SeedRun(*run, training_streams(run[0], corpus)) for run in seed_runs(exp, workdir)]
    program = attention_program(exp.train, runs[0].streams)
    self_check.check(exp.model, mesh, *attention_sizes(exp.train), **program)
    for evaluator in (validation, *evaluators.values()):
        evaluator.check_attention()
    check_seeds(exp, mesh)
    setup = StepSetup.on(mesh, exp)
    setup.check_state_memory()  # again, now with the size of the vocabulary
    return Plan(corpus, setup, runs, validation, evaluators, evaluated, auto_dtype)


def build_meshes(exp: ExperimentConfig) -> tuple[Mesh, Mesh]:
    """Returns the device mesh of training and validation, and that of the final evaluation.

    Raises ConfigError if the devices do not fit the config.
    """
    return training_mesh(exp), scoring_mesh(exp.mesh, exp.model, exp.evaluate.batch_size)


def training_mesh(exp: ExperimentConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of training devices, or raises ConfigError if they do not fit the config."""
    t = exp.train
    return make_mesh(exp.mesh, exp.model, t.batch_size, t.micro_batches, devices)


def attention_sizes(t: TrainConfig) -> tuple[int, int, int]:
    """Returns the sizes of attention in training: (rows, tokens of a row, length of the memory).

    The rows are those of a micro-batch. Each has the longest segment and its context.
    """
    return t.batch_size // t.micro_batches, t.context_len + t.longest_seg_len, t.mem_len


def unchecked_streams(exp: ExperimentConfig, split: Any, **options: Any) -> Streams:
    """Returns the training streams of a split, without the checks of :func:`training_streams`."""
    t = exp.train
    settings = {key: getattr(t, key) for key in ("context_len", "seg_len_std", "partial_shuffle")}
    return shuffled_streams(split, t.batch_size, t.seg_len, exp.seed, **settings, **options)


def training_streams(exp: ExperimentConfig, corpus: Corpus) -> Streams:
    """Returns the training split's streams, or raises ConfigError if they do not fit the config.

    The token ids are not checked here: they were compared with the vocabulary on loading.
    """
    t = exp.train
    name, key = "the train split", "config key train.batch_size"
    streams = unchecked_streams(exp, corpus.train, name=name, key=key)
    if t.text_on_device:
        device_text(streams)  # raises ConfigError if the text has no fixed order
        check_single_process(jax.devices())
    tokens = len(flat_tokens(corpus.train))
    longest = tokens // t.batch_size
    for key, what in (("mem_len", "memory"), ("context_len", "context")):
        if (value := getattr(t, key)) > longest:
            raise ConfigError(
                f"config key train.{key} = {value}: a stream of the train split has only {longest}"
                f" of its {tokens:,} tokens at train.batch_size {t.batch_size}; use a shorter"
                f" {what}, a lower train.batch_size, or a text with {value * t.batch_size:,} tokens"
                " or more in its train split"
            )
    return streams


def attention_program(t: TrainConfig, streams: Streams) -> dict[str, bool]:
    """Returns the properties of the training step, besides its sizes, that attention depends on."""
    batch = training_batch(streams, 0, t.epoch_memory, t.reset_every, slice(0))
    return {"train": True, "episodes": batch.reset.ndim == 2, "several_seeds": t.num_seeds > 1}


def check_seeds(exp: ExperimentConfig, mesh: Mesh) -> None:
    """Raises ConfigError if a run has several seeds and several devices or processes."""
    if exp.train.num_seeds > 1 and max(mesh.size, jax.process_count()) > 1:
        fix = f"give {argument('config.mesh.data', 1)}, or train each seed in its own run"
        raise ConfigError(f"config key train.num_seeds: several seeds need one device; {fix}")


def check_final_outputs(exp: ExperimentConfig, corpus: Corpus) -> None:
    """Raises an error if the evaluation or the generation after training would fail."""
    check_baselines(exp.evaluate.baselines, corpus.vocab)
    prompts, key = read_prompts(exp.generate), prompt_key(exp.generate)
    try:
        encode_prompts(corpus.vocab, prompts, key)
    except DataError as error:
        raise DataError(f"{error}; or give another {argument(f'config.{key}', 'TEXT')}") from error
    if exp.generate.length:
        check_generation_memory(exp.model, exp.generate, len(prompts))
        on_process_zero(lambda: check_file("generate.json", exp.generate.json, exp.data))


def seed_runs(exp: ExperimentConfig, workdir: str) -> list[tuple[ExperimentConfig, str]]:
    """Returns each seed's experiment and workdir: the given pair if ``train.num_seeds`` is 1."""
    n = exp.train.num_seeds
    if n == 1:
        return [(exp, workdir)]
    single = dataclasses.replace(exp.train, num_seeds=1)
    folder = lambda seed: os.path.join(workdir, f"seed_{seed}")
    seeds = range(exp.seed, exp.seed + n)
    return [(dataclasses.replace(exp, seed=s, train=single), folder(s)) for s in seeds]


def check_training_memory(exp: ExperimentConfig, mesh: Mesh, scoring: Mesh) -> None:
    """Raises ConfigError if parameters, optimizer state, gradient or memory do not fit the devices.

    These arrays are only a part of what training needs, but this check needs no text. The compiled
    update is checked later, before the state is created. If the size of the vocabulary is unknown,
    this check assumes the smallest one that the model can have.
    """
    check_platform(exp.model.kernel, mesh)
    sized = dataclasses.replace(exp, model=_one_layer_traced(exp.model))
    StepSetup.on(mesh, sized).check_state_memory()
    _check_protocol_memory(exp.model, exp.validate, VALIDATION, mesh)
    _check_protocol_memory(exp.model, exp.evaluate, EVALUATION, scoring)


def check_evaluation_memory(exp: ExperimentConfig, work: Work = EVALUATION) -> None:
    """Raises ConfigError if the model's memory in evaluation exceeds the memory of the devices."""
    mesh = scoring_mesh(exp.mesh, exp.model, exp.evaluate.batch_size)
    _check_protocol_memory(exp.model, exp.evaluate, work, mesh)


def _check_protocol_memory(
    model: TransformerXLConfig, protocol: ProtocolConfig, work: Work, mesh: Mesh
) -> None:
    rows_of_each = -(-protocol.batch_size // Shardings(mesh).row_devices)
    shapes = memory_shapes(_one_layer_traced(model), rows_of_each, protocol.mem_len)
    check_arrays(work, shapes, mesh)


def _one_layer_traced(c: TransformerXLConfig) -> TransformerXLConfig:
    """Fills in the size of the vocabulary, and stacks layers if possible: JAX then traces one."""
    words = c.vocab_size or (c.cutoffs or (0,))[-1] + max(1, c.sample_softmax)
    c = dataclasses.replace(c, vocab_size=words)
    try:
        return dataclasses.replace(c, scan_layers=True)
    except ConfigError:  # from a changed model's rule (docs/change.md)
        return c


@contextlib.contextmanager
def locked_workdirs(plan: Plan) -> Iterator[None]:
    """Creates and locks every workdir, and writes settings and vocabulary into each of them.

    Raises LockedError if another process trains in a workdir, and WorkdirError if a workdir cannot
    be used.
    """
    with contextlib.ExitStack() as locks:

        def init(exp: ExperimentConfig, workdir: str) -> None:
            check_outputs(workdir, "evaluate", "generate")
            check_writable(workdir, create=True)
            locks.enter_context(training_lock(workdir))
            attention = plan.setup.attention.describe()
            init_workdir(workdir, exp, plan.corpus, attention, plan.auto_dtype)
            check_writable(workdir, WRITTEN_IN, create=True)

        for exp, workdir, _ in plan.runs:
            on_process_zero(functools.partial(init, exp, workdir))
            check_shared(workdir)
        yield
