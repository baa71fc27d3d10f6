"""An experiment, whole, and how a trained model is scored and continues a text.

Its other sections: model.py, data.py, training.py, analysis.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from txl_jax.config import bounds
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
from txl_jax.config.data import DataConfig
from txl_jax.config.fields import above, at_least, free_text, local_path, probability, rule
from txl_jax.config.model import TransformerXLConfig, Window
from txl_jax.config.training import (
    AverageConfig,
    CheckpointConfig,
    DistilConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)

COLDEST = 1e-6
"""The least temperature but 0: scores of words divided by less may leave the range of float32."""

LEAST_SHARE = 1e-6
"""The least ``top_p``; any less keeps the likeliest token alone as well."""


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
    statistics: int = at_least(1, 100, bounds.STEPS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtocolConfig:
    """How a split is scored. Every target is scored once, whatever these are.

    Attributes:
      split: which split.
      batch_size: parallel streams; each starts with an empty memory.
      seg_len, mem_len: T and M while scoring; M may be many times the training one.
      context_len: tokens before each segment that are run again with it and not scored; how a
        model without memory gets its attention length (paper, section 4.2). Memory, if there is
        any, ends before them.
      first_memory: before the first segment memory is ``empty`` (PT), or holds ``zeros`` that
        are attended to (TF, Hugging Face); not with ``context_len``.
      warm_start: tokens of the text before each stream that are read into its memory and not
        scored, so that no stream but the first starts cold; n_layer times the memory's length
        (with a window) make any number of streams score as one does. 0: none.
      clamp_len, same_length: as in the model; ``None``: the model's own.
      temperature: scores of words are divided by it before their softmax. 1: as trained, and as
        results are compared; another holds scores of all words at once, [B,T,V].
      max_segments: score only the first so many segments of each stream; 0: all of them.
      dynamic: dynamic evaluation, a section of its own.
      baselines: simple models scored on the same targets and printed beside the result
        (``evaluate`` only).
    """

    split: Literal["train", "valid", "test"] = "test"
    batch_size: int = at_least(1, 10, bounds.ROWS)
    seg_len: int = at_least(1, 128, bounds.LENGTH)
    mem_len: int = at_least(0, 128, bounds.LENGTH)
    context_len: int = at_least(0, 0, bounds.LENGTH)
    first_memory: Literal["empty", "zeros"] = "empty"
    warm_start: int = at_least(0, 0, 100 * bounds.LENGTH)
    clamp_len: int | None = rule(
        None,
        "must be -1 (never) or at least 1",
        lambda v: v is None or v == -1 or v >= 1,
        bounds.LENGTH,
    )
    same_length: Window | None = None
    temperature: float = rule(
        1.0, f"must be from {COLDEST} to 100", lambda v: COLDEST <= v <= 100, 100
    )
    max_segments: int = at_least(0, 0, bounds.TOKENS)
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
      stop: a continuation ends before the one of these texts that is complete first. On a command
        line: a JSON list, or texts separated by commas, whose white space counts.
      valid_text: a model of bytes makes UTF-8 only.
      detokenise: WikiText's spacing and ``@-@`` are put back to ordinary text where it is shown.
      json: file that every continuation is added to as a JSON line; ``-``: standard output, and
        nothing else there.
      seed: of the sampling, apart from the experiment's.
    """

    prompt: str = free_text("")
    prompt_file: str | None = local_path(None)
    prompts_file: str | None = local_path(None)
    batch_size: int = at_least(1, 8, bounds.ROWS)
    samples: int = at_least(1, 1, bounds.ROWS)
    length: int = at_least(0, 512, 10 * bounds.LENGTH)
    mem_len: int = at_least(1, 512, bounds.LENGTH)
    temperature: float = rule(
        1.0,
        f"must be 0 (greedy) or from {COLDEST} to 100",
        lambda v: v == 0 or COLDEST <= v <= 100,
        100,
    )
    top_k: int = at_least(0, 0, bounds.WORDS)
    top_p: float = rule(1.0, f"must be from {LEAST_SHARE} to 1", lambda v: LEAST_SHARE <= v <= 1, 1)
    min_p: float = probability(0.0)
    repetition_penalty: float = at_least(1, 1.0, 1000)
    stop: tuple[str, ...] = free_text((), "must not have an empty text", all)
    valid_text: bool = True
    detokenise: bool = False
    json: str | None = local_path(None)
    seed: int = at_least(0, 0, bounds.SEED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One experiment, whole. ``seed`` decides initial weights, dropout, and lm1b's order.

    Example:
      >>> import txl_jax
      >>> exp = txl_jax.ExperimentConfig.from_dict({"seed": 3, "train": {"steps": 500}})
      >>> exp.train.steps, exp.optimizer.name
      (500, 'adam')
    """

    name: str = free_text("experiment")
    seed: int = at_least(0, 0, bounds.SEED)
    model: TransformerXLConfig = dataclasses.field(default_factory=TransformerXLConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    average: AverageConfig = dataclasses.field(default_factory=AverageConfig)
    distil: DistilConfig = dataclasses.field(default_factory=DistilConfig)
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
