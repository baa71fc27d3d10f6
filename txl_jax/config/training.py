"""How a model is trained: every setting of it, its default, its type and its rule."""

import dataclasses
from typing import Literal

from txl_jax.config import bounds
from txl_jax.config.fields import above, at_least, local_path, probability, rule


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
      l2: times the parameters, added to the gradient after clipping (coupled: Adam scales it like
        the rest of the gradient; PyTorch's ``weight_decay`` of Adam).
      weight_decay: times the parameters and the rate, taken from them at each update (decoupled;
        Loshchilov and Hutter 2019). Both are of every parameter.
      embedding_ratio: peak rate of the embedding tables over that of the rest. ``cosine`` ends at
        the same rate for both; other schedules keep the ratio.
    """

    name: Literal["adam", "lamb"] = "adam"
    learning_rate: float = above(0, 2.5e-4)
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    warmup_steps: int = at_least(0, 0, bounds.STEPS)
    min_ratio: float = rule(0.0, "must be from 0 to 1", lambda v: 0 <= v <= 1)
    clip_norm: float = at_least(0, 0.25)
    b1: float = probability(0.9)
    b2: float = probability(0.999)
    eps: float = above(0, 1e-8)
    l2: float = at_least(0, 0.0)
    weight_decay: float = at_least(0, 0.0)
    embedding_ratio: float = above(0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """Weight averaging: averages of the parameters over updates (see training/average.py).

    Attributes:
      swa_start: n > 0: average the parameters after every update from update n+1 on (``swa``:
        Polyak and Juditsky 1992; Merity et al. 2018, section 3.1; Izmailov et al. 2018).
      swa_lr_ratio: r: the schedule ends at ``swa_start``. From there the learning rate is its last
        value times r. ``None``: the schedule continues.
      ema_decay: d > 0: an exponential moving average of all updates with decay d (``ema``). It is
        the plain average until it has 1/(1-d) updates.
      use: the parameters to score, sample from and export: ``raw``, ``swa``, ``ema``, or ``best``,
        those with the lowest validation loss at that checkpoint.
    """

    swa_start: int = at_least(0, 0, bounds.STEPS)
    swa_lr_ratio: float | None = rule(None, "must be above 0", lambda v: v is None or v > 0)
    ema_decay: float = probability(0.0)
    use: Literal["best", "raw", "swa", "ema"] = "best"


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
      r_drop: a > 0: every segment is read twice under dropout of its own, and a times the mean of
        the two Kullback-Leibler divergences of the predictions, in nats, is added to the mean of
        the two losses (Wu et al. 2021). Holds scores of all words at once, [B,T,V] twice.
      past_decode: a > 0: a times the mean nll, in nats, of the input word as decoded from the
        prediction after it is added (Brahma 2019, 0.001 there); needs ``model.past_decode``,
        whose parameters decode it. Holds scores of all words at once.
    """

    positions: Literal["full", "half"] = "full"
    ar: float = at_least(0, 0.0)
    tar: float = at_least(0, 0.0)
    r_drop: float = at_least(0, 0.0)
    past_decode: float = at_least(0, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilConfig:
    """What is learnt from models trained before, on the same text (see training/distil.py).

    Attributes:
      teachers: workdirs or exported folders; their mean probabilities are learnt from. (): none.
      weight: w: the loss is w times the cross entropy against the teachers and 1 - w times that
        against the text. Holds scores of all words at once, [B,T,V].
      words: how many of the teachers' likeliest words are kept for each token of the text; the
        rest is one more.
    """

    teachers: tuple[str, ...] = local_path((), "must not name an empty folder", all)
    weight: float = rule(0.5, "must be above 0 and at most 1", lambda v: 0 < v <= 1)
    words: int = at_least(1, 32, bounds.WORDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the training stream is cut and how long it is trained on.

    Attributes:
      steps: updates in all.
      batch_size: B, parallel streams over all devices.
      seg_len: T, tokens of each stream in a step.
      mem_len: M, hidden states carried from step to step.
      context_len: tokens before the segment that are run again with it and not scored (PT's
        ``ext_len``), gradients flowing; with memory, which then ends before them, or without.
      seg_len_std: s > 0: each segment has a length of its own, drawn from N(T, s) and one time in
        twenty from N(T/2, s), at least 5 and at most T + 3s; the rate of its update is in
        proportion (Merity et al. 2018, section 4.1). Arrays have the longest length and are padded.
      partial_shuffle: in each epoch every stream begins at a random place of its own and wraps
        around (NVIDIA).
      text_on_device: the training text lies on the device whole, and batches are cut from it there
        (data/on_device.py); for a small text and many updates a dispatch.
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
      num_seeds: R > 1: so many runs in one program, of seeds ``seed`` .. ``seed`` + R-1, each in
        a folder ``seed_N`` of the workdir (training/multi_seed.py); for models that do not fill
        their one device.
      start_from: fine-tuning: a workdir, of which the best checkpoint is taken, or an exported
        folder; parameters are its at step 0 (training/start.py). ``None``: drawn at random.
    """

    steps: int = at_least(1, 1000, bounds.STEPS)
    batch_size: int = at_least(1, 16, bounds.ROWS)
    seg_len: int = at_least(1, 128, bounds.LENGTH)
    mem_len: int = at_least(0, 128, bounds.LENGTH)
    context_len: int = at_least(0, 0, bounds.LENGTH)
    seg_len_std: float = at_least(0, 0.0, bounds.LENGTH)
    partial_shuffle: bool = False
    text_on_device: bool = False
    reset_every: int = at_least(0, 0, bounds.STEPS)
    micro_batches: int = at_least(1, 1, bounds.ROWS)
    steps_per_dispatch: int = at_least(1, 1, bounds.STEPS)
    epoch_memory: Literal["reset", "carry"] = "reset"
    log_every: int = at_least(1, 50, bounds.STEPS)
    eval_every: int = at_least(0, 0, bounds.STEPS)
    non_finite: Literal["stop", "skip"] = "stop"
    skip_spikes: float = rule(0.0, "must be 0 (off) or above 1", lambda v: v == 0 or v > 1)
    max_skipped: int = at_least(1, 10, bounds.STEPS)
    num_seeds: int = at_least(1, 1, bounds.ITEMS)
    start_from: str | None = local_path(
        None, "must name a folder", lambda v: v is None or v.strip()
    )

    @property
    def longest_seg_len(self) -> int:
        """The length of a segment's arrays, see :func:`longest_segment`."""
        return longest_segment(self.seg_len, self.seg_len_std)


DEVIATIONS = 3
"""The longest segment is so many standard deviations above T."""


def longest_segment(seg_len: int, std: float) -> int:
    """The length of the arrays: T, or with a standard deviation s the integer part of T + 3s."""
    return seg_len + int(DEVIATIONS * std)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state is saved and what is kept.

    Attributes:
      every: steps between two checkpoints; one is always saved at the end.
      keep_last, keep_best: how many of the newest and of the best by validation are kept.
      tolerate_save_errors: a checkpoint that cannot be written (a full disk) is told and training
        goes on, with one process; False: it stops training. The last one must be written anyway.
    """

    every: int = at_least(1, 1000, bounds.STEPS)
    keep_last: int = at_least(1, 2, bounds.STEPS)
    keep_best: int = at_least(0, 1, bounds.STEPS)
    tolerate_save_errors: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each axis of the device mesh has (parallel/shardings.py).

    Attributes:
      data: cuts the batch; -1: as many as there are devices for.
      fsdp: cuts the batch, and parameters and optimizer, which are gathered where they are used.
      tensor: cuts heads, the feed-forward layer's inner width, and words.
    """

    data: int = rule(
        -1, "must be -1 (all devices) or at least 1", lambda v: v == -1 or v >= 1, bounds.DEVICES
    )
    fsdp: int = at_least(1, 1, bounds.DEVICES)
    tensor: int = at_least(1, 1, bounds.DEVICES)
