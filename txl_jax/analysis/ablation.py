"""Reproduces a table of the paper: trains its rows, and scores them at several attention lengths.

    python -m txl_jax.main --mode=ablation --config=configs/table6.py --workdir=runs/table6

The rows are the config's ``ROWS``. A row is trained or resumed in ``workdir/ROW`` (``ROW-seed1``
with several seeds), and scored at each attention length. If a model was trained with memory, the
attention length is its memory length. For other models, it is the segment's length with context.
"""

import dataclasses
import functools
import itertools
import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from txl_jax.analysis.results import AnalysisError, new_figure, show_share, write_results
from txl_jax.analysis.sweep import train_run
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.trained_model import parameter_count
from txl_jax.checkpoint.workdir_files import CONFIG, check_unused, register_outputs
from txl_jax.config import (
    AblationConfig,
    ExperimentConfig,
    ProtocolConfig,
    config_rows,
    load_config,
    override,
)
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.pieces import Pieces, Split
from txl_jax.data.streams import ordered_streams
from txl_jax.evaluation.evaluator import Evaluator, segment_bar
from txl_jax.messages import argument
from txl_jax.model.precision import arithmetic_record
from txl_jax.parallel import processes
from txl_jax.parallel.device_memory import Work
from txl_jax.parallel.mesh import scoring_mesh
from txl_jax.parallel.processes import print_once
from txl_jax.paths import path
from txl_jax.training.plan import check_evaluation_memory, locked_workdirs, plan_run
from txl_jax.training.run import is_trained
from txl_jax.units import UNIT_NAMES, Unit, format_value, in_unit


@dataclasses.dataclass(frozen=True)
class RowRun:
    """The run of a table's row with one seed. If ``given``, the config names its trained model."""

    row: str
    exp: ExperimentConfig
    workdir: str
    given: bool = False


def run(
    config: str,
    overrides: Mapping[str, str],
    workdir: str,
    train: Callable[[ExperimentConfig, str], None] = train_run,
) -> None:
    """Trains unfinished rows with ``train``, scores all rows, and writes the table."""
    processes.on_process_zero(lambda: check_unused(workdir, "ablation"))
    runs = table_runs(config, overrides, workdir)
    c = runs[0].exp.ablation
    check_runs(runs, c)
    processes.on_process_zero(lambda: register_outputs(workdir, "ablation"))
    trained = lambda one: one.given or is_trained(one.exp, one.workdir)
    left = processes.on_process_zero(lambda: [not trained(one) for one in runs])
    for one in itertools.compress(runs, left):
        train(one.exp, one.workdir)
    rows = [score_row(one, c) for one in runs]
    if processes.is_process_zero():
        table, unit, name = summarize(rows), rows[0]["unit"], os.path.basename(config.split(":")[0])
        title, text = f"{name}, {rows[0]['text']}, {c.split} split", _text(table, unit)
        about = {"table": name, "split": c.split, "max_tokens": c.max_tokens}
        files = {
            "ablation.json": {**about, "table": table, "runs": rows},
            "ablation.csv": [
                {"row": r["row"], "seed": r["seed"], "length": n, "loss_nats": nats, unit: value}
                for r in rows
                for n, nats, value in zip(r["lengths"], r["losses"], r["values"], strict=True)
            ],
            "ablation": lambda: _figure(table, rows, title),
        }
        write_results(workdir, text, files)
        print(text)


def table_runs(config: str, overrides: Mapping[str, str], workdir: str) -> list[RowRun]:
    """Returns a run for every selected row and seed. Raises AnalysisError if a row is missing."""
    file, _, variant = config.partition(":")
    c = load_config(config, overrides).ablation
    all_rows = config_rows(file)
    named = argument("config", config)
    if not all_rows:
        raise AnalysisError(f"{named}: has no rows; name a table, such as configs/table6.py")
    if variant not in ("", "smoke"):
        select = argument("config.ablation.rows", "ROW,ROW")
        raise AnalysisError(f"{named}: name the table without a row; select rows with {select}")
    given = {}
    for text in c.workdirs:
        row, _, given[row] = text.partition("=")
        if not given[row]:
            raise AnalysisError(f"config key ablation.workdirs: {text!r} must be ROW=WORKDIR")
    for key, rows in (("rows", c.rows), ("workdirs", given)):
        if unknown := [row for row in rows if row not in all_rows]:
            raise AnalysisError(
                f"config key ablation.{key}: there is no row {unknown[0]!r}; the rows are"
                f" {', '.join(all_rows)}"
            )
    runs = []
    for row in c.rows or all_rows:
        exp = load_config(f"{file}:{'-'.join(filter(None, (row, variant)))}", overrides)
        exp = override(exp, {"generate.length": 0})
        for seed in c.seeds:
            name = row if c.seeds == (0,) else f"{row}-seed{seed}"
            runs.append(RowRun(row, override(exp, {"seed": seed}), os.path.join(workdir, name)))
        if row in given:  # the given workdir replaces the run with the first seed
            first = override(exp, {"seed": load(given[row]).config.seed})
            runs[-len(c.seeds)] = RowRun(row, first, given[row], given=True)
    return runs


