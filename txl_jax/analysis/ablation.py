"""A table of the paper, row by row: trained, evaluated over attention lengths, compared.

    python -m txl_jax.main --mode=ablation --config=configs/table6.py --workdir=runs/table6

Rows are the config's ``ROWS``. Each is trained in ``workdir/ROW`` where it is not yet; a run that
was stopped goes on. Then every row is scored at each attention length: a model that was trained
with memory by so long a memory, another by so much recomputed context less a segment.

    workdir/
      ROW/            a run like any other; ROW-seed1 with several seeds
      ablation.json   ablation.csv  ablation.png  ablation.svg
"""

import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from txl_jax.analysis import pictures
from txl_jax.checkpoint.errors import CheckpointError, WorkdirError
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.trained_model import TrainedModel, parameter_count
from txl_jax.config import (
    AblationConfig,
    DataConfig,
    ExperimentConfig,
    ProtocolConfig,
    config_rows,
    load_config,
    override,
)
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.data.sentences import Sentences, ordered_streams
from txl_jax.evaluation.errors import AnalysisError
from txl_jax.evaluation.evaluate import Evaluator
from txl_jax.evaluation.report import segment_bar
from txl_jax.files import write_csv, write_json
from txl_jax.parallel import processes
from txl_jax.parallel.shardings import make_mesh
from txl_jax.training.setup import check_evaluation_memory
from txl_jax.units import UNIT_NAMES, Unit, format_value, in_unit

Train = Callable[[ExperimentConfig, str], int]
"""Trains an experiment in a workdir, from where it is; the exit code, not 0 if it was stopped."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of a row: the row's name, its experiment, its folder, and if that was named."""

    row: str
    exp: ExperimentConfig
    workdir: str
    given: bool = False


def run(config: str, overrides: Mapping[str, str], workdir: str, train: Train) -> int:
    """Trains what is not trained, scores everything, prints and writes the table; the exit code."""
    runs = runs_of(config, overrides, workdir)
    c = runs[0].exp.ablation
    for one in runs:  # what cannot be is refused before hours of training, not after
        check_size(one.exp, lengths_of(one.exp, c.lengths)[1])
    texts = {one.exp.data.name: one.row for one in runs}
    if len(texts) > 1:
        raise AnalysisError(
            f"rows of different texts ({', '.join(texts)}) make no table; name those of one with"
            " --config.ablation.rows=ROW,ROW"
        )
    check_split([one for one in runs if not one.given], c)
    for one in runs:
        if not is_finished(one):
            code = train(one.exp, one.workdir)
            if code:
                return code
    rows = []
    for one in runs:
        rows.append(scored(one, c))
        tell(rows[-1])
    if processes.is_process_zero():
        table = summed_up(rows)
        write(table, rows, workdir, os.path.basename(config.partition(":")[0]), c)
    return 0


def runs_of(config: str, overrides: Mapping[str, str], workdir: str) -> list[Run]:
    """Every row of the config that is asked for, with every seed.

    Raises:
      AnalysisError: the config has no rows, or not these.
      ConfigError: a row's settings cannot be used.
    """
    file, _, variant = config.partition(":")
    first = load_config(config, overrides)
    c = first.ablation
    all_rows = config_rows(file)
    if not all_rows:
        raise AnalysisError(f"--config={config}: has no rows; name a table, configs/table6.py")
    if variant not in ("", "smoke"):
        raise AnalysisError(
            f"--config={config}: name the table without a row, and --config.ablation.rows=ROW,ROW"
        )
    given = dict(_row_and_folder(text) for text in c.workdirs)
    for row in (*c.rows, *given):
        if row not in all_rows:
            raise AnalysisError(f"there is no row {row!r}; rows: {', '.join(all_rows)}")
    runs = []
    for row in c.rows or all_rows:
        name = "-".join(filter(None, (row, variant)))
        exp = load_config(f"{file}:{name}", overrides)
        for seed in c.seeds:
            folder = os.path.join(workdir, row if c.seeds == (0,) else f"{row}-seed{seed}")
            seeded = override(exp, {"seed": seed, "generate.length": 0})
            runs.append(Run(row, seeded, folder))
        if row in given:  # in place of the row's first seed; its own is what its config says
            theirs = {"seed": load(given[row]).config.seed}
            runs[-len(c.seeds)] = Run(row, override(exp, theirs), given[row], given=True)
    return runs


