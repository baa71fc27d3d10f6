"""The command's modes as Python functions: train, and generate, score and evaluate with a model.

The functions have the same settings and defaults as the modes, and return the results. Only
training and exporting write files. Training prints as the command does. The other functions print
only on standard error: notes about an evaluation and, on a terminal or in a notebook, the progress
of long work.
"""

import contextlib
import dataclasses
import io
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from txl_jax.analysis import sweep as sweep_mode
from txl_jax.checkpoint import loading
from txl_jax.checkpoint.export import export
from txl_jax.checkpoint.trained_model import TrainedModel, with_settings
from txl_jax.config import ConfigError, ExperimentConfig, Window, flatten, load_config, override
from txl_jax.config.evaluation import Split
from txl_jax.config.folders import path_text, workdir_path
from txl_jax.data.vocab import Text, check_text, texts_of
from txl_jax.evaluation.any_text import TextScore, score_any_text
from txl_jax.evaluation.results import Evaluation
from txl_jax.generation.prompts import check_length, read_prompts
from txl_jax.generation.results import Generated, Generation
from txl_jax.generation.text import Continuation, continuations
from txl_jax.generation.write import formatted
from txl_jax.messages import short_repr, shown_path
from txl_jax.parallel.accelerators import start_devices
from txl_jax.progress import waiting_for
from txl_jax.training.events import Logger
from txl_jax.training.run import Stopped, score_own_text, train_and_evaluate

RUN: Any = ...
"""The default of an argument, which then has the value in the run's config. The default is not
``None``, because some arguments can have the value ``None``."""


