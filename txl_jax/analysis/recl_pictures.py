"""Pictures of groups of models: what longer contexts gain, and perplexity by context length."""

from typing import Any

import numpy as np

from txl_jax.analysis import pictures
from txl_jax.analysis.context import lengths_axis
from txl_jax.analysis.recl import Gains, Losses
from txl_jax.config import ContextConfig


def heat_maps(found: dict[str, dict[float, list[Gains]]], told: str):
    """Gains from c to c' > c in perplexity: models down, r across, one scale for a group's r."""
    counts = [len(next(iter(shares.values()))) for shares in found.values()]
    n_shares = len(next(iter(found.values())))
    heights = [2.4 * count + 1.7 for count in counts]
    figure = pictures.new_figure(1 + 3.3 * n_shares, sum(heights))
    parts = figure.subfigures(len(found), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (group, shares), count in zip(parts, found.items(), counts, strict=True):
        part.suptitle(f"Gain from longer contexts{_of(group)}\n{told}", fontsize=10)
        grid = part.subplots(count, n_shares, squeeze=False, sharex=True, sharey=True)
        for column, (r, of_group) in enumerate(shares.items()):
            top = max(g.absolute[np.triu_indices(len(g.contexts), 1)].max() for g in of_group)
            image: Any = None
            for axes, of_model in zip(grid[:, column], of_group, strict=True):
                image = _heat_map(axes, of_model, top or 1.0)
                axes.set_title(f"{of_model.name}, r = {r}", fontsize=9)
            grid[-1, column].set_xlabel("longer context c' (tokens)", fontsize=8)
            share = {"fraction": 0.1 / count, "pad": 0.04 / count, "aspect": 25}
            bar = part.colorbar(image, ax=list(grid[:, column]), location="bottom", **share)
            bar.set_label("exp f(c,c) - exp f(c,c') (perplexity per token)", fontsize=8)
            bar.ax.tick_params(labelsize=7)
        for axes in grid[:, 0]:
            axes.set_ylabel("context c (tokens)", fontsize=8)
    return figure


def _heat_map(axes, of_model: Gains, top: float):
    n = len(of_model.contexts)
    upper = np.triu(np.ones((n, n), bool), 1)
    shown = np.ma.masked_where(~upper, of_model.absolute)
    image = axes.imshow(shown, vmin=0, vmax=top, cmap="viridis", aspect="auto")
    places = range(0, n, -(-n // 10))
    axes.set_xticks(places, [of_model.contexts[i] for i in places], rotation=90, fontsize=7)
    axes.set_yticks(places, [of_model.contexts[i] for i in places], fontsize=7)
    return image


def curves(groups: dict[str, list[Losses]], told: str, c: ContextConfig):
    """Perplexity over the context's length, a panel for each group."""
    figure = pictures.new_figure(6 * len(groups) + 2, 5)
    for axes, (group, of_group) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
    ):
        for losses in of_group:
            axes.plot(losses.contexts, np.exp(losses.mean()), marker="o", label=losses.name)
        lengths_axis(axes, c.lengths, c)
        axes.set_ylabel("perplexity per token")
        axes.legend()
        axes.set_title(f"Perplexity by context length{_of(group)}", fontsize=10)
    figure.suptitle(told, fontsize=10)
    return figure


def _of(group: str) -> str:
    return f", group {group}" if group else ""