def check_split(runs: list[Run], c: AblationConfig) -> None:
    """Raises DataError where the split is too short for the streams of a row's evaluation."""
    corpora: dict[DataConfig, Corpus] = {}
    for one in runs:
        data, p = one.exp.data, one.exp.evaluate
        if data not in corpora:
            corpora[data] = processes.process_zero_first(lambda: corpus_from_config(data))  # noqa: B023
        split = first_targets(getattr(corpora[data], c.split), c.max_tokens)
        name = f"{one.row}: the {c.split} split"
        ordered_streams(split, p.batch_size, p.seg_len, name=name)
        if p.dynamic.rule == "rms":
            ordered_streams(corpora[data].train, p.batch_size, p.seg_len, name="the train split")


def is_finished(one: Run) -> bool:
    """Whether the run's last step is saved; one that was named is taken as it is."""
    if one.given:
        return True
    try:
        return load(one.workdir, "latest").step >= one.exp.train.steps
    except (WorkdirError, CheckpointError):
        return False


def scored(one: Run, c: AblationConfig) -> dict[str, Any]:
    """The loss of a run at each attention length."""
    trained = load(one.workdir)
    corpus = processes.process_zero_first(lambda: corpus_from_config(one.exp.data, trained.vocab))
    train_len, lengths = lengths_of(one.exp, c.lengths)
    losses = {}
    for length in lengths:
        protocol = at_length(one.exp, length)
        protocol = dataclasses.replace(protocol, split=c.split, max_segments=0)
        tokens = first_targets(getattr(corpus, c.split), c.max_tokens)
        what = f"{one.row}, length {length}"
        losses[length] = loss_of(trained, protocol, tokens, what, corpus.train)
    unit = corpus.vocab.unit
    return {
        "row": one.row,
        "seed": one.exp.seed,
        "step": trained.step,
        "parameters": parameter_count(trained.params),
        "unit": unit,
        "text": corpus.info["label"],
        "train_length": train_len,
        "lengths": list(losses),
        "losses": list(losses.values()),
        "values": [in_unit(loss, unit) for loss in losses.values()],
    }


def lengths_of(exp: ExperimentConfig, lengths: tuple[int, ...]) -> tuple[int, list[int]]:
    """The attention length of training, M or T, and all that are evaluated, it among them."""
    train_len = exp.train.mem_len or exp.train.seg_len
    asked = sorted({train_len, *lengths})
    if exp.model.attention == "absolute_per_layer":  # its table of positions ends
        asked = [length for length in asked if length <= (exp.model.n_positions or 0)]
    shortest = 1 if exp.train.mem_len else exp.evaluate.seg_len
    if asked[0] < shortest:
        raise AnalysisError(
            f"config key ablation.lengths: {asked[0]} is less than a segment of evaluation"
            f" ({exp.name}: evaluate.seg_len = {shortest}), which a model without memory attends"
            " within"
        )
    return train_len, asked


def check_size(exp: ExperimentConfig, lengths: list[int]) -> None:
    """Raises ConfigError where evaluation at the longest length does not fit the memory."""
    exp = dataclasses.replace(exp, evaluate=at_length(exp, lengths[-1]))
    check_evaluation_memory(exp, f"evaluation at ablation.lengths {lengths[-1]}")


def at_length(exp: ExperimentConfig, length: int) -> ProtocolConfig:
    """The run's protocol with this attention length, by memory or by recomputed context."""
    p = exp.evaluate
    if exp.train.mem_len:
        return dataclasses.replace(p, mem_len=length, context_len=0)
    context_len = length - p.seg_len
    return dataclasses.replace(
        p, mem_len=0, context_len=context_len, same_length=False, warm_start=0
    )


def first_targets(split: np.ndarray | Sentences, n: int) -> np.ndarray | Sentences:
    """The beginning of a split: n targets, or as many whole sentences as have no more; 0: all.

    Rows whose segments differ are compared on the same targets.
    """
    if not n:
        return split
    if isinstance(split, Sentences):
        ends = split.offsets[1:] - split.offsets[0]
        count = max(1, int(np.searchsorted(ends, n, side="right")))
        return Sentences(split.tokens, split.offsets[: count + 1])
    return split[: n + 1]


def loss_of(
    trained: TrainedModel,
    protocol: ProtocolConfig,
    tokens: np.ndarray | Sentences,
    what: str,
    training: np.ndarray | Sentences,
) -> float:
    """Nats per target under a protocol; ``training``: see :class:`Evaluator`."""
    model = trained.config.model
    mesh = make_mesh(trained.config.mesh, model, trained.config.train.batch_size)
    with segment_bar(what) as progress:
        evaluator = Evaluator(model, protocol, tokens, mesh, what, training)
        score = evaluator.run(trained.params, progress=progress)
    assert score is not None
    return score.loss


