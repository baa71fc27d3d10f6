"""Every setting of an experiment: its default, its type and its rule, in one place.

A file in ``configs/`` returns a sparse ``ml_collections.ConfigDict`` that names only what
differs from the defaults below. :func:`load_config` lays it and any overrides over the
defaults and gives a frozen, checked :class:`ExperimentConfig`. Nothing else in the project
checks a setting for type or range, and nothing else has defaults.

Letters as everywhere: B batch, T segment length, M memory length, D ``d_model``, N heads,
H ``d_head``, F ``d_inner``, V vocabulary, L layers.
"""

import ast
import dataclasses
import difflib
import math
import os
import runpy
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal


class ConfigError(ValueError):
    """A setting that cannot be used; the text names the key, the value and the rule."""


# --------------------------------------------------------------------------------------
# Rules: a sentence for the error and a test for the value.


def _rule(default: Any, text: str, holds: Callable[[Any], bool]) -> Any:
    return dataclasses.field(default=default, metadata={"rule": (text, holds)})


def _at_least(low: float, default: Any) -> Any:
    return _rule(default, f"must be at least {low}", lambda v: v >= low)


def _above(low: float, default: Any) -> Any:
    return _rule(default, f"must be above {low}", lambda v: v > low)


def _probability(default: float) -> Any:
    return _rule(default, "must be at least 0 and below 1", lambda v: 0 <= v < 1)


def _optional_probability() -> Any:
    return _rule(None, "must be at least 0 and below 1", lambda v: v is None or 0 <= v < 1)


Window = Literal[False, "pytorch", "tf"]
"""``same_length``: no window, distance < M (the authors' PyTorch), distance <= M (TF, NVIDIA)."""


