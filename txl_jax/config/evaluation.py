"""The settings of scoring: protocols and dynamic evaluation."""

import dataclasses
from typing import Literal

from txl_jax.config.bounds import LENGTH, ROWS, STEPS, TOKENS
from txl_jax.config.fields import Section, above_0, at_least, minus_1_or_count, within
from txl_jax.config.model import Window

Split = Literal["train", "valid", "test"]

COLDEST = 1e-6
"""The smallest temperature above 0; logits divided by less can exceed the range of float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicConfig(Section):
    """Settings of dynamic evaluation, which trains on scored segments (Krause et al. 2019)."""

    rule: Literal["none", "sgd", "rms"] = "none"
    """Update after each segment: none, a gradient step (sgd), or a gradient step that divides by
    the root of the summed squared gradients of each parameter (rms), with decay towards the trained
    value in proportion to this root."""
    learning_rate: float = above_0(1e-5)
    """Learning rate of the update."""
    decay: float = at_least(0, 0.0)
    """Rate of decay towards the trained parameters (rms)."""
    epsilon: float = above_0(1e-4)
    """Number that is added to the root of the squared gradients (rms)."""
    statistics: int = at_least(1, 100, STEPS)
    """Number of training segments whose squared gradients are summed (rms)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtocolConfig(Section):
    """Settings of scoring a split; with any of them, every target is scored once."""

    split: Split = "test"
    """Split that is scored."""
    batch_size: int = at_least(1, 10, ROWS)
    """Number of parallel streams; each stream starts with an empty memory."""
    seg_len: int = at_least(1, 128, LENGTH)
    """T, the number of tokens of each stream per step."""
    mem_len: int = at_least(0, 128, LENGTH)
    """M, the memory length, which may be many times that of training."""
    context_len: int = at_least(0, 0, LENGTH)
    """Number of tokens before each segment that are recomputed, not scored (paper, section 4.2)."""
    first_memory: Literal["empty", "zeros"] = "empty"
    """Memory at the start: empty (PyTorch), or zeros that are attended to (TF, Hugging Face)."""
    warm_start: int = at_least(0, 0, 100 * LENGTH)
    """Number of tokens before each stream that are read into its memory and not scored (NVIDIA);
    with a window, n_layer * mem_len tokens make results independent of batch_size."""
    clamp_len: int | None = minus_1_or_count("never", None, LENGTH)
    """Value of model.clamp_len while scoring; None takes the model's own value."""
    same_length: Window | None = None
    """Value of model.same_length while scoring; None takes the model's own value."""
    temperature: float = within(COLDEST, 100, 1.0)
    """Divisor of the logits; published results use 1, and other values store logits [B,T,V]."""
    max_segments: int = at_least(0, 0, TOKENS)
    """Number of segments of each stream to score, from the first one; 0 scores all."""
    dynamic: DynamicConfig = dataclasses.field(default_factory=DynamicConfig)
    baselines: tuple[Literal["unigram", "bigram", "xz"], ...] = ()
    """Simple models that are scored on the same targets for comparison (evaluate only)."""
