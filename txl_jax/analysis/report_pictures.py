"""Pictures within a page: a run's curves, drawn, and those that analyses left in a workdir."""

import base64
import glob
import html
import os
from collections.abc import Sequence
from typing import Any

from txl_jax.analysis import pictures
from txl_jax.units import UNIT_NAMES, Unit

_LARGEST_SVG = 300_000
"""Bytes; a larger drawing is taken as PNG."""

SIDES = (("learning_rate", "learning rate"), ("grad_norm", "gradient norm"))
"""Curves beside the loss."""


def curves(metrics: Sequence[list[dict[str, Any]]], names: Sequence[str], unit: Unit) -> str:
    """Loss, learning rate, gradient norm and tokens/s over steps, a colour for each run."""
    figure = pictures.new_figure(10, 7)
    grid = figure.add_gridspec(2, 3, height_ratios=(2, 1))
    loss = figure.add_subplot(grid[0, :])
    sides = [figure.add_subplot(grid[1, n]) for n in range(3)]
    for n, (run, name) in enumerate(zip(metrics, names, strict=True)):
        colour, of = f"C{n % 10}", name if len(names) > 1 else ""
        train = [r for r in run if r["kind"] == "train"]
        valid = [r for r in run if r["kind"] == "valid" and r.get(unit) is not None]
        _line(loss, train, unit, color=colour, alpha=0.6, label=f"{of} training".strip())
        if valid:
            at = [r["step"] for r in valid]
            own, label = colour if of else "C1", f"{of} validation".strip()
            loss.plot(at, [r[unit] for r in valid], "o-", markersize=4, color=own, label=label)
        for axes, (key, _) in zip(sides, SIDES, strict=False):
            _line(axes, train, key, color=colour)
        speed = [{**r, **r.get("timing", {})} for r in train]
        _line(sides[2], speed, "tokens_per_second", color=colour)
    if unit == "ppl":
        loss.set_yscale("log")
    loss.set_ylabel(f"{UNIT_NAMES[unit]} ({unit})")
    what = names[0] if len(names) == 1 else f"{len(names)} runs"
    loss.set_title(f"{what}: loss in training and validation")
    loss.legend(fontsize="small")
    for axes, label in zip(sides, [*(told for _, told in SIDES), "tokens per second"], strict=True):
        axes.set_ylabel(label)
    for axes in (loss, *sides):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    return image(pictures.as_bytes(figure, "svg", "curves"), "svg", "training curves")


def embedded(workdir: str, name: str) -> str:
    """Every picture of a workdir whose name starts so, drawings before photographs of them."""
    found = []
    for png in sorted(glob.glob(os.path.join(glob.escape(workdir), f"{name}*.png"))):
        drawing = png.removesuffix("png") + "svg"
        drawn = os.path.exists(drawing) and os.path.getsize(drawing) <= _LARGEST_SVG
        path, kind = (drawing, "svg") if drawn else (png, "png")
        with open(path, "rb") as file:
            found.append(image(file.read(), kind, os.path.basename(path)))
    return "".join(found)


def image(data: bytes, kind: str, about: str) -> str:
    """A picture that is part of the page."""
    mime = {"svg": "image/svg+xml", "png": "image/png"}[kind]
    text = base64.b64encode(data).decode()
    return f'<img alt="{html.escape(about)}" src="data:{mime};base64,{text}">'


def _line(axes: Any, run: list[dict[str, Any]], key: str, **style: Any) -> None:
    there = [r for r in run if r.get(key) is not None]
    axes.plot([r["step"] for r in there], [r[key] for r in there], linewidth=1, **style)
