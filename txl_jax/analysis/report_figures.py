"""Images of the report page: training curves, and the figures that analyses left in a workdir."""

import base64
import glob
import os
from collections.abc import Sequence
from typing import Any

from txl_jax.analysis.results import figure_bytes, new_figure
from txl_jax.units import UNIT_NAMES, Unit

_LARGEST_SVG = 300_000
"""Bytes; the PNG replaces a larger SVG."""
_SIDES = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
}
"""Curves below the loss, with their labels."""


def curves(runs: Sequence[tuple[str, list[dict[str, Any]]]], unit: Unit) -> dict[str, str]:
    """Loss, learning rate, gradient norm and tokens/s over steps as an image.

    ``runs``: names and records; each run has a colour.
    """
    figure = new_figure(10, 7)
    grid = figure.add_gridspec(2, 3, height_ratios=(2, 1))
    loss = figure.add_subplot(grid[0, :])
    sides = {key: figure.add_subplot(grid[1, n]) for n, key in enumerate(_SIDES)}
    for n, (name, records) in enumerate(runs):
        colour, prefix = f"C{n % 10}", f"{name} " if len(runs) > 1 else ""
        train = [{**r, **r.get("timing", {})} for r in records if r["kind"] == "train"]
        valid = [r for r in records if r["kind"] == "valid"]
        _line(loss, train, unit, "-", color=colour, alpha=0.6, label=f"{prefix}training")
        if any(r.get(unit) is not None for r in valid):
            own = colour if prefix else "C1"
            _line(loss, valid, unit, "o-", color=own, markersize=4, label=f"{prefix}validation")
        for key, axes in sides.items():
            _line(axes, train, key, "-", color=colour)
            axes.set_ylabel(_SIDES[key])
    if unit == "ppl":
        loss.set_yscale("log")
    loss.set_ylabel(f"{UNIT_NAMES[unit]} ({unit})")
    what = runs[0][0] if len(runs) == 1 else f"{len(runs)} runs"
    loss.set_title(f"{what}: loss in training and validation")
    loss.legend(fontsize="small")
    for axes in (loss, *sides.values()):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    return _image(figure_bytes(figure, "svg", "curves"), "svg+xml", "training curves")


def saved_figures(workdir: str, prefix: str) -> list[dict[str, str]]:
    """The figures of a workdir whose names start with ``prefix``; small ones as SVG."""
    images = []
    for png in sorted(glob.glob(os.path.join(glob.escape(workdir), f"{prefix}*.png"))):
        svg = png.removesuffix("png") + "svg"
        is_small = os.path.exists(svg) and os.path.getsize(svg) <= _LARGEST_SVG
        path, kind = (svg, "svg+xml") if is_small else (png, "png")
        with open(path, "rb") as file:
            images.append(_image(file.read(), kind, os.path.basename(path)))
    return images


def _image(data: bytes, kind: str, name: str) -> dict[str, str]:
    """``alt`` and ``src`` of an image that is part of the page."""
    return {"alt": name, "src": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}


def _line(axes: Any, records: list[dict[str, Any]], key: str, style: str, **more: Any) -> None:
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    axes.plot([step for step, _ in points], [y for _, y in points], style, linewidth=1, **more)