def check_runs(runs: list[RowRun], c: AblationConfig) -> None:
    """Checks all runs before hours of training.

    Raises ConfigError if evaluation at the longest length exceeds the memory of the devices,
    AnalysisError for rows of different texts, DataError if the split is too short for the streams
    of a row, and AnotherRunError if the folder of a row has a run with other settings.
    """
    for one in runs:
        longest = attention_lengths(one.exp, c.lengths)[1][-1]
        exp = dataclasses.replace(one.exp, evaluate=protocol_at_length(one.exp, longest))
        name = f"evaluation at ablation.lengths {longest}"
        check_evaluation_memory(exp, Work.sized_by(name, "ablation.lengths", "evaluate.batch_size"))
    texts = {one.exp.data.name: one.row for one in runs}
    if len(texts) > 1:
        raise AnalysisError(
            f"rows of different texts ({', '.join(texts)}) cannot be compared; select rows of one"
            f" text with {argument('config.ablation.rows', 'ROW,ROW')}"
        )
    load_once = functools.cache(corpus_from_config)
    for one in (one for one in runs if not one.given):
        corpus = processes.process_zero_first(functools.partial(load_once, one.exp.data))
        p, split = one.exp.evaluate, first_targets(getattr(corpus, c.split), c.max_tokens)
        ordered_streams(split, p.batch_size, p.seg_len, name=f"{one.row}: the {c.split} split")
        if p.dynamic.rule == "rms":
            ordered_streams(corpus.train, p.batch_size, p.seg_len, name="the train split")
        if path(one.workdir, CONFIG).exists():
            with locked_workdirs(plan_run(one.exp, one.workdir)):
                pass


def score_row(one: RowRun, c: AblationConfig) -> dict[str, Any]:
    """Computes and prints the loss of a run at each attention length."""
    trained = load(one.workdir)
    model = trained.config.model
    corpus = processes.process_zero_first(lambda: corpus_from_config(one.exp.data, trained.vocab))
    mesh = scoring_mesh(trained.config.mesh, model, one.exp.evaluate.batch_size)
    tokens = first_targets(getattr(corpus, c.split), c.max_tokens)
    train_length, lengths = attention_lengths(one.exp, c.lengths)
    unit, losses = corpus.vocab.unit, []
    for length in lengths:
        protocol = protocol_at_length(one.exp, length)
        protocol = dataclasses.replace(protocol, split=c.split, max_segments=0)
        what = f"{one.row}, length {length}"
        with segment_bar(what) as progress:
            evaluator = Evaluator(model, protocol, tokens, mesh, what, corpus.train)
            score = evaluator.run(trained.params, progress=progress)
        assert score is not None
        losses.append(score.loss)
    values = [in_unit(loss, unit) for loss in losses]
    pairs = zip(lengths, values, strict=True)
    curve = "  ".join(f"{length}: {format_value(value, unit)}" for length, value in pairs)
    print_once(f"{one.row} (seed {one.exp.seed}), {unit} at length  {curve}")
    return {
        "row": one.row,
        "seed": one.exp.seed,
        "step": trained.step,
        "parameters": parameter_count(trained.params),
        **arithmetic_record(model, mesh),
        "unit": unit,
        "text": corpus.info["label"],
        "train_length": train_length,
        "lengths": lengths,
        "losses": losses,
        "values": values,
    }


