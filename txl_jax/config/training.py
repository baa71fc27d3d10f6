"""Settings of training."""

import dataclasses
from typing import Literal

from txl_jax.config.bounds import DEVICES, ITEMS, LENGTH, ROWS, STEPS, WORDS
from txl_jax.config.fields import (
    Section,
    above,
    at_least,
    local_path,
    minus_1_or_count,
    probability,
    setting,
    within,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, key="optimizer"):
    """Update rule, clipping and learning-rate schedule (training/optimizer.py)."""

    name: Literal["adam", "lamb"] = "adam"
    """Update rule; lamb is that of NVIDIA's code, where eps is 1e-6."""
    learning_rate: float = above(0, 2.5e-4)
    """Learning rate at the end of warm-up."""
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    """After warm-up: cosine to min_ratio at train.steps, sqrt(warmup_steps / step), or constant."""
    warmup_steps: int = at_least(0, 0, STEPS)
    """Updates of linear warm-up from 0; the first update has a rate above 0."""
    min_ratio: float = within(0, 1, 0.0)
    """Final rate of cosine / learning_rate."""
    clip_norm: float = at_least(0, 0.25)
    """Largest global norm of the gradient; 0: no clipping."""
    b1: float = probability(0.9)
    """Decay of the first moment."""
    b2: float = probability(0.999)
    """Decay of the second moment."""
    eps: float = above(0, 1e-8)
    """Added to the root of the second moment."""
    l2: float = at_least(0, 0.0)
    """L2 penalty that is added to the clipped gradient (PyTorch's weight_decay of Adam)."""
    weight_decay: float = at_least(0, 0.0)
    """Decoupled weight decay of every parameter, times the rate (Loshchilov and Hutter 2019)."""
    embedding_ratio: float = above(0, 1.0)
    """Peak rate of the embeddings / that of the rest; cosine ends at one rate for both."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AverageConfig(Section, key="average"):
    """Weight averaging over updates (training/state.py)."""

    swa_start: int = at_least(0, 0, STEPS)
    """Average the parameters from the update after this one on (swa; Polyak and Juditsky 1992,
    Merity et al. 2018, Izmailov et al. 2018); 0: never."""
    swa_lr_ratio: float | None = setting(None, "must be above 0", lambda v: v is None or v > 0)
    """End the schedule at swa_start, then use its last rate times this; None: continue it."""
    ema_decay: float = probability(0.0)
    """Decay d of the exponential average (ema), a plain one for 1/(1-d) updates; 0: none."""
    use: Literal["best", "raw", "swa", "ema"] = "best"
    """Parameters to score, sample and export; best: the lowest validation loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(Section, key="loss"):
    """Training loss (training/loss.py); scoring always covers every target."""

    positions: Literal["full", "half"] = "full"
    """Positions in the loss: all, or the most recent half (paper, section 4.2, table 6)."""
    ar: float = at_least(0, 0.0)
    """Weight of the mean square of the last layer's states (Merity et al. 2018, section 4.6)."""
    tar: float = at_least(0, 0.0)
    """Weight of the mean square of those states' changes between positions (same source)."""
    r_drop: float = at_least(0, 0.0)
    """Weight of the Kullback-Leibler divergences of two dropout masks (Wu et al. 2021)."""
    past_decode: float = at_least(0, 0.0)
    """Weight of the nll of input words decoded from the predictions (Brahma 2019, 0.001 there)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilConfig(Section, key="distil"):
    """Distillation from models trained on the same text (training/distil.py)."""

    teachers: tuple[str, ...] = local_path((), "must not name an empty folder", all)
    """Workdirs or exported folders of models whose mean probabilities are learnt."""
    weight: float = setting(0.5, "must be above 0 and at most 1", lambda v: 0 < v <= 1)
    """w in the loss: w * cross entropy against teachers + (1-w) * that against the text."""
    words: int = at_least(1, 32, WORDS)
    """Most likely words of the teachers kept per token; all others count as one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section, key="train"):
    """Shape, order and number of the training steps."""

    steps: int = at_least(1, 1000, STEPS)
    """Number of updates."""
    batch_size: int = at_least(1, 16, ROWS)
    """B, parallel streams over all devices."""
    seg_len: int = at_least(1, 128, LENGTH)
    """T, tokens of each stream in a step."""
    mem_len: int = at_least(0, 128, LENGTH)
    """M, hidden states carried from step to step."""
    context_len: int = at_least(0, 0, LENGTH)
    """Tokens before the segment that are recomputed and not scored (PyTorch's ext_len)."""
    seg_len_std: float = at_least(0, 0.0, LENGTH)
    """s above 0 draws each segment's length from N(T, s), one time in twenty from N(T/2, s), at
    least 5 and at most T + 3s, with the rate in proportion (Merity et al. 2018, section 4.1);
    arrays are padded to the longest."""
    partial_shuffle: bool = False
    """Start every stream at a random place in each epoch and wrap around (NVIDIA)."""
    text_on_device: bool = False
    """Keep the whole training text on the device and slice batches there."""
    reset_every: int = at_least(0, 0, STEPS)
    """Also empty the memory after this many steps (TF on TPU: 1000); 0: never."""
    micro_batches: int = at_least(1, 1, ROWS)
    """Parts of the batch that run one after another, their gradients summed."""
    steps_per_dispatch: int = at_least(1, 1, STEPS)
    """Updates per call of the compiled program."""
    epoch_memory: Literal["reset", "carry"] = "reset"
    """Whether the memory is emptied or kept when an epoch starts."""
    log_every: int = at_least(1, 50, STEPS)
    """Steps between two lines of the log."""
    eval_every: int = at_least(0, 0, STEPS)
    """Steps between two validations; 0: only at the end."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Stop training, or skip the update, when loss or gradient is not finite."""
    skip_spikes: float = setting(0.0, "must be 0 (off) or above 1", lambda v: v == 0 or v > 1)
    """Skip updates whose gradient norm is above this times the mean of recent ones; 0: none."""
    max_skipped: int = at_least(1, 10, STEPS)
    """Number of updates skipped in a row that stops training."""
    num_seeds: int = at_least(1, 1, ITEMS)
    """Runs in one program, of seeds from seed on, in folders seed_N (training/multi_seed.py)."""
    start_from: str | None = local_path(
        None, "must name a folder", lambda v: v is None or v.strip()
    )
    """Fine-tuning: workdir or exported folder that gives the parameters at step 0."""

    @property
    def longest_seg_len(self) -> int:
        """The length of a segment's arrays, see :func:`longest_segment`."""
        return longest_segment(self.seg_len, self.seg_len_std)


DEVIATIONS = 3
"""Standard deviations from T to the longest segment."""


def longest_segment(seg_len: int, std: float) -> int:
    """The length of the arrays: T, or with a standard deviation s the integer part of T + 3s."""
    return seg_len + int(DEVIATIONS * std)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, key="checkpoint"):
    """When state is saved and what is kept."""

    every: int = at_least(1, 1000, STEPS)
    """Steps between two checkpoints; one more is saved at the end."""
    keep_last: int = at_least(1, 2, STEPS)
    """Number of newest checkpoints to keep."""
    keep_best: int = at_least(0, 1, STEPS)
    """Number of best checkpoints by validation to keep."""
    tolerate_save_errors: bool = False
    """Log a checkpoint that cannot be written and continue (one process, not the last one)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section, key="mesh"):
    """Number of devices on each axis of the device mesh (parallel/shardings.py)."""

    data: int = minus_1_or_count("all devices", -1, DEVICES)
    """Splits the batch; -1: all devices that the other axes leave."""
    fsdp: int = at_least(1, 1, DEVICES)
    """Splits batch, parameters and optimizer; parameters are gathered for use."""
    tensor: int = at_least(1, 1, DEVICES)
    """Splits heads, the feed-forward layer's inner width, and words."""
