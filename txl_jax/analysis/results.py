"""Writes the files of an analysis (JSON, CSV, arrays and figures). Defines the analyses' error."""

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from txl_jax.checkpoint.trained_model import TrainedModel, parameter_count
from txl_jax.files import atomic_write, write_csv, write_json
from txl_jax.messages import UserError, shown_path
from txl_jax.model.precision import rounding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class AnalysisError(UserError, ValueError):
    """An analysis is impossible. The message has the reason and says what to do."""


def write_results(workdir: str, last_line: str, files: Mapping[str, Any]) -> str:
    """Writes the files of an analysis. Returns ``last_line`` and a line with the files' names.

    ``files`` maps names to contents: an object (``.json``), rows with equal keys (``.csv``) or
    arrays by name (``.npz``). A name without a suffix maps to a function that draws a figure.
    ``None`` as the contents means no file. If a file cannot be written, ``last_line`` is printed
    before the error is raised.
    """
    writers: dict[str, Any] = {".json": write_json, ".csv": write_csv, ".npz": write_arrays}
    written = []
    try:
        for name, content in files.items():
            if content is None:
                continue
            if write := writers.get(os.path.splitext(name)[1]):
                write(os.path.join(workdir, name), content)
                written.append(name)
            else:
                save_figure(content(), workdir, name)
                written.append(f"{name}.png")
    except BaseException:  # the result must not be lost
        print(last_line, flush=True)
        raise
    return f"{last_line}\nwritten to {shown_path(workdir)}: {', '.join(written)}"


def write_arrays(path: str, arrays: Mapping[str, Any]) -> None:
    """Writes arrays by name into a compressed ``.npz`` file, which is never partly written."""
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    atomic_write(path, data.getvalue())


def new_figure(width: float = 8, height: float = 5) -> "Figure":
    """Creates an empty figure without a window. The width and the height are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def show_share(axes: "Axes") -> None:
    """Makes a y axis span at least 5% of its middle value, so that small differences look small."""
    low, high = axes.get_ylim()
    middle = (low + high) / 2
    half = max(high - low, 0.05 * abs(middle)) / 2
    axes.set_ylim(middle - half, middle + half)


def save_figure(figure: "Figure", folder: str, name: str) -> None:
    """Writes ``name.png`` and ``name.svg`` into a folder. Equal figures give equal bytes."""
    for kind in ("png", "svg"):
        atomic_write(os.path.join(folder, f"{name}.{kind}"), figure_bytes(figure, kind, name))


def figure_bytes(figure: "Figure", kind: str, name: str) -> bytes:
    """Returns a figure as the bytes of a PNG or SVG. ``name`` makes the ids in an SVG unique."""
    import matplotlib

    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(data, format=kind, metadata={"Date": None} if kind == "svg" else {})
    return data.getvalue()


def describe_model(trained: TrainedModel) -> str:
    """Describes a model for a title: name, attention, size, step, and arithmetic if not float32."""
    c, count = trained.config.model, parameter_count(trained.params)
    size = f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count:,}"
    about = f"{c.attention}, {c.n_layer} layers, {size} parameters, step {trained.step:,}"
    return f"{trained.config.name} ({', '.join(filter(None, [about, rounding(c, None)]))})"
