"""Settings of the analyses: what a trained model is asked, not how it is trained.

Each is a section of the experiment of the mode's name; none of them touches the trained state.
"""

import dataclasses
from typing import Literal

from txl_jax.config import bounds
from txl_jax.config.fields import at_least, free_text, local_path, rule

Split = Literal["train", "valid", "test"]


def _rising(low: int, default: tuple[int, ...]):
    text = f"must be one or more lengths, rising, from at least {low}"
    holds = lambda v: bool(v) and all(a < b for a, b in zip((low - 1, *v), v, strict=False))
    return rule(default, text, holds, bounds.LENGTH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Loss against the length of the context (``--mode=context``, analysis/context.py).

    Attributes:
      split: which split; the same targets of it at every length.
      kind: ``window``: windows that know nothing of what was before them; each target sees from
        c to c + stride - 1 tokens. ``memory``: memory of c states, segments of ``stride``; cheaper
        where c is one length, and layers above the first see further. A form of attention without
        memory has windows in both.
      lengths: context lengths c in tokens, two or more.
      stride: a window begins every so many tokens; 1 is exact.
      max_tokens: so many targets from the longest length on, so that each has its whole context;
        0: to the end of the split.
      batch_size: windows at a time, or streams.
      threshold: the effective length is the shortest one from which no longer one lowers
        perplexity by this share.
    """

    split: Split = "valid"
    kind: Literal["window", "memory"] = "window"
    lengths: tuple[int, ...] = rule(
        (100, 200, 300, 400, 500, 600, 700, 800, 900),
        "must be two or more lengths, rising, from at least 1",
        lambda v: len(v) > 1 and all(a < b for a, b in zip((0, *v), v, strict=False)),
        bounds.LENGTH,
    )
    stride: int = at_least(1, 32, bounds.LENGTH)
    max_tokens: int = at_least(0, 20_000, bounds.TOKENS)
    batch_size: int = at_least(1, 4, bounds.ROWS)
    threshold: float = rule(0.01, "must be at least 0 and below 1", lambda v: 0 <= v < 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReclConfig:
    """Relative effective context length of groups (``--mode=recl``; paper, appendix C).

    Split, kind, stride and number of targets are those of ``context``. The text is that of
    ``data`` where it names one, else the models' own.

    Attributes:
      models: each ``NAME=WORKDIR`` or ``NAME=FILE.npz`` (recorded losses, analysis/recl.py);
        ``GROUP:NAME=…`` where one table has several groups.
      shares: r, the shares of hardest targets; table 8 has three.
      first: the shortest context length.
      delta: from one length to the next.
      longest: no length is above it.
      threshold: a gain below it ends the RECL.
    """

    models: tuple[str, ...] = local_path(())
    shares: tuple[float, ...] = rule(
        (0.1, 0.5, 1.0), "must each be above 0 and at most 1", lambda v: v and _shares(v)
    )
    first: int = at_least(1, 100, bounds.LENGTH)
    delta: int = at_least(1, 100, bounds.LENGTH)
    longest: int = at_least(2, 1000, bounds.LENGTH)
    threshold: float = rule(0.01, "must be above 0 and below 1", lambda v: 0 < v < 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMapsConfig:
    """Where heads look (``--mode=attention``, analysis/attention_maps.py; paper, appendix D).

    Attributes:
      split: which split is averaged over.
      seg_len, mem_len: T and M; M may be longer than in training. A model that is evaluated
        without memory is given M tokens again before each segment.
      max_tokens: so many queries, in whole segments, those with all of their memory; 0: all.
      batch_size: parallel streams.
      widest: how many heads, those of the widest span, are shown at one position.
      position: which token of the split that is, counted from 0; it is in the last place of its
        segment, with all of its memory.
    """

    split: Split = "valid"
    seg_len: int = at_least(1, 64, bounds.LENGTH)
    mem_len: int = at_least(0, 640, bounds.LENGTH)
    max_tokens: int = at_least(0, 20_000, bounds.TOKENS)
    batch_size: int = at_least(1, 1, bounds.ROWS)
    widest: int = at_least(1, 3, bounds.LENGTH)
    position: int = at_least(0, 2000, bounds.TOKENS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationConfig:
    """A table of the paper, all rows (``--mode=ablation``; tables 6, 7 and 10).

    Attributes:
      rows: which rows; (): all that the config has.
      workdirs: rows that are trained already, each ``ROW=WORKDIR``; the others are trained in
        folders of the table's workdir.
      lengths: attention lengths of evaluation; the training length is always one of them.
      split: which split chooses the best length and is scored.
      max_tokens: so many targets of it, the same for every row; 0: all.
      seeds: every row is trained with each.
    """

    rows: tuple[str, ...] = free_text(())
    workdirs: tuple[str, ...] = local_path(())
    lengths: tuple[int, ...] = _rising(1, (64, 128, 192, 256, 320, 384, 448, 512))
    split: Split = "test"
    max_tokens: int = at_least(0, 0, bounds.TOKENS)
    seeds: tuple[int, ...] = rule(
        (0,),
        "must be one or more from 0 on, none twice",
        lambda v: v and min(v) >= 0 and len(set(v)) == len(v),
        bounds.SEED,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """Any text scored (``--mode=score``, evaluation/score.py).

    Attributes:
      path: file of the text; ``-``: standard input.
      json: file to write; ``None`` or ``-``: standard output.
      memory: ``carry``: through the whole text; ``line``: every line starts with none.
      mem_len: M; of a model without memory, the tokens that are run again before a segment.
      seg_len: T.
      batch_size: lines at a time, with ``memory="line"``.
      tokens: also every token's symbol and loss.
    """

    path: str = local_path("-")
    json: str | None = local_path(None)
    memory: Literal["carry", "line"] = "carry"
    mem_len: int = at_least(1, 512, bounds.LENGTH)
    seg_len: int = at_least(1, 64, bounds.LENGTH)
    batch_size: int = at_least(1, 16, bounds.ROWS)
    tokens: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Evaluation with memory against sliding windows (``--mode=speed``; paper, table 9).

    Attributes:
      lengths: attention lengths.
      seg_len: T of evaluation with memory.
      windows: run at a time.
      rounds: each program is timed so many times, in turn.
    """

    lengths: tuple[int, ...] = _rising(2, (800, 1800, 2800, 3800))
    seg_len: int = at_least(1, 128, bounds.LENGTH)
    windows: int = at_least(1, 4, bounds.ROWS)
    rounds: int = at_least(1, 3, bounds.LENGTH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """How far back a model finds an answer (``--mode=probe``, analysis/probe.py).

    Attributes:
      distances: from an answer back to what it repeats, in tokens.
      mem_lens: memory lengths of evaluation; (): that of training and 0.
      answers: scored at each distance.
      seed: of the text that is asked.
    """

    distances: tuple[int, ...] = _rising(2, (8, 16, 32, 64, 128, 256))
    mem_lens: tuple[int, ...] = rule(
        (),
        "must be lengths, rising, from at least 0",
        lambda v: all(a < b for a, b in zip((-1, *v), v, strict=False)),
        bounds.LENGTH,
    )
    answers: int = at_least(1, 200, bounds.ROWS)
    seed: int = at_least(0, 1, bounds.SEED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The page of a run (``--mode=report``, analysis/report_page.py).

    Attributes:
      workdirs: other runs that are compared on it.
      title: of the page; "": the experiment's name.
    """

    workdirs: tuple[str, ...] = local_path(())
    title: str = free_text("")


def _shares(values) -> bool:
    return all(0 < v <= 1 for v in values)