AttentionForm = Literal["relative", "shaw", "absolute", "absolute_per_layer", "shared_projection"]
"""``attention``: how positions enter the scores, see :class:`TransformerXLConfig`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerXLConfig:
    """The shape of a model (section 3 of the paper); it fixes the parameters, not how it is run.

    Memory length, segment length and batch size are not here: they are the shapes of what
    the model is given, and the same parameters run with any of them.

    Attributes:
      vocab_size: V, number of token ids. ``None`` in an experiment: taken from the corpus.
      n_layer, d_model, n_head, d_head, d_inner: L, D, N, H, F. N*H may differ from D.
      d_embed: width of the embedding of the most frequent words. ``None``: D.
      dropout: rate at every site that has none of its own: attention output, inside and after
        the feed-forward layer, and where the next two are ``None``.
      dropout_input: rate on the embeddings, of words and of positions. ``None``: ``dropout``.
      dropout_output: rate on the final hidden state. ``None``: ``dropout``.
      dropout_qkv: rate on projected queries, keys, values and positions, one mask for a segment.
      dropout_embedding: rate at which whole words are dropped from the input embedding.
      dropout_mask: ``independent`` at every position, or ``locked``: one mask for all positions
        of a row ("variational", Gal and Ghahramani 2016), at every site but the next.
      dropatt: rate on the attention probabilities, always independent.
      attention: form of attention by name. ``relative`` is the paper's; ``shaw``, ``absolute``
        and ``absolute_per_layer`` are those of its table 6, the last two without memory;
        ``shared_projection`` is that of the authors' later Penn Treebank release.
      pre_lnorm: normalise the input of each sub-layer instead of its output.
      untie_r: ``relative`` only: u and v per layer instead of shared by all layers.
      same_length: attention window by distance, see :data:`Window`.
      clamp_len: c > 0: distances above c use the position encoding of c (``shaw``: the c nearest
        rows of the table are used, so distances from c-1 on share one). -1: never.
      n_positions: rows of the learnt position table of ``shaw`` (training T+M) and of
        ``absolute_per_layer`` (training T).
      cutoffs: first word ids of the tail clusters of an adaptive softmax (Grave et al. 2017); ():
        none. Words are sorted by frequency.
      div_val: d > 1: embeddings of cluster i are d^i times narrower, and each cluster has a
        projection to D (Baevski and Auli 2019). 1: one width, and one projection if it is not D.
      tie_weight: output weights are the input embedding.
      tie_projs: for each cluster whether its output projection is the input's; False where it is
        too short. TF's ``proj_share_all_but_first`` is (False, True, True, ..).
      proj_same_dim: with ``div_val`` > 1, a projection also for the cluster whose width is D
        already (PT always; TF's option).
      sample_softmax: n > 0: training scores against the distinct ones of 2n words drawn
        log-uniformly instead of all V (TF 1.10's candidate sampling, as in PT); scoring is exact.
      init_std: standard deviation of every weight's initial values.
      proj_init_std: the same of the projections of embedding and softmax.
      norm_epsilon: of LayerNorm; PT 1e-5, TF 1e-12.
      dtype: compute type. Parameters, softmax and loss are float32 always.
    """

    vocab_size: int | None = _rule(None, "must be at least 1", lambda v: v is None or v >= 1)
    n_layer: int = _at_least(1, 12)
    d_model: int = _at_least(2, 512)
    n_head: int = _at_least(1, 8)
    d_head: int = _at_least(1, 64)
    d_inner: int = _at_least(1, 2048)
    d_embed: int | None = _rule(None, "must be at least 1", lambda v: v is None or v >= 1)
    dropout: float = _probability(0.0)
    dropout_input: float | None = _optional_probability()
    dropout_output: float | None = _optional_probability()
    dropout_qkv: float = _probability(0.0)
    dropout_embedding: float = _probability(0.0)
    dropout_mask: Literal["independent", "locked"] = "independent"
    dropatt: float = _probability(0.0)
    attention: AttentionForm = "relative"
    pre_lnorm: bool = False
    untie_r: bool = False
    same_length: Window = False
    clamp_len: int = _rule(-1, "must be -1 (never) or at least 1", lambda v: v == -1 or v >= 1)
    n_positions: int | None = _rule(None, "must be at least 1", lambda v: v is None or v >= 1)
    cutoffs: tuple[int, ...] = _rule(
        (),
        "must rise from at least 1",
        lambda v: all(a < b for a, b in zip((0, *v), v, strict=False)),
    )
    div_val: int = _at_least(1, 1)
    tie_weight: bool = True
    tie_projs: tuple[bool, ...] = (False,)
    proj_same_dim: bool = True
    sample_softmax: int = _at_least(0, 0)
    init_std: float = _above(0, 0.02)
    proj_init_std: float = _above(0, 0.01)
    norm_epsilon: float = _above(0, 1e-5)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self):
        _check_fields(self, "model")
        _check_model(self)

    @property
    def memory_free(self) -> bool:
        """Whether the form of attention can only run with M = 0."""
        return self.attention in ("absolute", "absolute_per_layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, where from, and what a token is.

    Attributes:
      name: ``stdlib`` (source of the running Python's standard library), ``ptb`` (Penn
        Treebank), ``wt103``, ``wt2`` (WikiText), ``lm1b`` (One Billion Word), ``enwik8``,
        ``text8``, or ``text`` (any file or folder of the user's own).
      path: local file, folder or archive. ``None``: the corpus's own source.
      url: ``text`` only: where to download the file from; needs ``hash``.
      hash: ``md5:…`` or ``sha256:…`` of the downloaded file.
      vocab: ``stdlib``, ``text`` and ``ptb`` only: what a token is. ``None``: the corpus's own
        (stdlib and text: byte, ptb: word).
      protocol: ``enwik8`` only: ``authors`` leaves newline bytes out as their code does (204
        symbols), ``bytes`` leaves nothing out (205). ``None``: ``authors``.
      valid_fraction, test_fraction: ``text`` only: shares cut from the end of a single text.
      cache_dir: where prepared corpora live. ``None``: ``$TXL_DATA_DIR``, else
        ``~/.cache/txl_jax``.
    """

    name: Literal["stdlib", "ptb", "text", "enwik8", "text8", "wt103", "wt2", "lm1b"] = "text"
    path: str | None = None
    url: str | None = None
    hash: str | None = _rule(
        None,
        "must be 'md5:' and 32 or 'sha256:' and 64 lower-case hexadecimal digits",
        lambda v: v is None or _is_hash(v),
    )
    vocab: Literal["byte", "char", "word"] | None = None
    protocol: Literal["authors", "bytes"] | None = None
    valid_fraction: float = _rule(0.05, "must be above 0 and below 0.5", lambda v: 0 < v < 0.5)
    test_fraction: float = _rule(0.05, "must be above 0 and below 0.5", lambda v: 0 < v < 0.5)
    cache_dir: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Update rule, clipping and learning-rate schedule (see training/optimizer.py).

    Attributes:
      name: ``adam``, or ``lamb`` as NVIDIA's code has it (``eps`` there is 1e-6).
      learning_rate: rate at the end of warm-up.
      schedule: after warm-up: ``cosine`` to ``min_ratio * learning_rate`` at ``train.steps``,
        ``inverse_sqrt`` (rate * sqrt(warmup / step)), or ``constant``.
      warmup_steps: linear from 0; the first update already has a rate above 0.
      clip_norm: largest global norm of the gradient; 0: never clipped.
    """

    name: Literal["adam", "lamb"] = "adam"
    learning_rate: float = _above(0, 2.5e-4)
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    warmup_steps: int = _at_least(0, 0)
    min_ratio: float = _rule(0.0, "must be from 0 to 1", lambda v: 0 <= v <= 1)
    clip_norm: float = _at_least(0, 0.25)
    b1: float = _probability(0.9)
    b2: float = _probability(0.999)
    eps: float = _above(0, 1e-8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised in training (see training/loss.py); scoring is always of every target.

    Attributes:
      positions: ``full``: all positions of the segment; ``half``: the most recent half only
        (paper, section 4.2, table 6).
      ar: activation regularisation, times the mean square of the last layer's states.
      tar: temporal activation regularisation, times the mean square of their changes from one
        position to the next (Merity et al. 2017, section 4.3 names both). Both act before
        dropout, on scored positions.
    """

    positions: Literal["full", "half"] = "full"
    ar: float = _at_least(0, 0.0)
    tar: float = _at_least(0, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the training stream is cut and how long it is trained on.

    Attributes:
      steps: updates in all.
      batch_size: B, parallel streams over all devices.
      seg_len: T, tokens of each stream in a step.
      mem_len: M, hidden states carried from step to step.
      context_len: tokens before the segment that are run again with it and not scored (PT's
        ``ext_len``); for training without memory.
      micro_batches: parts that a batch is cut into, gradients summed over them.
      steps_per_dispatch: updates per call of the compiled program (``lax.scan``).
      epoch_memory: at the start of an epoch memory is emptied (``reset``) or kept (``carry``).
      log_every, eval_every: in steps; ``eval_every`` 0: only at the end.
    """

    steps: int = _at_least(1, 1000)
    batch_size: int = _at_least(1, 16)
    seg_len: int = _at_least(1, 128)
    mem_len: int = _at_least(0, 128)
    context_len: int = _at_least(0, 0)
    micro_batches: int = _at_least(1, 1)
    steps_per_dispatch: int = _at_least(1, 1)
    epoch_memory: Literal["reset", "carry"] = "reset"
    log_every: int = _at_least(1, 50)
    eval_every: int = _at_least(0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtocolConfig:
    """How a split is scored. Every target is scored once, whatever these are.

    Attributes:
      split: which split.
      batch_size: parallel streams; each starts with an empty memory.
      seg_len, mem_len: T and M while scoring; M may be many times the training one.
      context_len: tokens before each segment that are run again with it and not scored; how a
        model without memory gets its attention length (paper, section 4.2).
      first_memory: before the first segment memory is ``empty`` (PT), or holds ``zeros`` that
        are attended to (TF, Hugging Face).
      warm_start: tokens of the text before each stream that are read into its memory and not
        scored, so that no stream but the first starts cold; n_layer times the memory's length
        (with a window) make any number of streams score as one does. 0: none.
      clamp_len, same_length: as in the model; ``None``: the model's own.
      max_segments: score only the first so many segments of each stream; 0: all of them.
      baselines: simple models counted or run on the same tokens, printed beside the result.
    """

    split: Literal["train", "valid", "test"] = "test"
    batch_size: int = _at_least(1, 10)
    seg_len: int = _at_least(1, 128)
    mem_len: int = _at_least(0, 128)
    context_len: int = _at_least(0, 0)
    first_memory: Literal["empty", "zeros"] = "empty"
    warm_start: int = _at_least(0, 0)
    clamp_len: int | None = _rule(
        None, "must be -1 (never) or at least 1", lambda v: v is None or v == -1 or v >= 1
    )
    same_length: Window | None = None
    max_segments: int = _at_least(0, 0)
    baselines: tuple[Literal["unigram", "bigram", "xz"], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How text is continued (section 4.4 and appendix E of the paper).

    Attributes:
      prompt: text to continue; ``prompt_file`` names a file with it instead.
      length: tokens to make; 0: no sample after training.
      mem_len: hidden states kept while generating.
      temperature: 0 is greedy.
      top_k: sample from the k likeliest tokens; 0: from all.
      top_p: sample from the fewest tokens whose probability reaches p; 1: from all.
      seed: of the sampling, apart from the experiment's.
    """

    prompt: str = ""
    prompt_file: str | None = None
    length: int = _at_least(0, 512)
    mem_len: int = _at_least(1, 512)
    temperature: float = _at_least(0, 1.0)
    top_k: int = _at_least(0, 0)
    top_p: float = _rule(1.0, "must be above 0 and at most 1", lambda v: 0 < v <= 1)
    seed: int = _at_least(0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state is saved and what is kept.

    Attributes:
      every: steps between two checkpoints; one is always saved at the end.
      keep_last, keep_best: how many of the newest and of the best by validation are kept.
    """

    every: int = _at_least(1, 1000)
    keep_last: int = _at_least(1, 2)
    keep_best: int = _at_least(0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each axis of the device mesh has; -1: all there are."""

    data: int = _rule(-1, "must be -1 (all devices) or at least 1", lambda v: v == -1 or v >= 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One experiment, whole. ``seed`` decides initial weights, dropout, and lm1b's order."""

    name: str = "experiment"
    seed: int = _at_least(0, 0)
    model: TransformerXLConfig = dataclasses.field(default_factory=TransformerXLConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    validate: ProtocolConfig = dataclasses.field(
        default_factory=lambda: ProtocolConfig(split="valid")
    )
    evaluate: ProtocolConfig = dataclasses.field(default_factory=ProtocolConfig)
    generate: GenerateConfig = dataclasses.field(default_factory=GenerateConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict of every setting, ready for JSON (tuples as lists)."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, nested: Mapping[str, Any]) -> "ExperimentConfig":
        """Inverse of :meth:`to_dict`; a key that is missing takes its default.

        Raises:
          ConfigError: an unknown key, a wrong type, a value out of range, or a combination
            that cannot work.
        """
        return _build(cls, nested, prefix="")


FREE_TO_CHANGE = (
    "name",
    "data.path",
    "data.cache_dir",
    "train.log_every",
    "train.eval_every",
    "validate",
    "evaluate",
    "generate",
    "checkpoint",
    "mesh",
)
"""Keys (or whole sections) that a resumed run may change: they do not touch the trained state.
(The corpus's hash, not its path, is what must stay the same.)"""


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Dotted keys that decide the trained state and differ, each as ``key: old -> new``.

    A key that is missing has its default: settings that came later do not part old runs from
    new ones.
    """
    defaults = _flatten(ExperimentConfig().to_dict())
    fa, fb = ({**defaults, **_flatten(nested)} for nested in (a, b))
    keys = [k for k in sorted(fa.keys() | fb.keys()) if not _is_free(k)]
    return [
        f"{k}: {fa.get(k, 'absent')!r} -> {fb.get(k, 'absent')!r}"
        for k in keys
        if fa.get(k, "absent") != fb.get(k, "absent")
    ]


def load_config(path: str, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """The checked, frozen experiment that a config file describes.

    Args:
      path: a Python file with ``get_config()`` that returns a ``ConfigDict``; after a colon
        the argument for ``get_config(variant)``, e.g. ``configs/enwik8_24l.py:smoke``.
      overrides: dotted keys to values, e.g. ``{"train.steps": 10}``. A string is read as the
        key's type, so that command-line text works.

    Raises:
      ConfigError: the file is not there or not a config, or a setting cannot be used. Nothing
        has touched a device or written a file by then.
    """
    nested = _config_file(path)
    for key, value in (overrides or {}).items():
        _set(nested, key, value)
    return ExperimentConfig.from_dict(nested)


def override(exp: ExperimentConfig, overrides: Mapping[str, Any]) -> ExperimentConfig:
    """The experiment with some settings changed, checked again; keys as in :func:`load_config`."""
    nested = exp.to_dict()
    for key, value in overrides.items():
        _set(nested, key, value)
    return ExperimentConfig.from_dict(nested)


# --------------------------------------------------------------------------------------
# Reading, merging, checking.


def _config_file(path: str) -> dict[str, Any]:
    import ml_collections  # here, so that models run where it is not installed

    file, _, variant = path.partition(":")
    if not os.path.isfile(file):
        raise ConfigError(f"--config={path}: there is no file {file!r}")
    if not file.endswith(".py"):
        raise ConfigError(f"--config={path}: {file!r} is not a Python file (*.py)")
    try:
        # Not an import: that would write a __pycache__, and read a stale one back when a file
        # of the same size is rewritten within a second.
        get_config = runpy.run_path(file, run_name="txl_config").get("get_config")
        if not callable(get_config):
            raise ConfigError(f"--config={path}: {file!r} has no function get_config()")
        config = get_config(variant) if variant else get_config()
        nested = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else None
    except ConfigError:
        raise
    except Exception as error:
        where = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        line = f" (line {where[-1]})" if where else ""
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--config={path}: {file!r} cannot be run: {what}{line}") from error
    if nested is None:
        raise ConfigError(f"--config={path}: get_config() must return an ml_collections.ConfigDict")
    return nested


def _set(nested: dict[str, Any], key: str, value: Any) -> None:
    if not isinstance(key, str):
        raise ConfigError(f"override {key!r}: a key is text like 'train.steps'")
    *sections, leaf = key.split(".")
    for section in sections:
        inner = nested.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(_unknown(key))
        nested = inner
    nested[leaf] = value


def _build(cls: type, nested: Mapping[str, Any], prefix: str) -> Any:
    """An instance of the dataclass ``cls`` from a nested mapping, every leaf type-checked."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in nested.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise ConfigError(_unknown(next(iter(_flatten({key: value})), key)))
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"config key {key} = {value!r}: is a section, not a value")
            section_defaults = {"split": "valid"} if key == "validate" else {}
            values[name] = _build(
                typing.cast(type, hints[name]), {**section_defaults, **value}, key + "."
            )
        elif isinstance(value, Mapping) and value:
            raise ConfigError(_unknown(next(iter(_flatten({key: value})), key)))
        else:
            values[name] = _typed(key, value, hints[name])
    built = cls(**values)
    if cls is not TransformerXLConfig:
        _check_fields(built, prefix.rstrip("."))
    if cls is ExperimentConfig:
        _check_combinations(built)
    return built


def _check_fields(config: Any, prefix: str) -> None:
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(value):
            continue
        object.__setattr__(config, field.name, _typed(key, value, hints[field.name]))
        text, holds = field.metadata.get("rule", ("", lambda v: True))
        if not holds(getattr(config, field.name)):
            raise ConfigError(f"config key {key} = {value!r}: {text}")


def _check_combinations(c: ExperimentConfig) -> None:
    def refuse(key: str, value: Any, rule: str):
        raise ConfigError(f"config key {key} = {value!r}: {rule}")

    t = c.train
    if t.batch_size % t.micro_batches:
        refuse("train.micro_batches", t.micro_batches, f"must divide batch_size {t.batch_size}")
    every = (
        ("train.steps", t.steps),
        ("train.log_every", t.log_every),
        ("train.eval_every", t.eval_every),
        ("checkpoint.every", c.checkpoint.every),
    )
    for key, value in every:
        if value % t.steps_per_dispatch:
            rule = f"must be a multiple of train.steps_per_dispatch {t.steps_per_dispatch}"
            refuse(key, value, rule)
    o = c.optimizer
    if o.warmup_steps > t.steps:
        refuse("optimizer.warmup_steps", o.warmup_steps, f"is more than train.steps {t.steps}")
    if o.schedule == "inverse_sqrt" and not o.warmup_steps:
        refuse("optimizer.warmup_steps", 0, "must be at least 1 for schedule 'inverse_sqrt'")
    if c.loss.positions == "half" and t.seg_len < 2:
        refuse("loss.positions", "half", f"needs train.seg_len of at least 2, not {t.seg_len}")
    for section, cut in (("train", t), ("validate", c.validate), ("evaluate", c.evaluate)):
        _check_lengths(section, c.model, cut.mem_len, cut.seg_len, cut.context_len, refuse)
    for section, scored in (("validate", c.validate), ("evaluate", c.evaluate)):
        if scored.warm_start and not scored.mem_len:
            rule = f"is read into memory, and {section}.mem_len is 0"
            refuse(f"{section}.warm_start", scored.warm_start, rule)
        if scored.warm_start and scored.first_memory == "zeros":
            rule = f"starts from an empty memory, and {section}.first_memory is 'zeros'"
            refuse(f"{section}.warm_start", scored.warm_start, rule)
    windows = (
        ("train", t, c.model.same_length),
        ("validate", c.validate, _own(c.validate.same_length, c.model.same_length)),
        ("evaluate", c.evaluate, _own(c.evaluate.same_length, c.model.same_length)),
    )
    for section, cut, window in windows:
        if window == "pytorch" and cut.mem_len == 0:
            rule = "the window same_length='pytorch' (distance < M) needs a memory; use 'tf'"
            refuse(f"{section}.mem_len", cut.mem_len, rule)
        if window == "tf" and cut.context_len:
            rule = "the window same_length='tf' (distance <= M) lets nothing of it be seen"
            refuse(f"{section}.context_len", cut.context_len, f"{rule}; use False")
    d = c.data
    if d.url and not d.hash:
        refuse("data.url", d.url, "needs data.hash (md5:… or sha256:…) to check the download by")
    if d.url and d.name != "text":
        refuse("data.url", d.url, "is for data.name='text'; other corpora know their own")
    if d.url and d.path:
        refuse("data.url", d.url, "and data.path name two sources; give one")
    if d.vocab and d.name not in ("stdlib", "ptb", "text"):
        refuse("data.vocab", d.vocab, f"is fixed for data.name={d.name!r}; leave it out")
    if d.protocol and d.name != "enwik8":
        refuse("data.protocol", d.protocol, f"is for data.name='enwik8', not {d.name!r}")
    if c.generate.prompt and c.generate.prompt_file:
        refuse("generate.prompt_file", c.generate.prompt_file, "and prompt are both given")


def _check_lengths(section, model, mem_len, seg_len, context_len, refuse) -> None:
    if model.memory_free and mem_len:
        rule = f"attention {model.attention!r} has no memory: it must be 0; use context_len"
        refuse(f"{section}.mem_len", mem_len, rule)
    if context_len and mem_len:
        rule = f"context is run again, so it needs {section}.mem_len 0, not {mem_len}"
        refuse(f"{section}.context_len", context_len, rule)
    if model.attention == "absolute_per_layer" and context_len + seg_len > model.n_positions:
        rule = f"with context_len {context_len} is more than model.n_positions {model.n_positions}"
        refuse(f"{section}.seg_len", seg_len, rule)


def _check_model(c: TransformerXLConfig) -> None:
    def refuse(key: str, value: Any, rule: str):
        raise ConfigError(f"config key model.{key} = {value!r}: {rule}")

    if c.d_model % 2:
        rule = "must be even, half of a position encoding is sines and half cosines"
        refuse("d_model", c.d_model, f"{rule} (paper, section 3.3)")
    if c.n_positions is None and c.attention in ("shaw", "absolute_per_layer"):
        rule = f"attention {c.attention!r} has a table of positions and needs its length"
        refuse("n_positions", None, rule)
    if c.attention == "absolute_per_layer" and c.n_head * c.d_head != c.d_model:
        rule = f"attention {c.attention!r} needs n_head * d_head = d_model {c.d_model}"
        refuse("d_head", c.d_head, rule)
    if c.vocab_size is not None and c.cutoffs and c.cutoffs[-1] >= c.vocab_size:
        refuse("cutoffs", c.cutoffs, f"must be below the vocabulary's size {c.vocab_size}")
    width = c.d_model if c.d_embed is None else c.d_embed
    if width // c.div_val ** len(c.cutoffs) < 1:
        rule = f"leaves no width for the last of {len(c.cutoffs) + 1} clusters of d_embed {width}"
        refuse("div_val", c.div_val, rule)
    if len(c.tie_projs) > len(c.cutoffs) + 1:
        rule = f"has more entries than there are clusters ({len(c.cutoffs) + 1})"
        refuse("tie_projs", c.tie_projs, rule)
    if c.sample_softmax and (c.cutoffs or c.div_val > 1 or width != c.d_model):
        rule = "goes with one cluster of width d_model only (no cutoffs, div_val or d_embed)"
        refuse("sample_softmax", c.sample_softmax, rule)


def _own(value: Any, default: Any) -> Any:
    return default if value is None else value


def _typed(key: str, value: Any, hint: Any) -> Any:
    """``value`` as the type ``hint``; text is read as that type. Raises ConfigError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        (inner,) = [a for a in args if a is not type(None)]
        return _typed(key, value, inner)
    if origin is Literal:
        for choice in args:
            if type(value) is type(choice) and value == choice:
                return choice
            if isinstance(value, str) and value.lower() == str(choice).lower():
                return choice
        names = ", ".join(repr(a) for a in args)
        raise ConfigError(f"config key {key} = {value!r}: must be one of {names}")
    if origin is tuple:
        if isinstance(value, str):
            value = [v for v in value.strip("()[] ").replace(" ", "").split(",") if v]
        if not isinstance(value, list | tuple):
            raise ConfigError(f"config key {key} = {value!r}: must be a list")
        return tuple(
            _typed(key, v.strip("'\"") if isinstance(v, str) else v, args[0]) for v in value
        )
    if hint is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if hint in (int, float) and isinstance(value, str):
        value = _literal(value)
    if hint is float and type(value) is int:
        value = float(value)
    if hint is int and type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not hint:
        raise ConfigError(f"config key {key} = {value!r}: must be of type {hint.__name__}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"config key {key} = {value!r}: must be a finite number")
    return value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _unknown(key: str) -> str:
    known = list(_flatten(dataclasses.asdict(ExperimentConfig())))
    leaf = key.rpartition(".")[2]
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf]
    near = difflib.get_close_matches(key, same_leaf or known, n=1, cutoff=0.0)
    return f"unknown config key {key!r}; the nearest key is {near[0]!r}"


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in FREE_TO_CHANGE)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _is_hash(text: str) -> bool:
    kind, _, digits = text.partition(":")
    sizes = {"md5": 32, "sha256": 64}
    return len(digits) == sizes.get(kind) and all(d in "0123456789abcdef" for d in digits)