def _given(arguments: dict[str, Any], *without: str) -> dict[str, Any]:
    """Returns the arguments in ``locals()`` that the caller gave."""
    return {k: v for k, v in arguments.items() if v is not RUN and k not in ("self", *without)}


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LanguageModel(TrainedModel):
    """A trained model that generates, scores and evaluates text.

    Example:
      >>> import txl_jax
      >>> trained = txl_jax.load("runs/quickstart")
      >>> generated = trained.generate("class ", length=20, temperature=0.5)
      >>> generated.text.startswith("class "), len(generated[0].nll)
      (True, 20)
      >>> score = trained.score("def run(self):\\n    pass\\n")
      >>> score.tokens, len(score.lines)
      (24, 2)
      >>> trained.vocab.kind, trained.config.model == trained.model.cfg, trained.step
      ('byte', True, 0)

    The keyword arguments of the methods are the settings of the sections ``generate``, ``score``
    and ``evaluate``. An argument that is not given has the value in the run's ``config``. Every
    method raises ConfigError for a wrong argument, and DataError for text or ids that the
    vocabulary does not have. The attributes are those of a trained model:

    Attributes:
      model, params: the Flax module and its parameters: ``model.apply({"params": params}, ...)``.
      vocab: encodes text to token ids and decodes them.
      config, step: the settings of the experiment, and the step of the checkpoint.
      weights, others: the name of these parameters (``raw`` or an average), and the other names.
      source: the workdir that was loaded, or an empty string.
      seeds: the models of all seeds that :func:`train` trained, in order; otherwise empty.
    """

    seeds: tuple["LanguageModel", ...] = ()

    def generate(
        self,
        prompt: Text | bytes | Sequence[Any] | None = None,
        *,
        prompt_file: str | os.PathLike[str] | None = RUN,
        prompts_file: str | os.PathLike[str] | None = RUN,
        batch_size: int = RUN,
        samples: int = RUN,
        length: int = RUN,
        mem_len: int = RUN,
        temperature: float = RUN,
        top_k: int = RUN,
        top_p: float = RUN,
        min_p: float = RUN,
        repetition_penalty: float = RUN,
        stop: str | Sequence[str] = RUN,
        valid_text: bool = RUN,
        detokenise: bool = RUN,
        seed: int = RUN,
    ) -> Generation:
        """Continues a text or several texts, as ``--mode=generate`` does.

        Args:
          prompt: a text, its bytes, its ids (an array or a list of integers), or a list of texts
            or ids. By default the prompt of the settings.
          prompt_file, ...: the settings of :class:`~txl_jax.config.GenerateConfig`. Equal arguments
            give equal texts.
        """
        settings = _given(locals(), "prompt")
        if isinstance(prompt, str):
            settings, prompt = {"prompt": prompt, **settings}, None
        trained = _with_section(self, "generate", settings)
        c = trained.config.generate
        check_length(c)
        prompts = read_prompts(c) if prompt is None else texts_of(prompt, "prompt")
        made: list[Generated] = []
        for first in range(0, len(prompts), c.batch_size):
            rows: list[Continuation] = []
            for step in continuations(trained, prompts[first : first + c.batch_size], c):
                rows = [row for row, _ in step]
            made += map(_generated, rows)
        return Generation(made)

    def score(
        self,
        text: Text | bytes | Sequence[Any],
        *,
        memory: Literal["carry", "line"] = RUN,
        mem_len: int = RUN,
        seg_len: int = RUN,
        batch_size: int = RUN,
        tokens: bool = RUN,
    ) -> TextScore:
        """Returns the loss of every token of a text, as ``--mode=score`` does.

        Args:
          text: a text or its bytes, which are split after each line end; or its ids (an array or a
            list of integers), which are one line; or a list of lines (texts or ids). The lines of a
            list must contain their line ends.
          memory, mem_len, seg_len, batch_size, tokens: the settings of
            :class:`~txl_jax.config.ScoreConfig`. ``memory="line"`` empties the memory before each
            line.
        """
        trained = _with_section(self, "score", _given(locals(), "text"))
        lines = texts_of(text, "text")
        if isinstance(text, str | bytes | bytearray | memoryview):
            check_text(self.vocab, str(lines[0]))  # before it is split into lines
            lines = list(io.StringIO(str(lines[0]), newline="\n"))
        return score_any_text(trained, lines, "text")

    def export(
        self,
        folder: str | os.PathLike[str],
        *,
        batch_size: int | None = RUN,
        seg_len: int = RUN,
        mem_len: int = RUN,
    ) -> None:
        """Writes programs that run the model without this library, as ``--mode=export`` does.

        Example:
          >>> import os, txl_jax
          >>> trained = txl_jax.load("runs/quickstart")
          >>> trained.export("exported_programs", seg_len=32, mem_len=64)
          >>> sorted(name for name in os.listdir("exported_programs") if name.endswith(".jax"))
          ['cache.jax', 'logits.jax', 'nll.jax', 'step.jax']

        Args:
          folder: a new or empty folder; any other folder raises ModelFormatError.
          batch_size, ...: the settings of :class:`~txl_jax.config.ExportConfig`.
        """
        asked = _with_section(self, "export", _given(locals(), "folder"))
        export(asked, folder, asked.config.export)

    def evaluate(
        self,
        split: Split | None = None,
        data: Mapping[str, Any] | None = None,
        *,
        batch_size: int = RUN,
        seg_len: int = RUN,
        mem_len: int = RUN,
        context_len: int = RUN,
        first_memory: Literal["empty", "zeros"] = RUN,
        warm_start: int = RUN,
        clamp_len: int | None = RUN,
        same_length: Window | None = RUN,
        temperature: float = RUN,
        max_segments: int = RUN,
        dynamic: Mapping[str, Any] = RUN,
        baselines: Sequence[Literal["unigram", "bigram", "xz"]] = RUN,
    ) -> Evaluation:
        """Scores a split of a text under an evaluation protocol, as ``--mode=evaluate`` does.

        Args:
          split: ``train``, ``valid`` or ``test``; by default that of the settings.
          data: settings of :class:`~txl_jax.config.DataConfig` that name another text, such as
            ``{"path": "other.txt"}``. The vocabulary of the model encodes it.
          batch_size, ...: the settings of :class:`~txl_jax.config.ProtocolConfig`, with a dict
            for the section ``dynamic``, such as ``{"rule": "sgd"}``.
        """
        settings = _given(locals(), "split", "data")
        if split is not None:
            settings["split"] = split
        trained = _with_section(self, "evaluate", settings)
        if not isinstance(data, Mapping | None):
            what = "must be a dict of settings, such as {'path': 'other.txt'}"
            raise ConfigError(f"data = {short_repr(data)}: {what}")
        changes = {f"data.{key}": value for key, value in flatten(data or {}).items()}
        asked = with_settings(trained, override(trained.config, changes))
        return score_own_text(asked, self.config)


