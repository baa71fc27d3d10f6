"""The command's modes as Python functions: train, and generate, score and evaluate with a model.

The functions have the settings and defaults of the modes and return their results. They write no
files, except for training. Training prints as the command does. The others print on standard error
only: notes about an evaluation, and on a terminal or in a notebook how far long work is.
"""

import dataclasses
import io
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from txl_jax import modes
from txl_jax.checkpoint import loading
from txl_jax.checkpoint.trained_model import TrainedModel, with_settings
from txl_jax.config import ConfigError, flatten, load_config, override
from txl_jax.config.folders import path_text, workdir_path
from txl_jax.data.vocab import Text, check_text, texts_of
from txl_jax.evaluation.score import TextScore, score_any_text
from txl_jax.evaluation.scoring_run import table
from txl_jax.generation.prompts import read_prompts
from txl_jax.generation.text import Continuation, continuations
from txl_jax.generation.write import formatted
from txl_jax.messages import fields_repr, short_repr, shown_path
from txl_jax.parallel.accelerators import start_devices
from txl_jax.progress import waiting_for
from txl_jax.training.events import Logger
from txl_jax.training.preemption import PreemptionGuard
from txl_jax.units import Unit, format_value

_FILES = {"generate": ("json",), "score": ("path", "json"), "evaluate": ()}
"""Settings of the modes that name files, for which the methods have arguments and results."""


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """A continuation of a prompt.

    Attributes:
      text: the prompt and the continuation. ``str()`` gives this text.
      continuation: the new text alone.
      prompt: the text of the prompt.
      sample: the number of this continuation among the samples of the prompt.
      ids: the tokens of the prompt and the continuation, int32 [n].
      nll: the negative log-likelihood of each new token in nats at temperature 1, float32.
      loss: the mean of ``nll``, or NaN without new tokens.
      ended: the reason for the end: ``length``, or the stop text.
    """

    text: str
    continuation: str
    prompt: str
    sample: int
    ids: np.ndarray
    nll: np.ndarray
    loss: float
    ended: str

    __repr__ = fields_repr

    def __str__(self) -> str:
        return self.text


class Generation(tuple[Generated, ...]):
    """The continuations of all prompts and samples in order, those of one prompt side by side."""

    @property
    def text(self) -> str:
        """The texts of all continuations, joined by newlines. ``str()`` gives it too."""
        return "\n".join(one.text for one in self)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Generation({len(self)} continuations: {short_repr(self.text)})"


