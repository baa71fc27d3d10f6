"""Draws the loss curve of a run from its ``metrics.jsonl``."""

import collections
import io
import os
from collections.abc import Callable

from txl_jax.files import atomic_write
from txl_jax.paths import absolute
from txl_jax.records import read_counted, skipped_lines
from txl_jax.units import UNIT_NAMES, Unit, format_value


def draw_loss_curve(
    metrics_path: str, figure_path: str, unit: Unit, message: Callable[[str], None]
) -> None:
    """Draws the training loss as a line and the validation loss as points, in a PNG file.

    Without records, no file is written. ``message`` prints a warning if lines cannot be read.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
    records, skipped = read_counted(metrics_path)
    if skipped:
        message(skipped_lines(metrics_path, skipped))
    for record in records:
        if record.get(unit) is not None:
            points[record["kind"]].append((record["step"], record[unit]))
    train, valid, test = points["train"], points["valid"], points["test"]
    if not train and not valid:
        return

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    title = []
    if train:
        axes.plot(*zip(*train, strict=True), color="C0", linewidth=1, label="training")
        title.append(f"training {format_value(train[-1][1], unit)}")
    if valid:
        axes.plot(*zip(*valid, strict=True), "o-", color="C1", markersize=4, label="validation")
        step, value = min(valid, key=lambda point: point[1])
        best = format_value(value, unit)
        label = f"best validation: {best} at step {step}"
        axes.plot(step, value, "*", color="C3", markersize=14, label=label)
        title.append(f"best validation {best}")
    if test:
        title.append(f"test {format_value(test[-1][1], unit)}")
    if unit == "ppl":
        axes.set_yscale("log")
    last = max(step for step, _ in train + valid)
    run = os.path.basename(os.path.dirname(absolute(figure_path)))
    values = f"{', '.join(title)} {unit} after {last:,} steps"
    axes.set_title(f"{run}\n{values}", parse_math=False, wrap=True)
    axes.set_xlabel("step")
    axes.set_ylabel(f"{UNIT_NAMES[unit]} ({unit})")
    axes.grid(alpha=0.3)
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png")
    atomic_write(figure_path, png.getvalue())