def train(
    config: str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig | Any,
    workdir: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    loggers: Sequence[Logger] = (),
) -> LanguageModel:
    """Trains, evaluates and samples a model as the command does, and returns the model.

    The workdir then has the same files as after the command. A second call resumes an interrupted
    run; a finished run is only evaluated again. Progress is printed on standard error, and the
    final scores and the sample on standard output.

    In the main thread, the first Ctrl-C (or interrupt of a notebook) saves the state after the
    current step and then raises KeyboardInterrupt. SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU
    also save the state, and then have their usual effect. If the process ignores SIGHUP, SIGUSR1,
    SIGUSR2 or SIGXCPU, training ignores the signal too. After training, the process has its own
    signal handlers again. Its logs and its JAX settings do not change.

    Example:
      >>> import pathlib, txl_jax
      >>> _ = pathlib.Path("cats.txt").write_text("the cat saw a dog\\n" * 500)
      >>> config = {
      ...     "data": {"name": "text", "path": "cats.txt"},
      ...     "model": {"n_layer": 1, "d_model": 16, "n_head": 1, "d_head": 16, "d_inner": 16},
      ...     "train": {"steps": 20, "batch_size": 2, "seg_len": 16, "mem_len": 16},
      ... }
      >>> trained = txl_jax.train(config, "runs/cats", {"generate.length": 0})
      test split, ...
      >>> trained.step, len(trained.generate("the ", length=8)[0].nll)
      (20, 8)

    Args:
      config: a recipe, a config file, a dict or an experiment, as in
        :func:`~txl_jax.load_config`.
      workdir: the folder of the run. It can be ``gs://BUCKET/NAME`` (needs ``txl_jax[gcs]``).
      overrides: a dict from dotted keys to values, such as ``{"train.steps": 10}``.
      loggers: objects that receive the settings, the numbers and the texts of the run. With several
        seeds, they are started once for each seed.

    Returns the model of the best checkpoint. With several seeds, it is the model of the first seed,
    and its attribute ``seeds`` has the models of all seeds. The results are in the workdir.
    :meth:`LanguageModel.evaluate` can compute the scores again.

    Raises:
      ConfigError, DataError, WorkdirError, LockedError: settings, text, devices and folder do not
        fit one another, or the platform of ``JAX_PLATFORMS`` does not start. This is checked
        before the first step.
      CheckpointError, NonFiniteError, SkippedError: training cannot continue.
      KeyboardInterrupt: the run was interrupted, and its state is saved.
    """
    exp = load_config(config, overrides)
    folder = workdir_path(workdir, "workdir")
    with waiting_for("starting the devices"):
        start_devices()
    with _interruptible():
        run = train_and_evaluate(exp, folder, loggers)
    models = tuple(map(language_model, run.models))
    return dataclasses.replace(models[0], seeds=models)


