"""The settings of every analysis, and a table of the analyses.

No analysis changes a trained model. :class:`Analyses` is the table. The command, its help, the list
of files in a workdir and the report page read the table. An analysis, its section of settings and
its mode have the same name.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

from txl_jax.config.bounds import ITEMS, LENGTH, ROWS, SEED, TOKENS
from txl_jax.config.evaluation import Split
from txl_jax.config.fields import (
    Section,
    at_least,
    file_path,
    free_text,
    named_values,
    rising,
    setting,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextConfig(Section, key="context"):
    """Settings of loss against context length (``--mode=context``, analysis/context.py)."""

    split: Split = "valid"
    """Split whose targets are scored; the targets are the same at every length."""
    kind: Literal["window", "memory"] = "window"
    """How the context is limited: window lets each target see c to c + stride - 1 tokens, and
    memory keeps c states for segments of stride tokens, which is cheaper but lets layers above the
    first see further back (models without memory always use window)."""
    lengths: tuple[int, ...] = rising(1, tuple(range(100, 1000, 100)), LENGTH, count=2)
    """Context lengths c in tokens."""
    stride: int = at_least(1, 32, LENGTH)
    """Number of tokens from one window to the next; 1 gives every target exactly c tokens."""
    max_tokens: int = at_least(0, 20_000, TOKENS)
    """Number of targets, each with the longest context; 0 scores all up to the end of the split."""
    batch_size: int = at_least(1, 4, ROWS)
    """Number of windows or streams that are computed together."""
    threshold: float = setting(0.01, "must be at least 0 and below 1", lambda v: 0 <= v < 1)
    """Contexts longer than the effective length lower perplexity by less than this fraction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReclConfig(Section, key="recl"):
    """Settings of relative effective context length (``--mode=recl``; paper, appendix C).

    The section ``context`` gives the split, the kind, the stride and the number of targets. The
    text is that of the section ``data`` if it names one, and otherwise that of the models.
    """

    models: tuple[str, ...] = file_path((), named=True)
    """Models, each as NAME=WORKDIR or NAME=FILE.npz (recorded losses), or with a group as
    GROUP:NAME=…."""
    shares: tuple[float, ...] = setting(
        (0.1, 0.5, 1.0),
        "must be one or more numbers above 0 and at most 1",
        lambda v: v and all(0 < r <= 1 for r in v),
    )
    """Values of r, the fraction of the hardest targets (paper, table 8)."""
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
    """Settings of attention maps (``--mode=attention``; paper, appendix D)."""

    split: Split = "valid"
    """Split over which attention is averaged."""
    seg_len: int = at_least(1, 64, LENGTH)
    """T, the number of tokens of a segment."""
    mem_len: int = at_least(0, 640, LENGTH)
    """M, the memory length; models without memory recompute M tokens before each segment."""
    max_tokens: int = at_least(0, 20_000, TOKENS)
    """Number of queries, in whole segments with a full memory; 0 takes all queries."""
    batch_size: int = at_least(1, 1, ROWS)
    """Number of parallel streams."""
    widest: int = at_least(1, 3, LENGTH)
    """Number of heads to show at one position, which are those with the widest attention."""
    position: int = at_least(0, 2000, TOKENS)
    """Token of the split, counted from 0, at which heads are shown; its segment ends with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationConfig(Section, key="ablation"):
    """Settings of the ablation tables of the paper (``--mode=ablation``; tables 6, 7 and 10)."""

    rows: tuple[str, ...] = free_text(())
    """Rows to train and score; an empty list takes all rows of the config."""
    workdirs: tuple[str, ...] = file_path((), named=True)
    """Rows that are already trained, as ROW=WORKDIR; other rows are trained in the workdir."""
    lengths: tuple[int, ...] = rising(1, tuple(range(64, 513, 64)), LENGTH)
    """Attention lengths of evaluation; the training length is always added."""
    split: Split = "test"
    """Split that is scored and on which the best length is chosen."""
    max_tokens: int = at_least(0, 0, TOKENS)
    """Number of targets, the same for every row; 0 scores all targets."""
    seeds: tuple[int, ...] = setting(
        (0,),
        "must be one or more different numbers from 0 on",
        lambda v: v and min(v) >= 0 and len(set(v)) == len(v),
        SEED,
    )
    """Seeds with which every row is trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig(Section, key="sweep"):
    """Settings of training a grid of settings (``--mode=sweep``, analysis/sweep.py)."""

    grid: dict[str, Any] = named_values()  # noqa: RUF009
    """Values of each setting of the grid, sweep.grid.KEY=VALUE,VALUE."""
    seeds: int = at_least(1, 1, ITEMS)
    """Number of seeds for each combination: seed, seed + 1 and so on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreConfig(Section, key="score"):
    """Settings of scoring any text (``--mode=score``, evaluation/any_text.py)."""

    path: str = file_path("-")
    """File with the text to score; '-' reads standard input."""
    json: str | None = file_path(None, remote=False)
    """File to write the losses to; None or '-' writes to standard output."""
    memory: Literal["carry", "line"] = "carry"
    """Whether memory is carried through the whole text (carry) or emptied at each line (line)."""
    mem_len: int = at_least(1, 512, LENGTH)
    """M, the memory length; models without memory recompute M tokens before each segment."""
    seg_len: int = at_least(1, 64, LENGTH)
    """T, the number of tokens of a segment."""
    batch_size: int = at_least(1, 16, ROWS)
    """Number of lines that are scored together with memory='line'."""
    tokens: bool = True
    """Whether the symbol and the loss of every token are also written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedConfig(Section, key="speed"):
    """Settings of timing memory against sliding windows (``--mode=speed``; paper, table 9)."""

    lengths: tuple[int, ...] = rising(2, (800, 1800, 2800, 3800), LENGTH)
    """Attention lengths at which evaluation is timed."""
    seg_len: int = at_least(1, 128, LENGTH)
    """T, the number of tokens of a segment, for evaluation with memory."""
    windows: int = at_least(1, 4, ROWS)
    """Number of sliding windows that are computed together."""
    rounds: int = at_least(1, 3, LENGTH)
    """Number of timings of each program; the programs take turns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig(Section, key="probe"):
    """Settings of measuring how far back a model finds an answer (``--mode=probe``)."""

    distances: tuple[int, ...] = rising(2, (8, 16, 32, 64, 128, 256), LENGTH)
    """Distances from an answer back to the symbol that it repeats, in tokens."""
    mem_lens: tuple[int, ...] = rising(0, (), LENGTH, count=0)
    """Memory lengths of evaluation; an empty list takes that of training and 0."""
    answers: int = at_least(1, 200, ROWS)
    """Number of answers that are scored at each distance."""
    seed: int = at_least(0, 1, SEED)
    """Seed of the text that is scored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig(Section, key="report"):
    """Settings of the page about a run (``--mode=report``, analysis/report_page.py)."""

    workdirs: tuple[str, ...] = file_path(())
    """Workdirs of other runs to compare on the page."""
    title: str = free_text("")
    """Title of the page; an empty title takes the experiment's name."""


