"""Trains every combination of a grid of settings with several seeds, and finds the best one.

Each run is trained like a single run, in a folder such as ``WORKDIR/dropout=0.1/seed_0``. Runs are
compared by validation loss.
"""

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from txl_jax.analysis.results import AnalysisError, new_figure, show_share, write_results
from txl_jax.checkpoint.errors import AnotherRunError
from txl_jax.checkpoint.workdir import read_record
from txl_jax.checkpoint.workdir_files import (
    CONFIG,
    MODE_FILES,
    check_unused,
    register_outputs,
)
from txl_jax.config import ConfigError, ExperimentConfig, flatten, override
from txl_jax.config.changes import changed_validation, is_free
from txl_jax.messages import argument, one_line, short_repr, shown_path
from txl_jax.parallel import processes
from txl_jax.paths import path
from txl_jax.standard_streams import say
from txl_jax.training.plan import locked_workdirs, plan_run
from txl_jax.training.run import is_trained, train_and_evaluate, validations
from txl_jax.units import UNIT_NAMES, Unit, format_value


class SweepRow(NamedTuple):
    """A combination of the grid: its settings by key, and the workdirs and values of its seeds.

    ``values`` has the best validation loss of each seed in the unit, the lowest first. ``workdirs``
    has the same order.
    """

    name: str
    settings: dict[str, Any]
    workdirs: list[str]
    values: list[float]
    mean: float


class Sweep(NamedTuple):
    """The rows, their unit, and the errors of failed runs by workdir.

    Rows with the most finished seeds come first. Among these, the best mean comes first.
    """

    rows: list[SweepRow]
    unit: Unit
    failed: dict[str, str]

    def __repr__(self) -> str:
        return f"Sweep({len(self.rows)} rows, the best {self.rows[0]})"

    def __str__(self) -> str:
        about = "validation loss"
        width = max(map(len, [about, *(row.name for row in self.rows)]))
        columns = f"{'mean ' + self.unit:>10}  {'spread':>10}  {'best':>10}"
        lines = [f"{about:<{width}}  seeds  {columns}"]
        for row in self.rows:
            shown = "  failed"
            if row.values:
                numbers = row.mean, row.values[-1] - row.values[0], row.values[0]
                shown = "".join(f"  {format_value(x, self.unit):>10}" for x in numbers)
            lines.append(f"{row.name:<{width}}  {len(row.values):>5}{shown}")
        return "\n".join(lines)


def train_run(exp: ExperimentConfig, workdir: str) -> None:
    """Trains a run, and prints its held-out loss."""
    processes.print_once("\n".join(train_and_evaluate(exp, workdir).lines))


def run(exp: ExperimentConfig, workdir: str, train: Callable[[Any, str], Any] = train_run) -> Sweep:
    """Checks all runs, trains the unfinished ones with ``train``, and writes table and figure."""
    if path(workdir, CONFIG).exists():
        where = argument("workdir", shown_path(workdir))
        raise ConfigError(f"{where}: is the folder of a run; give the sweep a folder of its own")
    cells, failed = grid_runs(exp, workdir), dict[str, str]()
    processes.on_process_zero(lambda: check_unused(workdir, "sweep"))
    pairs = [pair for *_, runs in cells for pair in runs]
    plans = [plan_run(*pair) for pair in pairs]
    processes.on_process_zero(lambda: _check_validation(pairs))
    processes.on_process_zero(lambda: register_outputs(workdir, "sweep"))
    for plan in plans:
        with locked_workdirs(plan):  # raises AnotherRunError for a run with other settings
            pass
    done = lambda one, w: is_trained(one, w) and path(w, MODE_FILES["evaluate"][0]).exists()
    left = processes.on_process_zero(lambda: [not done(*pair) for pair in pairs])
    for n, (one, folder) in itertools.compress(enumerate(pairs, 1), left):
        processes.print_once(f"run {n} of {len(pairs)}: {shown_path(folder)}", sys.stderr)
        try:
            train(one, folder)
        except Exception as error:
            if processes.many():
                raise  # other processes wait for this one
            failed[folder] = one_line(error)
            say(f"failed: {shown_path(folder)}: {failed[folder]}")
    scores = {w: _finite(validations(w).values()) for _, w in pairs if w not in failed}
    for folder in (w for w, found in scores.items() if not found):
        failed[folder] = "no validation loss is finite"
        processes.print_once(f"failed: {shown_path(folder)}: {failed[folder]}", sys.stderr)
    units = {unit for found in scores.values() for unit, _ in found}
    if not units:
        raise AnalysisError(f"every run failed: {next(iter(failed.values()), 'no validation')}")
    rows, (unit,) = [], units  # one text has one unit
    for name, settings, runs in cells:
        best = sorted((min(scores[w])[1], w) for _, w in runs if scores.get(w))
        values, folders = [value for value, _ in best], [folder for _, folder in best]
        mean = sum(values) / len(values) if values else float("nan")
        rows.append(SweepRow(name, settings, folders, values, mean))
    each = [
        {**r.settings, "workdir": w, unit: x} for r in rows for w, x in zip(*r[2:4], strict=True)
    ]
    sweep = Sweep(sorted(rows, key=lambda row: (-len(row.values), row.mean)), unit, failed)
    record = {"unit": unit, "runs": each, "failed": failed}
    files = {"sweep.json": record, "sweep.csv": each, "sweep": lambda: _figure(rows, unit)}
    if processes.is_process_zero():
        write_results(workdir, str(sweep), files)
    return sweep


