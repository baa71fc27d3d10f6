"""The settings of training."""

import dataclasses
import re
from typing import Any, Literal

from txl_jax.config.bounds import DEVICES, ITEMS, LENGTH, ROWS, STEPS, WORDS
from txl_jax.config.fields import (
    Section,
    above_0,
    at_least,
    file_path,
    free_text,
    minus_1_or_count,
    named_values,
    probability,
    setting,
    within,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, key="optimizer"):
    """Settings of the update rule and the learning-rate schedule (training/optimizer.py)."""

    name: str = free_text("adam", "must name an update rule", str.strip)
    """Update rule: adam, lamb (NVIDIA's, which sets eps to 1e-6), muon (orthogonal updates for the
    matrices of layers, and adam for the other parameters), or an optimizer of optax, such as
    optax.lion and optax.contrib.muon, with optimizer.arguments."""
    arguments: dict[str, Any] = named_values()  # noqa: RUF009
    """Arguments of an optimizer of optax by name, optimizer.arguments.NAME=VALUE, besides the
    learning rate."""
    learning_rate: float = above_0(2.5e-4)
    """Learning rate at the end of warm-up."""
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    """Learning rate after warm-up: cosine down to min_ratio at train.steps, sqrt(warmup_steps /
    step), or constant."""
    warmup_steps: int = at_least(0, 0, STEPS)
    """Number of updates of linear warm-up from 0; the first update already has a rate above 0."""
    min_ratio: float = within(0, 1, 0.0)
    """Final learning rate of the cosine schedule, divided by optimizer.learning_rate."""
    clip_norm: float = at_least(0, 0.25)
    """Largest global norm of the gradient; 0 turns clipping off."""
    b1: float = probability(0.9)
    """Decay rate of the first moment of adam, lamb and muon."""
    b2: float = probability(0.999)
    """Decay rate of the second moment of adam, lamb and muon."""
    eps: float = above_0(1e-8)
    """Number that is added to the root of the second moment of adam, lamb and muon."""
    momentum: float = probability(0.95)
    """Decay rate of muon's momentum."""
    l2: float = at_least(0, 0.0)
    """L2 penalty that is added to the clipped gradient (PyTorch's weight_decay of Adam)."""
    weight_decay: float = at_least(0, 0.0)
    """Decoupled weight decay of every parameter, times the learning rate (Loshchilov and Hutter
    2019)."""
    embedding_ratio: float = above_0(1.0)
    """Peak learning rate of the embeddings, divided by that of the other parameters; the cosine
    schedule ends at the same rate for both."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AverageConfig(Section, key="average"):
    """Settings of weight averaging over updates (training/state.py)."""

    swa_start: int = at_least(0, 0, STEPS)
    """Number of updates after which the parameters are averaged (swa; Polyak and Juditsky 1992,
    Merity et al. 2018, Izmailov et al. 2018); 0 turns this average off."""
    swa_lr_ratio: float | None = above_0(None)
    """Learning rate after swa_start, as a multiple of the last rate of a schedule that ends there;
    None continues the schedule to the end of training."""
    ema_decay: float = probability(0.0)
    """Decay d of the exponential moving average (ema), which is a plain average during the first
    1/(1-d) updates; 0 turns this average off."""
    use: Literal["best", "raw", "swa", "ema"] = "best"
    """Parameters to score, sample and export; best takes those with the lowest validation loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(Section, key="loss"):
    """Settings of the training loss (training/loss.py); scoring always covers every target."""

    positions: Literal["full", "half"] = "full"
    """Positions in the loss: all (full), or the most recent half (paper, section 4.2, table 6)."""
    ar: float = at_least(0, 0.0)
    """Weight of the mean square of the last layer's states (Merity et al. 2018, section 4.6)."""
    tar: float = at_least(0, 0.0)
    """Weight of the mean square of the differences between the last layer's states at neighbouring
    positions (Merity et al. 2018, section 4.6)."""
    r_drop: float = at_least(0, 0.0)
    """Weight of the Kullback-Leibler divergence between predictions with two dropout masks (Wu et
    al. 2021)."""
    past_decode: float = at_least(0, 0.0)
    """Weight of the nll of input words decoded from the predictions (Brahma 2019 uses 0.001)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilConfig(Section, key="distil"):
    """Settings of distillation from models trained on the same text (training/distil.py)."""

    teachers: tuple[str, ...] = file_path((), "must not have an empty path", all)
    """Workdirs or exported folders of the teacher models; the student learns their mean
    probabilities."""
    weight: float = setting(0.5, "must be above 0 and at most 1", lambda v: 0 < v <= 1)
    """Weight w of the cross entropy against the teachers; the text has the weight 1-w."""
    words: int = at_least(1, 32, WORDS)
    """Number of most likely words of the teachers that are kept for each token; all other words
    count as one."""


def step_range(text: str) -> tuple[int, int] | None:
    """Returns the numbers of ``START:STOP``, or ``None`` if the text is not such a range."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    found = (int(match[1]), int(match[2])) if match else None
    return found if found and found[0] < found[1] else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section, key="train"):
    """Settings of the shape, the order and the number of training steps."""

    steps: int = at_least(1, 1000, STEPS)
    """Number of updates."""
    batch_size: int = at_least(1, 16, ROWS)
    """B, the number of parallel streams over all devices."""
    seg_len: int = at_least(1, 128, LENGTH)
    """T, the number of tokens of each stream in a step."""
    mem_len: int = at_least(0, 128, LENGTH)
    """M, the number of hidden states that are carried from step to step."""
    context_len: int = at_least(0, 0, LENGTH)
    """Number of tokens before the segment that are recomputed, not scored (PyTorch's ext_len)."""
    seg_len_std: float = at_least(0, 0.0, LENGTH)
    """Standard deviation s of segment lengths, which are drawn from N(T, s), or one time in twenty
    from N(T/2, s), between 5 and T + 3s; the learning rate is proportional to the length (Merity et
    al. 2018, section 4.1); 0 makes every segment T tokens long."""
    partial_shuffle: bool = False
    """Whether every stream starts at a random place in each epoch and wraps around (NVIDIA)."""
    text_on_device: bool = False
    """Whether the whole training text is kept on the device, where batches are cut from it."""
    reset_every: int = at_least(0, 0, STEPS)
    """Number of steps after which the memory is also emptied (1000 for TF on TPU); 0 is never."""
    micro_batches: int = at_least(1, 1, ROWS)
    """Number of parts of the batch that run one after another; their gradients are summed."""
    steps_per_dispatch: int = at_least(1, 1, STEPS)
    """Number of updates in one call of the compiled program."""
    epoch_memory: Literal["reset", "carry"] = "reset"
    """Whether the memory is emptied (reset) or kept (carry) when an epoch starts."""
    log_every: int = at_least(1, 50, STEPS)
    """Number of steps between two lines of the log."""
    eval_every: int = at_least(0, 0, STEPS)
    """Number of steps between two validations; 0 validates only at the end."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Whether a loss or gradient that is not finite stops training or skips the update."""
    skip_spikes: float = setting(0.0, "must be 0 (off) or above 1", lambda v: v == 0 or v > 1)
    """Ratio of the gradient norm to the mean of recent norms above which an update is skipped; 0
    skips no updates."""
    max_skipped: int = at_least(1, 10, STEPS)
    """Number of updates skipped in a row that stops training."""
    num_seeds: int = at_least(1, 1, ITEMS)
    """Number of runs in one program, with increasing seeds, in folders seed_N."""
    wandb: str | None = setting(None, "must not be empty", str.strip)
    """Project of Weights & Biases that the run is logged to; None logs nothing there."""
    profile: str | None = free_text(None, "must be START:STOP with START below STOP", step_range)
    """Steps that are traced for xprof and TensorBoard: START+1 to STOP; None traces none."""
    start_from: str | None = file_path(None, "must name a folder", str.strip)
    """Workdir or exported folder from which fine-tuning takes the parameters at step 0."""

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """START and STOP of ``profile``, or ``None``."""
        return None if self.profile is None else step_range(self.profile)

    @property
    def longest_seg_len(self) -> int:
        """The length of the arrays of a segment, see :func:`longest_segment`."""
        return longest_segment(self.seg_len, self.seg_len_std)