def sweep(
    config: str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig | Any,
    workdir: str | os.PathLike[str],
    grid: Mapping[str, Sequence[Any]],
    seeds: int = 1,
    overrides: Mapping[str, Any] | None = None,
) -> sweep_mode.Sweep:
    """Trains every combination of a grid of settings, as ``--mode=sweep`` does.

    ``grid`` has the values of each key: ``{"optimizer.learning_rate": [1e-3, 3e-4]}``. Calling
    again resumes an interrupted sweep. ``str()`` of the result is the table. Other arguments and
    errors are those of :func:`train`.

    Example:
      >>> import pathlib, txl_jax
      >>> _ = pathlib.Path("cats.txt").write_text("the cat saw a dog\\n" * 500)
      >>> config = {
      ...     "data": {"name": "text", "path": "cats.txt"},
      ...     "model": {"n_layer": 1, "d_model": 16, "n_head": 1, "d_head": 16, "d_inner": 16},
      ...     "train": {"steps": 4, "batch_size": 2, "seg_len": 16, "mem_len": 16},
      ...     "generate": {"length": 0},
      ... }
      >>> found = txl_jax.sweep(config, "runs/sweep", {"model.dropout": [0.0, 0.5]})
      test split, ...
      >>> [row.settings for row in found.rows if row.name == "dropout=0.5"]
      [{'model.dropout': 0.5}]
    """
    exp = override(load_config(config, overrides), {"sweep.grid": grid, "sweep.seeds": seeds})
    start_devices()
    folder = workdir_path(workdir, "workdir")
    with _interruptible():
        return sweep_mode.run(exp, folder, train_and_evaluate)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt if a signal stopped training; other signals have their effect first.

    The effect of a signal such as SIGTERM is usually that the process ends.
    """
    try:
        yield
    except Stopped as stopped:
        if stopped.signal != signal.SIGINT:
            signal.raise_signal(stopped.signal)
        raise KeyboardInterrupt(f"{stopped}; call the function again to resume") from None


def load(
    source: str | os.PathLike[str], step: int | str = "best", weights: str | None = None
) -> LanguageModel:
    """Loads a trained model, which generates, scores and evaluates text.

    Example:
      >>> import txl_jax
      >>> trained = txl_jax.load("runs/quickstart")
      >>> tokens = trained.vocab.encode("class ")
      >>> trained.vocab.decode(tokens)
      'class '
      >>> mems = trained.model.init_mems(batch_size=1, mem_len=32)
      >>> logits, mems = trained.model.apply({"params": trained.params}, tokens[None], mems)
      >>> logits.shape == (1, 6, len(trained.vocab))
      True

    Args:
      source: a workdir or a folder that ``save`` wrote (each can be ``gs://BUCKET/NAME``), or
        ``owner/name@revision`` on the Hub (needs ``txl_jax[hub]``). A source that starts with
        ``hub:`` is always on the Hub.
      step: the checkpoint of a workdir: ``best`` by validation, ``latest``, or a number.
      weights: the parameters of a workdir: ``raw``, ``swa`` or ``ema``. ``None`` loads those that
        training chose.

    Raises:
      WorkdirError: ``source`` has no model or two models, cannot be downloaded, or is an exported
        model of another step or without these weights.
      CheckpointError, ModelFormatError: the model is damaged, incomplete, or has another format.
    """
    if isinstance(step, bool) or not isinstance(step, str | int | np.integer):
        raise ConfigError(f"step = {short_repr(step)}: must be best, latest or an integer")
    path = path_text(source, "source", remote=True)
    with waiting_for(f"loading {shown_path(path)}"):
        start_devices()
        return language_model(loading.load(path, str(step), weights))


def language_model(trained: TrainedModel) -> LanguageModel:
    """Returns a trained model with the methods of :class:`LanguageModel`."""
    fields = dataclasses.fields(trained)
    return LanguageModel(**{field.name: getattr(trained, field.name) for field in fields})


def _with_section(trained: TrainedModel, section: str, settings: Mapping[str, Any]) -> TrainedModel:
    """Returns the model with other settings of a section."""
    changes = {f"{section}.{key}": value for key, value in flatten(settings).items()}
    return with_settings(trained, override(trained.config, changes))


def _generated(row: Continuation) -> Generated:
    new = formatted(row.text, row.c)
    ids, nll = np.array(row.ids, np.int32), np.array(row.nll, np.float32)
    whole = row.prompt + new
    return Generated(whole, new, row.prompt, row.sample, ids, nll, row.loss, row.ended)
