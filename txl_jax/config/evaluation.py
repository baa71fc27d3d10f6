"""Settings of scoring: protocols and dynamic evaluation."""

import dataclasses
from typing import Literal

from txl_jax.config.bounds import LENGTH, ROWS, STEPS, TOKENS
from txl_jax.config.fields import Section, above, at_least, minus_1_or_count, within
from txl_jax.config.model import Window

Split = Literal["train", "valid", "test"]

COLDEST = 1e-6
"""The least temperature but 0; logits divided by less may leave the range of float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicConfig(Section):
    """Dynamic evaluation: parameters learn from the segments just scored (Krause et al. 2019)."""

    rule: Literal["none", "sgd", "rms"] = "none"
    """Update after each segment: none; sgd, a step down its gradient; rms, the step of each
    parameter divided by the root of its squared gradients, with a pull back to the trained value
    that grows with that root."""
    learning_rate: float = above(0, 1e-5)
    """Learning rate of the update."""
    decay: float = at_least(0, 0.0)
    """Strength of the pull back (rms)."""
    epsilon: float = above(0, 1e-4)
    """Added to the root (rms)."""
    statistics: int = at_least(1, 100, STEPS)
    """Training segments whose squared gradients are summed (rms)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtocolConfig(Section):
    """How a split is scored. Every target is scored once, whatever these are."""

    split: Split = "test"
    """Split that is scored."""
    batch_size: int = at_least(1, 10, ROWS)
    """Parallel streams; each starts with an empty memory."""
    seg_len: int = at_least(1, 128, LENGTH)
    """T, tokens of each stream per step."""
    mem_len: int = at_least(0, 128, LENGTH)
    """M, memory length, which may be many times that of training."""
    context_len: int = at_least(0, 0, LENGTH)
    """Tokens before each segment that are recomputed and not scored (paper, section 4.2)."""
    first_memory: Literal["empty", "zeros"] = "empty"
    """Memory at the start: empty (PyTorch), or zeros that are attended to (TF, Hugging Face)."""
    warm_start: int = at_least(0, 0, 100 * LENGTH)
    """Tokens before each stream that are read into its memory and not scored (NVIDIA); n_layer *
    mem_len of them, with a window, make results independent of batch_size."""
    clamp_len: int | None = minus_1_or_count("never", None, LENGTH)
    """model.clamp_len while scoring; None: the model's own."""
    same_length: Window | None = None
    """model.same_length while scoring; None: the model's own."""
    temperature: float = within(COLDEST, 100, 1.0)
    """Divides the logits; results are compared at 1, and any other value holds [B,T,V]."""
    max_segments: int = at_least(0, 0, TOKENS)
    """Score only the first segments of each stream, this many; 0: all."""
    dynamic: DynamicConfig = dataclasses.field(default_factory=DynamicConfig)
    baselines: tuple[Literal["unigram", "bigram", "xz"], ...] = ()
    """Simple models scored on the same targets and printed beside the result (evaluate only)."""