class Analysis(NamedTuple):
    """The row of an analysis in the table :class:`Analyses`."""

    about: str  # what the mode does, for the help
    files: tuple[str, ...]  # the results in the workdir; their names begin with that of the mode
    page: tuple[str, str] | None = None  # heading and caption of its section on the report page
    reads: Literal["model", "runs", "config"] = "model"  # its input; settings name the runs
    sections: tuple[str, ...] = ()  # other sections of settings that the mode reads
    module: str = ""  # the module in txl_jax/analysis with ``run``, if its name is not the mode's


def row(section: type[Section], *values: Any, **more: Any) -> Any:
    """Declares a field for an analysis: its section of settings, and its :class:`Analysis`."""
    metadata = {"analysis": Analysis(*values, **more)}
    return dataclasses.field(default_factory=section, metadata=metadata)


def _figures(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{ending}" for name in names for ending in ("png", "svg"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analyses(Section):
    """The sections of settings of all analyses, each with its row, and the section ``score``."""

    context: ContextConfig = row(
        ContextConfig,
        "measures the loss at every length of context, and the effective length",
        ("context_losses.npz", "context.json", "context.csv", *_figures("context")),
        ("Loss and context", "The loss against the length of the context."),
        sections=("evaluate",),
    )
    recl: ReclConfig = row(
        ReclConfig,
        "compares the relative effective context length of several models",
        ("recl.json", "recl.csv", "recl_gains.csv", *_figures("recl", "recl_loss")),
        ("Relative effective context length", "Paper, appendix C."),
        reads="runs",
        sections=("context",),
        module="recl_table",
    )
    attention: AttentionMapsConfig = row(
        AttentionMapsConfig,
        "draws how far heads attend, and what the four terms of attention add",
        (
            *("attention.json", "attention.csv", "attention.npz"),
            *_figures("attention", "attention_heads", "attention_terms"),
        ),
        ("Attention of the heads", "Attention by distance; paper, appendix D."),
        module="attention_maps",
    )
    ablation: AblationConfig = row(
        AblationConfig,
        "trains and compares the rows of a table",
        ("ablation.json", "ablation.csv", *_figures("ablation")),
        ("Table of rows", "The loss of every row at every attention length, best marked."),
        reads="config",
    )
    sweep: SweepConfig = row(
        SweepConfig,
        "trains a grid of settings with several seeds, each run resumable, and names the best",
        ("sweep.json", "sweep.csv", *_figures("sweep")),
        ("Sweep", "The validation loss of every combination and seed, and the means."),
        reads="config",
    )
    speed: SpeedConfig = row(
        SpeedConfig,
        "times evaluation with memory against sliding windows",
        ("speed.json",),
        ("Speed of evaluation", "With memory and with sliding windows; paper, table 9."),
    )
    score: ScoreConfig = dataclasses.field(default_factory=ScoreConfig)
    probe: ProbeConfig = row(
        ProbeConfig,
        "measures how far back a model remembers a token exactly",
        ("probe.json", "probe.csv", *_figures("probe")),
        ("Long-range probe", "The distances at which the model finds an answer."),
    )
    report: ReportConfig = row(
        ReportConfig,
        "writes one page about a run, or a comparison of several",
        ("report.html",),
        reads="runs",
        module="report_page",
    )


ANALYSES: dict[str, Analysis] = {
    one.name: one.metadata["analysis"] for one in dataclasses.fields(Analyses) if one.metadata
}
"""The row of every analysis, by the name of its mode."""