def best_of(lengths: list[int], values: list[float], unit: Unit) -> tuple[float, int]:
    """The best value, and the shortest length that gives it to the decimals that are shown."""
    best = min(values)
    shown = format_value(best, unit)
    pairs = zip(lengths, values, strict=True)
    return best, next(length for length, value in pairs if format_value(value, unit) == shown)


def summed_up(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each row: the values at the training length and at the best, over its seeds.

    ``init``, ``best``: means; ``spread``: the largest less the least ``best``; ``length``: the
    best of the mean curve.
    """
    table = []
    for name in dict.fromkeys(row["row"] for row in rows):
        same = [row for row in rows if row["row"] == name]
        first, unit = same[0], same[0]["unit"]
        curve = [statistics.fmean(v) for v in zip(*(r["values"] for r in same), strict=True)]
        best, length = best_of(first["lengths"], curve, unit)
        bests = [min(row["values"]) for row in same]
        table.append(
            {
                "row": name,
                "parameters": first["parameters"],
                "seeds": len(same),
                "train_length": first["train_length"],
                "init": curve[first["lengths"].index(first["train_length"])],
                "best": best,
                "length": length,
                "spread": max(bests) - min(bests),
                "unit": unit,
                "curve": curve,
                "lengths": first["lengths"],
            }
        )
    return table


def tell(row: dict[str, Any]) -> None:
    """One run's curve as a line."""
    if processes.is_process_zero():
        unit = row["unit"]
        pairs = zip(row["lengths"], row["values"], strict=True)
        curve = "  ".join(f"{length}: {format_value(value, unit)}" for length, value in pairs)
        print(f"{row['row']} (seed {row['seed']}), {unit} at length  {curve}", flush=True)


def write(table, rows, workdir: str, name: str, c: AblationConfig) -> None:
    """The table on the screen, as JSON and CSV, and the curves as a picture."""
    unit: Unit = table[0]["unit"]
    width = max(len(row["row"]) for row in table)
    print(f"{'':<{width}}  parameters  seeds  {unit} init (length)      best  shortest length")
    for row in table:
        init = f"{format_value(row['init'], unit)} ({row['train_length']})"
        print(
            f"{row['row']:<{width}}  {row['parameters']:>10,}  {row['seeds']:>5}  {init:>15}"
            f"  {format_value(row['best'], unit):>12}  {row['length']:>15}"
        )
    about = {"table": name, "split": c.split, "max_tokens": c.max_tokens}
    write_json(os.path.join(workdir, "ablation.json"), {**about, "table": table, "runs": rows})
    figures = [
        {"row": row["row"], "seed": row["seed"], "length": length, "loss_nats": loss, unit: value}
        for row in rows
        for length, loss, value in zip(row["lengths"], row["losses"], row["values"], strict=True)
    ]
    write_csv(os.path.join(workdir, "ablation.csv"), figures)
    draw(table, rows, workdir, f"{name}, {rows[0]['text']}, {c.split} split")


def draw(table, rows, workdir: str, title: str) -> None:
    """The value over the attention length of every row; a thin line for each seed, star: best."""
    unit: Unit = table[0]["unit"]
    figure = pictures.new_figure()
    axes = figure.add_subplot()
    for n, row in enumerate(table):
        colour = f"C{n % 10}"
        for one in rows:
            if one["row"] == row["row"] and row["seeds"] > 1:
                axes.plot(one["lengths"], one["values"], color=colour, linewidth=0.5, alpha=0.6)
        axes.plot(row["lengths"], row["curve"], ".-", color=colour, label=row["row"])
        axes.plot(row["length"], row["best"], "*", color=colour, markersize=11)
    axes.set_xlabel("attention length in evaluation (tokens)")
    axes.set_ylabel(f"{UNIT_NAMES[unit]} ({unit})")
    axes.set_title(f"{title}\nloss over attention length, best marked")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    pictures.save(figure, workdir, "ablation")


def _row_and_folder(text: str) -> tuple[str, str]:
    row, equals, folder = text.partition("=")
    if not equals or not folder:
        raise AnalysisError(f"config key ablation.workdirs: {text!r} must be ROW=WORKDIR")
    return row, folder