def attention_lengths(exp: ExperimentConfig, lengths: tuple[int, ...]) -> tuple[int, list[int]]:
    """Returns the attention length of training (M, or T without memory), and all lengths to score.

    The lengths to score are sorted, and include that of training.
    """
    train_length = exp.train.mem_len or exp.train.seg_len
    selected = sorted({train_length, *lengths})
    if (limit := exp.model.segment_limit) is not None:
        selected = [length for length in selected if length <= limit]
    shortest = 1 if exp.train.mem_len else exp.evaluate.seg_len
    if selected[0] < shortest:
        key = "ablation.lengths" if selected[0] in lengths else "train.seg_len"
        raise AnalysisError(
            f"config key {key}: {selected[0]} is less than evaluate.seg_len = {shortest} of"
            f" {exp.name}; a model without memory needs at least evaluate.seg_len"
        )
    return train_length, selected


def protocol_at_length(exp: ExperimentConfig, length: int) -> ProtocolConfig:
    """Returns the protocol with this attention length, as memory or as recomputed context."""
    p = exp.evaluate
    if exp.train.mem_len:
        return dataclasses.replace(p, mem_len=length, context_len=0)
    changes: dict[str, Any] = {"mem_len": 0, "warm_start": 0, "context_len": length - p.seg_len}
    return dataclasses.replace(p, same_length=False, **changes)


def first_targets(split: Split, n: int) -> Split:
    """Returns the first n targets of a split, or all if n is 0.

    Of sentences or documents, it returns those that end within n targets, but at least one.
    """
    if not n:
        return split
    if isinstance(split, Pieces):
        ends = split.edges(np.arange(1, len(split) + 1))
        return split.part(0, max(1, int(np.searchsorted(ends, n, side="right"))))
    return split[: n + 1]


def best_value(lengths: list[int], values: list[float], unit: Unit) -> tuple[float, int]:
    """Returns the best value, and the shortest length whose rounded value is equally good."""
    best = min(values)
    rounded = [format_value(value, unit) for value in values]
    return best, lengths[rounded.index(format_value(best, unit))]


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a summary of each row of the table.

    ``init`` is the row's value at the training length, and ``best`` is its best value. Values are
    means over seeds. ``spread`` is the difference between the worst and the best seed at their best
    lengths. ``length`` is the best length of the mean curve.
    """
    table, keys = [], ("row", "parameters", "train_length", "unit", "lengths")
    for name in dict.fromkeys(row["row"] for row in rows):
        same = [row for row in rows if row["row"] == name]
        entry = {"seeds": len(same), **{key: same[0][key] for key in keys}}
        curve = [statistics.fmean(v) for v in zip(*(r["values"] for r in same), strict=True)]
        best, length = best_value(entry["lengths"], curve, entry["unit"])
        bests = [min(row["values"]) for row in same]
        entry |= {"curve": curve, "init": curve[entry["lengths"].index(entry["train_length"])]}
        entry |= {"best": best, "length": length, "spread": max(bests) - min(bests)}
        table.append(entry)
    return table


def _text(table: list[dict[str, Any]], unit: Unit) -> str:
    width = max(len(row["row"]) for row in table)
    lines = [f"{'':<{width}}  parameters  seeds  {unit} init (length)      best  shortest length"]
    for row in table:
        init = f"{format_value(row['init'], unit)} ({row['train_length']})"
        lines.append(
            f"{row['row']:<{width}}  {row['parameters']:>10,}  {row['seeds']:>5}  {init:>15}"
            f"  {format_value(row['best'], unit):>12}  {row['length']:>15}"
        )
    return "\n".join(lines)


def _figure(table: list[dict[str, Any]], rows: list[dict[str, Any]], title: str):
    """Plots each row's value over attention length. Thin lines are seeds, the star is the best."""
    unit: Unit = table[0]["unit"]
    figure = new_figure()
    axes = figure.add_subplot(xlabel="attention length in evaluation (tokens)")
    for n, row in enumerate(table):
        colour = f"C{n % 10}"
        for one in rows:
            if one["row"] == row["row"] and row["seeds"] > 1:
                axes.plot(one["lengths"], one["values"], color=colour, linewidth=0.5, alpha=0.6)
        axes.plot(row["lengths"], row["curve"], ".-", color=colour, label=row["row"])
        axes.plot(row["length"], row["best"], "*", color=colour, markersize=11)
    axes.set_ylabel(f"{UNIT_NAMES[unit]} ({unit})")
    axes.set_title(f"{title}\nloss over attention length, best marked")
    axes.grid(alpha=0.3)
    show_share(axes)
    axes.legend(fontsize="small")
    return figure