def _finite(found: Iterable[Mapping[str, Any]]) -> list[tuple[Unit, float]]:
    """Returns unit and value of each validation, except values that are not finite (null)."""
    values = [(unit, one.get(unit)) for one in found for unit in UNIT_NAMES]
    return [(unit, value) for unit, value in values if value is not None]


def _check_validation(pairs: list[tuple[ExperimentConfig, str]]) -> None:
    """Raises AnotherRunError if an earlier run of the sweep was validated with other settings."""
    known = [pair for pair in pairs if path(pair[1], CONFIG).exists() and validations(pair[1])]
    for exp, folder in known:
        if changed := changed_validation(read_record(folder), exp):
            raise AnotherRunError(
                f"{shown_path(folder)} was validated with other settings, and losses of both kinds"
                " cannot be compared",
                details=["name another folder for the sweep; what differs:", *changed],
            )


def grid_runs(exp: ExperimentConfig, workdir: str) -> list[tuple[str, dict[str, Any], list[Any]]]:
    """Returns each combination's name, settings and runs, or raises ConfigError."""
    grid = {k: v if isinstance(v, list) else [v] for k, v in exp.sweep.grid.items()}
    how = argument("config.sweep.grid.optimizer.learning_rate", "1e-3,3e-4")
    for key, values in (grid or {"": []}).items():
        why = ""
        if not values:
            why = f"has no values; give settings with values, such as {how}"
        elif key in ("seed", "train.num_seeds"):
            why = "cannot be a key of a sweep; give the number of seeds as sweep.seeds"
        elif key.startswith("data."):
            why = "changes the text, and losses on different texts cannot be compared"
        elif is_free(key):
            why = "does not change the trained model; leave this key out"
        if why:
            where = f"config key sweep.grid.{key}".removesuffix(".")
            raise ConfigError(f"{where} = {short_repr(values if key else grid)}: {why}")
    base, cells = {"sweep.grid": {}, "sweep.seeds": 1, "train.num_seeds": 1}, dict[str, Any]()
    for chosen in itertools.product(*grid.values()):
        one = override(exp, {**base, **dict(zip(grid, chosen, strict=True))})
        settings = {key: flatten(one.to_dict())[key] for key in grid}
        name = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
        folder = os.path.join(workdir, re.sub(r"[^\w.+=-]", "_", name.replace(" ", "-")))
        if folder in cells:
            twice = "twice" if name == cells[folder][0] else f"beside {cells[folder][0]}"
            why = f"{name} is given {twice}, and a folder can hold only one of them"
            raise ConfigError(f"config key sweep.grid: {why}; leave one out")
        count = max(exp.sweep.seeds, exp.train.num_seeds)
        runs = [override(one, {"seed": exp.seed + n}) for n in range(count)]
        cells[folder] = name, settings, [(r, os.path.join(folder, f"seed_{r.seed}")) for r in runs]
    return list(cells.values())


def _figure(rows: list[SweepRow], unit: Unit) -> Any:
    figure = new_figure()
    axes = figure.add_subplot(ylabel=f"validation {UNIT_NAMES[unit]} ({unit})")
    axes.plot([row.name for row in rows], [row.mean for row in rows], "o-")
    points = [(row.name, value) for row in rows for value in row.values]
    axes.plot(*zip(*points, strict=True), "C0.")
    axes.tick_params("x", rotation=45)
    show_share(axes)
    return figure
