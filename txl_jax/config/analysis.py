"""Settings of the analyses of a trained model; none of them changes the trained state.

Each section has the name of its mode.
"""

import dataclasses
from typing import Literal

from txl_jax.config.bounds import LENGTH, ROWS, SEED, TOKENS
from txl_jax.config.evaluation import Split
from txl_jax.config.fields import Section, at_least, free_text, local_path, rising, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextConfig(Section, key="context"):
    """Loss against context length (``--mode=context``, analysis/context.py)."""

    split: Split = "valid"
    """Split whose targets are scored, the same at every length."""
    kind: Literal["window", "memory"] = "window"
    """window: each target sees from c to c + stride - 1 tokens; memory: memory of c states and
    segments of stride, which is cheaper, but layers above the first see further (models without
    memory always use windows)."""
    lengths: tuple[int, ...] = rising(1, tuple(range(100, 1000, 100)), LENGTH, count=2)
    """Context lengths c in tokens."""
    stride: int = at_least(1, 32, LENGTH)
    """Tokens from one window to the next; 1 is exact."""
    max_tokens: int = at_least(0, 20_000, TOKENS)
    """Number of targets, each with the longest context; 0: to the end of the split."""
    batch_size: int = at_least(1, 4, ROWS)
    """Windows or streams computed together."""
    threshold: float = setting(0.01, "must be at least 0 and below 1", lambda v: 0 <= v < 1)
    """Longer contexts than the effective length lower perplexity by less than this fraction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReclConfig(Section, key="recl"):
    """Relative effective context length of groups (``--mode=recl``; paper, appendix C).

    Split, kind, stride and number of targets are those of ``context``. The text is that of ``data``
    if it names one, else that of the models.
    """

    models: tuple[str, ...] = local_path(())
    """NAME=WORKDIR, NAME=FILE.npz (recorded losses) or GROUP:NAME=… for several groups."""
    shares: tuple[float, ...] = setting(
        (0.1, 0.5, 1.0),
        "must each be above 0 and at most 1",
        lambda v: v and all(0 < r <= 1 for r in v),
    )
    """r, the fractions of hardest targets (paper, table 8)."""
    first: int = at_least(1, 100, LENGTH)
    """Shortest context length."""
    delta: int = at_least(1, 100, LENGTH)
    """Difference between two context lengths."""
    longest: int = at_least(2, 1000, LENGTH)
    """Upper limit of the context lengths."""
    threshold: float = setting(0.01, "must be above 0 and below 1", lambda v: 0 < v < 1)
    """Relative gain below which a longer context no longer counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMapsConfig(Section, key="attention"):
    """Attention maps (``--mode=attention``, analysis/attention_maps.py; paper, appendix D)."""

    split: Split = "valid"
    """Split that attention is averaged over."""
    seg_len: int = at_least(1, 64, LENGTH)
    """T, tokens of a segment."""
    mem_len: int = at_least(0, 640, LENGTH)
    """M of any length; models evaluated without memory recompute M tokens before a segment."""
    max_tokens: int = at_least(0, 20_000, TOKENS)
    """Number of queries, in whole segments with full memory; 0: all."""
    batch_size: int = at_least(1, 1, ROWS)
    """Parallel streams."""
    widest: int = at_least(1, 3, LENGTH)
    """Number of heads, those with the widest attention, shown at one position."""
    position: int = at_least(0, 2000, TOKENS)
    """That position: a token of the split, from 0, the last of its segment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationConfig(Section, key="ablation"):
    """All rows of a table of the paper (``--mode=ablation``; tables 6, 7 and 10)."""

    rows: tuple[str, ...] = free_text(())
    """Rows to train and score; none: all of the config."""
    workdirs: tuple[str, ...] = local_path(())
    """Rows that are trained already, each ROW=WORKDIR; others are trained in the workdir."""
    lengths: tuple[int, ...] = rising(1, tuple(range(64, 513, 64)), LENGTH)
    """Attention lengths of evaluation; the training length is always added."""
    split: Split = "test"
    """Split that is scored and that chooses the best length."""
    max_tokens: int = at_least(0, 0, TOKENS)
    """Number of targets, the same for every row; 0: all."""
    seeds: tuple[int, ...] = setting(
        (0,),
        "must be one or more from 0 on, none twice",
        lambda v: v and min(v) >= 0 and len(set(v)) == len(v),
        SEED,
    )
    """Seeds that every row is trained with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreConfig(Section, key="score"):
    """Scoring of any text (``--mode=score``, evaluation/score.py)."""

    path: str = local_path("-")
    """File of the text; '-': standard input."""
    json: str | None = local_path(None)
    """File to write; None or '-': standard output."""
    memory: Literal["carry", "line"] = "carry"
    """Carry memory through the whole text, or start every line without memory."""
    mem_len: int = at_least(1, 512, LENGTH)
    """M; models without memory recompute M tokens before each segment."""
    seg_len: int = at_least(1, 64, LENGTH)
    """T, tokens of a segment."""
    batch_size: int = at_least(1, 16, ROWS)
    """Lines scored together with memory='line'."""
    tokens: bool = True
    """Also write the symbol and loss of every token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedConfig(Section, key="speed"):
    """Evaluation with memory against sliding windows (``--mode=speed``; paper, table 9)."""

    lengths: tuple[int, ...] = rising(2, (800, 1800, 2800, 3800), LENGTH)
    """Attention lengths."""
    seg_len: int = at_least(1, 128, LENGTH)
    """T of evaluation with memory."""
    windows: int = at_least(1, 4, ROWS)
    """Windows computed together."""
    rounds: int = at_least(1, 3, LENGTH)
    """Timings of each program, in turn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig(Section, key="probe"):
    """How far back a model finds an answer (``--mode=probe``, analysis/probe.py)."""

    distances: tuple[int, ...] = rising(2, (8, 16, 32, 64, 128, 256), LENGTH)
    """Tokens from an answer back to what it repeats."""
    mem_lens: tuple[int, ...] = rising(0, (), LENGTH, count=0)
    """Memory lengths of evaluation; none: that of training and 0."""
    answers: int = at_least(1, 200, ROWS)
    """Answers scored at each distance."""
    seed: int = at_least(0, 1, SEED)
    """Seed of the text that is scored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig(Section, key="report"):
    """The page of a run (``--mode=report``, analysis/report_page.py)."""

    workdirs: tuple[str, ...] = local_path(())
    """Other runs to compare on the page."""
    title: str = free_text("")
    """Title of the page; none: the experiment's name."""