def longest_segment(seg_len: int, std: float) -> int:
    """Returns the length of a segment's arrays: ``seg_len`` plus the integer part of 3 ``std``."""
    return seg_len + int(3 * std)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, key="checkpoint"):
    """Settings of saving and keeping checkpoints."""

    every: int = at_least(1, 1000, STEPS)
    """Number of steps between two checkpoints; another one is saved at the end."""
    keep_last: int = at_least(1, 2, STEPS)
    """Number of the newest checkpoints to keep."""
    keep_best: int = at_least(0, 1, STEPS)
    """Number of checkpoints with the lowest validation loss to keep."""
    tolerate_save_errors: bool = False
    """Whether a run of one process continues if a checkpoint before the last cannot be written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section, key="mesh"):
    """The number of devices on each axis of the device mesh (parallel/mesh.py)."""

    data: int = minus_1_or_count("all devices", -1, DEVICES)
    """Number of devices that split the batch; -1 takes all devices that the other axes leave."""
    fsdp: int = minus_1_or_count("chosen with data", -1, DEVICES)
    """Number of devices that split the batch, the parameters (gathered for use) and the optimizer
    state; if it and ``data`` are -1, the GPUs of a host do for layers of 32 million parameters or
    more, and the chips of a TPU slice for layers of 512 million or more."""
    tensor: int = at_least(1, 1, DEVICES)
    """Number of devices that split heads, the inner width of feed-forward layers, and words."""