@dataclasses.dataclass(frozen=True)
class SplitScore:
    """The score of one model, or of one baseline, on a split.

    Attributes:
      name: what was scored, such as ``memory 640``, ``no memory`` or ``bigram``.
      protocol: the evaluation protocol in words.
      loss: the mean loss of a target in nats.
      unit, value: ``bpb``, ``bpc`` or ``ppl``, and the mean loss in this unit.
      targets: the number of targets.
      bits_per_byte, word_ppl: the loss of a byte and of a word of the text, or ``None`` if the
        tokens do not determine them.
      seconds: the duration in seconds with compilation, or ``None`` for a baseline.
      documents, document_loss: the number of documents, and the mean of their losses in nats; or
        ``None`` without documents.
    """

    name: str
    protocol: str
    loss: float
    unit: Unit
    value: float
    targets: int
    bits_per_byte: float | None = None
    word_ppl: float | None = None
    seconds: float | None = None
    documents: int | None = None
    document_loss: float | None = None


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Evaluation(SplitScore):
    """The score of a split under the protocol of the settings, and the scores beside it.

    ``str()`` gives the table that ``--mode=evaluate`` prints.

    Attributes:
      results: all scores: this one, then the model without memory, other weights and baselines.
      record: the JSON object that the mode writes to ``evaluation.json``.
    """

    results: tuple[SplitScore, ...]
    record: Mapping[str, Any]

    def __str__(self) -> str:
        return table(self.record)

    def __repr__(self) -> str:
        value = f"{self.unit} {format_value(self.value, self.unit)}"
        return f"Evaluation({value}, {self.protocol}, and {len(self.results) - 1} more)"


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
    and ``evaluate``. An argument that is not given has the value of the run, ``config``. Every
    method raises ConfigError for an unknown or wrong setting, and DataError for text or ids that
    the vocabulary does not have. The attributes are those of a trained model:

    Attributes:
      model, params: the Flax module, for ``model.apply({"params": params}, ...)``.
      vocab: encodes text to token ids and decodes them.
      config, step: the settings of the experiment, and the step of the checkpoint.
      weights, others: the name of these parameters (``raw`` or an average), and the other names.
      source: the workdir that was loaded, or an empty string.
    """

    def generate(
        self, prompt: Text | bytes | Sequence[Any] | None = None, **settings: Any
    ) -> Generation:
        """Continues a text or several texts, as ``--mode=generate`` does.

        Args:
          prompt: a text, its bytes, its ids (an array or a list of integers), or a list of texts
            or ids. By default the prompt of the settings.
          settings: settings of :class:`~txl_jax.config.GenerateConfig`, such as ``length``,
            ``temperature``, ``top_k``, ``samples`` and ``seed``. Equal arguments give equal texts.
        """
        if isinstance(prompt, str):
            settings, prompt = {"prompt": prompt, **settings}, None
        trained = _with_section(self, "generate", settings)
        c = trained.config.generate
        if not c.length:
            raise ConfigError("generate.length = 0: nothing is generated; give another length")
        prompts = read_prompts(c) if prompt is None else texts_of(prompt, "prompt")
        made: list[Generated] = []
        for first in range(0, len(prompts), c.batch_size):
            rows: list[Continuation] = []
            for step in continuations(trained, prompts[first : first + c.batch_size], c):
                rows = [row for row, _ in step]
            made += map(_generated, rows)
        return Generation(made)

    def score(self, text: Text | bytes | Sequence[Any], **settings: Any) -> TextScore:
        """Returns the loss of every token of a text, as ``--mode=score`` does.

        Args:
          text: a text or its bytes, which are cut into lines after each line end, its ids (an
            array or a list of integers), or a list of lines or of their ids, which are scored as
            they are: write the line ends.
          settings: settings of :class:`~txl_jax.config.ScoreConfig`, such as ``mem_len`` and
            ``memory`` (``line`` empties the memory before each line).
        """
        trained = _with_section(self, "score", settings)
        lines = texts_of(text, "text")
        if isinstance(text, str | bytes | bytearray | memoryview):
            check_text(self.vocab, str(lines[0]))  # the whole text, whose encoding shows better
            lines = list(io.StringIO(str(lines[0]), newline="\n"))
        return score_any_text(trained, lines, "text")

    def evaluate(
        self, split: str | None = None, data: Mapping[str, Any] | None = None, **settings: Any
    ) -> Evaluation:
        """Scores a split of a text under an evaluation protocol, as ``--mode=evaluate`` does.

        Args:
          split: ``train``, ``valid`` or ``test``; by default that of the settings.
          data: settings of :class:`~txl_jax.config.DataConfig` that name another text, such as
            ``{"path": "other.txt"}``. The vocabulary of the model encodes it.
          settings: settings of :class:`~txl_jax.config.ProtocolConfig`, such as ``mem_len``,
            ``max_segments``, ``baselines`` and ``dynamic={"rule": "sgd"}``.
        """
        if split is not None:
            settings["split"] = split
        trained = _with_section(self, "evaluate", settings)
        if not isinstance(data, Mapping | None):
            what = "must be a dict of settings, such as {'path': 'other.txt'}"
            raise ConfigError(f"data = {short_repr(data)}: {what}")
        changes = {f"data.{key}": value for key, value in flatten(data or {}).items()}
        asked = with_settings(trained, override(trained.config, changes))
        record = modes.score_own_text(asked, self.config)
        unit = record["unit"]
        same = lambda row: {key: value for key, value in row.items() if key != unit}
        rows = [{**same(row), "unit": unit, "value": row[unit]} for row in record["results"]]
        scores = tuple(SplitScore(**row) for row in rows)
        return Evaluation(**rows[0], results=scores, record=record)


def train(
    config: Any,
    workdir: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    loggers: Sequence[Logger] = (),
) -> LanguageModel:
    """Trains, evaluates and samples a model as the command does, and returns the model.

    The workdir has the same files afterwards. A second call resumes an interrupted run, and only
    evaluates a finished one again. Progress is printed on standard error, and the final scores and
    the sample on standard output.

    In the main thread, the first Ctrl-C (or interrupt of a notebook) saves the state after the
    current step and then raises KeyboardInterrupt; SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU
    save it too and then take their usual effect. Of these, those after SIGTERM stay ignored if they
    are. The process keeps its logs, its signal handlers and its settings of JAX.

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
      workdir: the folder of the run, perhaps ``gs://BUCKET/NAME`` (needs ``txl_jax[gcs]``).
      overrides: a dict from dotted keys to values, such as ``{"train.steps": 10}``.
      loggers: receive the settings, the numbers and the texts of the run. With several seeds, each
        seed starts them.

    Returns the best checkpoint's model, with several seeds that of the first seed. Its results
    are in the workdir, and :meth:`LanguageModel.evaluate` computes the scores again.

    Raises:
      ConfigError, DataError, WorkdirError, LockedError: settings, text, devices and folder do not
        fit one another, or the platform of ``JAX_PLATFORMS`` does not start. This is checked
        before the first step.
      CheckpointError, NonFiniteError, SkippedError: training cannot go on.
      KeyboardInterrupt: the run was interrupted, and its state is saved.
    """
    exp = load_config(config, overrides)
    folder = workdir_path(workdir, "workdir")
    with waiting_for("starting the devices"):
        start_devices()
    with PreemptionGuard() as guard:
        run = modes.complete_run(exp, folder, guard, loggers)
    if guard.signal is not None:
        if guard.signal != signal.SIGINT:
            signal.raise_signal(guard.signal)
        what = f"stopped by {guard.signal.name}, {run.saved}"
        raise KeyboardInterrupt(f"{what}; call again to resume")
    return language_model(run.models[0])


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
      source: a workdir, a folder that ``save`` wrote, both perhaps ``gs://BUCKET/NAME``, or
        ``owner/name@revision`` on the Hub (needs ``txl_jax[hub]``). A source that starts with
        ``hub:`` is always on the Hub.
      step: the checkpoint of a workdir: ``best`` by validation, ``latest``, or a number.
      weights: the parameters of a workdir: ``raw``, ``swa``, ``ema``, or the choice of training if
        ``None``.

    Raises:
      WorkdirError: ``source`` has no model or two models, or cannot be downloaded.
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
    for name in _FILES[section]:
        if name in settings:
            why = "is for the command; here the text is an argument, and the result is returned"
            raise ConfigError(f"config key {section}.{name} = {short_repr(settings[name])}: {why}")
    changes = {f"{section}.{key}": value for key, value in flatten(settings).items()}
    return with_settings(trained, override(trained.config, changes))


def _generated(row: Continuation) -> Generated:
    new = formatted(row.text, row.c)
    ids, nll = np.array(row.ids, np.int32), np.array(row.nll, np.float32)
    whole = row.prompt + new
    return Generated(whole, new, row.prompt, row.sample, ids, nll, row.loss, row.ended)
