"""Pictures of the analyses: a figure without a window, saved as PNG and SVG, and what it is of."""

import io
import os
from typing import TYPE_CHECKING

from txl_jax.checkpoint.trained_model import TrainedModel, parameter_count
from txl_jax.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120


def new_figure(width: float = 8, height: float = 5) -> "Figure":
    """An empty figure, so many inches wide and high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: "Figure", folder: str, name: str) -> None:
    """Writes ``name.png`` and ``name.svg`` in a folder; the same figure gives the same bytes."""
    for kind in ("png", "svg"):
        atomic_write(os.path.join(folder, f"{name}.{kind}"), as_bytes(figure, kind, name))


def as_bytes(figure: "Figure", kind: str, name: str) -> bytes:
    """The figure as a file of a kind, ``png`` or ``svg``; ``name`` keeps its ids apart."""
    import matplotlib

    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(data, format=kind, metadata={"Date": None} if kind == "svg" else {})
    return data.getvalue()


def described(trained: TrainedModel) -> str:
    """The model in a few words for a title: name, attention, parameters, step."""
    c = trained.config.model
    count = parameter_count(trained.params)
    return (
        f"{trained.config.name} ({c.attention}, {c.n_layer} layers, {_short(count)} parameters,"
        f" step {trained.step:,})"
    )


def _short(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count:,}"
