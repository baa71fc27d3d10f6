"""Every setting of an experiment: its meaning, its default, its type and its rule, in one place.

Letters as everywhere: B batch, T segment length, M memory length, D ``d_model``, N heads,
H ``d_head``, F ``d_inner``, V vocabulary, L layers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from txl_jax.config.analysis import (
    AblationConfig,
    AttentionMapsConfig,
    ContextConfig,
    ProbeConfig,
    ReclConfig,
    ReportConfig,
    ScoreConfig,
    SpeedConfig,
)
from txl_jax.config.checks import check_model
from txl_jax.config.fields import (
    above,
    at_least,
    check_fields,
    optional_probability,
    probability,
    rule,
)
from txl_jax.config.probe_text import ProbeTextConfig

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
      scan_layers: layers are one loop with stacked parameters, compiled once for all of them.
        False: one after the other, quicker on CPU. Checkpoints are the same.
      remat: what of a layer is computed again for the gradient instead of kept: ``none``;
        ``products``: all but products with weights; ``layer``: all but the layer's input.
      kernel: how attention is computed, by name (model/kernels). ``auto``: the best one here.
    """

    vocab_size: int | None = rule(None, "must be at least 1", lambda v: v is None or v >= 1)
    n_layer: int = at_least(1, 12)
    d_model: int = at_least(2, 512)
    n_head: int = at_least(1, 8)
    d_head: int = at_least(1, 64)
    d_inner: int = at_least(1, 2048)
    d_embed: int | None = rule(None, "must be at least 1", lambda v: v is None or v >= 1)
    dropout: float = probability(0.0)
    dropout_input: float | None = optional_probability()
    dropout_output: float | None = optional_probability()
    dropout_qkv: float = probability(0.0)
    dropout_embedding: float = probability(0.0)
    dropout_mask: Literal["independent", "locked"] = "independent"
    dropatt: float = probability(0.0)
    attention: AttentionForm = "relative"
    pre_lnorm: bool = False
    untie_r: bool = False
    same_length: Window = False
    clamp_len: int = rule(-1, "must be -1 (never) or at least 1", lambda v: v == -1 or v >= 1)
    n_positions: int | None = rule(None, "must be at least 1", lambda v: v is None or v >= 1)
    cutoffs: tuple[int, ...] = rule(
        (),
        "must rise from at least 1",
        lambda v: all(a < b for a, b in zip((0, *v), v, strict=False)),
    )
    div_val: int = at_least(1, 1)
    tie_weight: bool = True
    tie_projs: tuple[bool, ...] = (False,)
    proj_same_dim: bool = True
    sample_softmax: int = at_least(0, 0)
    init_std: float = above(0, 0.02)
    proj_init_std: float = above(0, 0.01)
    norm_epsilon: float = above(0, 1e-5)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    scan_layers: bool = False
    remat: Literal["none", "products", "layer"] = "none"
    kernel: Literal["auto", "reference", "xla", "cudnn", "triton", "pallas_tpu"] = "auto"

    def __post_init__(self):
        check_fields(self, "model")
        check_model(self)

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
        ``text8``, ``probe`` (drawn: answers lie a known number of tokens back), or ``text``
        (any file or folder of the user's own).
      path: local file, folder or archive. ``None``: the corpus's own source.
      url: ``text`` only: where to download the file from; needs ``hash``.
      hash: ``md5:…`` or ``sha256:…`` of the downloaded file.
      vocab: ``stdlib``, ``text`` and ``ptb`` only: what a token is. ``None``: the corpus's own
        (stdlib and text: byte, ptb: word). ``subword`` (pieces of words) for ``text`` only.
      vocab_size: ``subword`` only: how many symbols; a short text gives fewer.
      protocol: ``enwik8``: ``authors`` leaves newline bytes out as their code does (204
        symbols), ``bytes`` leaves nothing out (205). ``lm1b``: ``authors`` has one ``<S>``
        between two sentences (PyTorch), ``double`` has two (TF), so that each sentence adds a
        trivial target. ``None``: ``authors``.
      valid_fraction, test_fraction: ``text`` only: shares cut from the end of a single text.
      cache_dir: where prepared corpora live. ``None``: ``$TXL_DATA_DIR``, else
        ``~/.cache/txl_jax``.
      probe: ``probe`` only: what is drawn, a section of its own.
    """

    name: Literal["stdlib", "ptb", "text", "enwik8", "text8", "wt103", "wt2", "lm1b", "probe"] = (
        "text"
    )
    path: str | None = None
    url: str | None = None
    hash: str | None = rule(
        None,
        "must be 'md5:' and 32 or 'sha256:' and 64 lower-case hexadecimal digits",
        lambda v: v is None or _is_hash(v),
    )
    vocab: Literal["byte", "char", "word", "subword"] | None = None
    vocab_size: int = rule(8000, "must be from 256 to 1000000", lambda v: 256 <= v <= 1_000_000)
    protocol: Literal["authors", "bytes", "double"] | None = None
    valid_fraction: float = rule(0.05, "must be above 0 and below 0.5", lambda v: 0 < v < 0.5)
    test_fraction: float = rule(0.05, "must be above 0 and below 0.5", lambda v: 0 < v < 0.5)
    cache_dir: str | None = None
    probe: ProbeTextConfig = dataclasses.field(default_factory=ProbeTextConfig)


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
    learning_rate: float = above(0, 2.5e-4)
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    warmup_steps: int = at_least(0, 0)
    min_ratio: float = rule(0.0, "must be from 0 to 1", lambda v: 0 <= v <= 1)
    clip_norm: float = at_least(0, 0.25)
    b1: float = probability(0.9)
    b2: float = probability(0.999)
    eps: float = above(0, 1e-8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised in training (see training/loss.py); scoring is always of every target.

    Attributes:
      positions: ``full``: all positions of the segment; ``half``: the most recent half only
        (paper, section 4.2, table 6).
      ar: activation regularisation, times the mean square of the last layer's states.
      tar: temporal activation regularisation, times the mean square of their changes from one
        position to the next (Merity et al. 2018, section 4.6). Both act before
        dropout, on scored positions.
    """

    positions: Literal["full", "half"] = "full"
    ar: float = at_least(0, 0.0)
    tar: float = at_least(0, 0.0)


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
      seg_len_std: s > 0: each segment has a length of its own, drawn from N(T, s) and one time in
        twenty from N(T/2, s), at least 5 and at most T + 3s; the rate of its update is in
        proportion (Merity et al. 2018, section 4.1). Arrays have the longest length and are padded.
      roll_streams: in each epoch every stream begins at a random place of its own and wraps
        around (NVIDIA).
      reset_every: n > 0: memory is emptied every n steps as well (TF on TPU: 1000).
      micro_batches: parts that a batch is cut into, gradients summed over them.
      steps_per_dispatch: updates per call of the compiled program (``lax.scan``).
      epoch_memory: at the start of an epoch memory is emptied (``reset``) or kept (``carry``).
      log_every, eval_every: in steps; ``eval_every`` 0: only at the end.
      non_finite: at a loss or gradient that is not a number: ``stop``, or ``skip`` that update
        (training/skipping.py).
      skip_spikes: f > 0: an update whose gradient norm is above f times the mean of recent ones
        is skipped. 0: none.
      max_skipped: so many updates skipped in a row stop training.
      start_from: fine-tuning: a workdir, of which the best checkpoint is taken, or an exported
        folder; parameters are its at step 0 (training/start.py). ``None``: drawn at random.
    """

    steps: int = at_least(1, 1000)
    batch_size: int = at_least(1, 16)
    seg_len: int = at_least(1, 128)
    mem_len: int = at_least(0, 128)
    context_len: int = at_least(0, 0)
    seg_len_std: float = at_least(0, 0.0)
    roll_streams: bool = False
    reset_every: int = at_least(0, 0)
    micro_batches: int = at_least(1, 1)
    steps_per_dispatch: int = at_least(1, 1)
    epoch_memory: Literal["reset", "carry"] = "reset"
    log_every: int = at_least(1, 50)
    eval_every: int = at_least(0, 0)
    non_finite: Literal["stop", "skip"] = "stop"
    skip_spikes: float = rule(0.0, "must be 0 (off) or above 1", lambda v: v == 0 or v > 1)
    max_skipped: int = at_least(1, 10)
    start_from: str | None = rule(None, "must name a folder", lambda v: v is None or v.strip())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicConfig:
    """Dynamic evaluation: parameters go on learning from what was scored (Krause et al. 2019).

    Attributes:
      rule: ``none``: parameters stay as they are. ``sgd``: after each segment a step down its
        gradient. ``rms``: each parameter's step is divided by the root of its squared gradients,
        summed over training segments, and a pull back to the trained value grows with that root.
      learning_rate: of the step.
      decay: of the pull (``rms``).
      epsilon: added to the root (``rms``).
      statistics: training segments whose squared gradients are summed (``rms``).
    """

    rule: Literal["none", "sgd", "rms"] = "none"
    learning_rate: float = above(0, 1e-5)
    decay: float = at_least(0, 0.0)
    epsilon: float = above(0, 1e-4)
    statistics: int = at_least(1, 100)


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
      dynamic: dynamic evaluation, a section of its own.
      baselines: simple models counted or run on the same tokens, printed beside the result.
    """

    split: Literal["train", "valid", "test"] = "test"
    batch_size: int = at_least(1, 10)
    seg_len: int = at_least(1, 128)
    mem_len: int = at_least(0, 128)
    context_len: int = at_least(0, 0)
    first_memory: Literal["empty", "zeros"] = "empty"
    warm_start: int = at_least(0, 0)
    clamp_len: int | None = rule(
        None, "must be -1 (never) or at least 1", lambda v: v is None or v == -1 or v >= 1
    )
    same_length: Window | None = None
    max_segments: int = at_least(0, 0)
    dynamic: DynamicConfig = dataclasses.field(default_factory=DynamicConfig)
    baselines: tuple[Literal["unigram", "bigram", "xz"], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How text is continued (section 4.4 and appendix E of the paper).

    Attributes:
      prompt: text to continue.
      prompt_file: a file with it instead; ``-``: standard input.
      prompts_file: a file of many: a prompt a line; ``.jsonl``: a string, or an object with
        ``prompt``, a line.
      batch_size: prompts that are continued at a time.
      samples: continuations of each prompt.
      length: tokens to make; 0: no sample after training.
      mem_len: hidden states kept while generating.
      temperature: 0 is greedy; 1 samples from the model as it is.
      top_k: sample from the k likeliest tokens; 0: from all.
      top_p: sample from the fewest tokens whose probability reaches p; 1: from all.
      min_p: sample from tokens with at least this share of the likeliest one's probability; 0: all.
      repetition_penalty: above 1: logits of tokens that stand in the text already are divided by
        it, or multiplied where they are negative (Keskar et al. 2019); 1: none.
      stop: a continuation ends before the first of these texts, given as a JSON list or by comma.
      valid_text: a model of bytes makes UTF-8 only.
      detokenise: WikiText's spacing and ``@-@`` are put back to ordinary text where it is shown.
      json: file that every continuation is added to as a JSON line; ``-``: standard output, and
        nothing else there.
      seed: of the sampling, apart from the experiment's.
    """

    prompt: str = ""
    prompt_file: str | None = None
    prompts_file: str | None = None
    batch_size: int = at_least(1, 8)
    samples: int = at_least(1, 1)
    length: int = at_least(0, 512)
    mem_len: int = at_least(1, 512)
    temperature: float = rule(1.0, "must be from 0 to 100", lambda v: 0 <= v <= 100)
    top_k: int = at_least(0, 0)
    top_p: float = rule(1.0, "must be above 0 and at most 1", lambda v: 0 < v <= 1)
    min_p: float = probability(0.0)
    repetition_penalty: float = at_least(1, 1.0)
    stop: tuple[str, ...] = rule((), "must not have an empty text", all)
    valid_text: bool = True
    detokenise: bool = False
    json: str | None = None
    seed: int = at_least(0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state is saved and what is kept.

    Attributes:
      every: steps between two checkpoints; one is always saved at the end.
      keep_last, keep_best: how many of the newest and of the best by validation are kept.
      go_on_without_saving: a checkpoint that cannot be written (a full disk) is told and training
        goes on, with one process; False: it stops training. The last one must be written anyway.
    """

    every: int = at_least(1, 1000)
    keep_last: int = at_least(1, 2)
    keep_best: int = at_least(0, 1)
    go_on_without_saving: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each axis of the device mesh has (training/sharding.py).

    Attributes:
      data: cuts the batch; -1: as many as there are devices for.
      fsdp: cuts the batch, and parameters and optimizer, which are gathered where they are used.
      tensor: cuts heads, the feed-forward layer's inner width, and words.
    """

    data: int = rule(-1, "must be -1 (all devices) or at least 1", lambda v: v == -1 or v >= 1)
    fsdp: int = at_least(1, 1)
    tensor: int = at_least(1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One experiment, whole. ``seed`` decides initial weights, dropout, and lm1b's order."""

    name: str = "experiment"
    seed: int = at_least(0, 0)
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
    context: ContextConfig = dataclasses.field(default_factory=ContextConfig)
    recl: ReclConfig = dataclasses.field(default_factory=ReclConfig)
    attention: AttentionMapsConfig = dataclasses.field(default_factory=AttentionMapsConfig)
    ablation: AblationConfig = dataclasses.field(default_factory=AblationConfig)
    speed: SpeedConfig = dataclasses.field(default_factory=SpeedConfig)
    score: ScoreConfig = dataclasses.field(default_factory=ScoreConfig)
    probe: ProbeConfig = dataclasses.field(default_factory=ProbeConfig)
    report: ReportConfig = dataclasses.field(default_factory=ReportConfig)

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
        from txl_jax.config.reading import build  # reading knows the settings

        return build(cls, nested, prefix="")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _is_hash(text: str) -> bool:
    kind, _, digits = text.partition(":")
    sizes = {"md5": 32, "sha256": 64}
    return len(digits) == sizes.get(kind) and all(d in "0123456789abcdef" for d in digits)
