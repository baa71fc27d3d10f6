"""Figures of groups of models: gains from longer contexts, and perplexity by context length."""

import numpy as np

from txl_jax.analysis.context import set_length_axis
from txl_jax.analysis.recl import Gains, Losses
from txl_jax.analysis.results import new_figure
from txl_jax.config import ContextConfig


def heat_maps(gains: dict[str, dict[float, list[Gains]]], subtitle: str):
    """Gains from c to c' > c in perplexity: models down, r across.

    Models of one group and r share a colour scale.
    """
    counts = [len(next(iter(shares.values()))) for shares in gains.values()]
    n_shares = len(next(iter(gains.values())))
    heights = [2.4 * count + 1.7 for count in counts]
    figure = new_figure(1 + 3.3 * n_shares, sum(heights))
    panels = figure.subfigures(len(gains), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, (group, shares), count in zip(panels, gains.items(), counts, strict=True):
        panel.suptitle(f"Gain from longer contexts{_suffix(group)}\n{subtitle}", fontsize=10)
        grid = panel.subplots(count, n_shares, squeeze=False, sharex=True, sharey=True)
        for column, (r, models) in zip(grid.T, shares.items(), strict=True):
            top = max(g.absolute[np.triu_indices(len(g.contexts), 1)].max() for g in models)
            images = [_heat_map(*pair, top or 1.0) for pair in zip(column, models, strict=True)]
            for axes, model in zip(column, models, strict=True):
                axes.set_title(f"{model.name}, r = {r}", fontsize=9)
            column[-1].set_xlabel("longer context c' (tokens)", fontsize=8)
            size = {"fraction": 0.1 / count, "pad": 0.04 / count, "aspect": 25}
            bar = panel.colorbar(images[-1], ax=list(column), location="bottom", **size)
            bar.set_label("exp f(c,c) - exp f(c,c') (perplexity per token)", fontsize=8)
            bar.ax.tick_params(labelsize=7)
        for axes in grid[:, 0]:
            axes.set_ylabel("context c (tokens)", fontsize=8)
    return figure


def _heat_map(axes, model: Gains, top: float):
    n = len(model.contexts)
    lower = np.tril(np.ones((n, n), bool))
    values = np.ma.masked_where(lower, model.absolute)
    ticks = range(0, n, -(-n // 10))
    labels = [model.contexts[i] for i in ticks]
    axes.set_xticks(ticks, labels, rotation=90, fontsize=7)
    axes.set_yticks(ticks, labels, fontsize=7)
    return axes.imshow(values, vmin=0, vmax=top, cmap="viridis", aspect="auto")


def curves(groups: dict[str, list[Losses]], subtitle: str, c: ContextConfig):
    """Perplexity over context length, a panel for each group."""
    figure = new_figure(6 * len(groups) + 2, 5)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (group, models) in zip(panels, groups.items(), strict=True):
        for losses in models:
            axes.plot(losses.contexts, np.exp(losses.mean()), marker="o", label=losses.name)
        set_length_axis(axes, c.lengths, c)
        axes.set_ylabel("perplexity per token")
        axes.legend()
        axes.set_title(f"Perplexity by context length{_suffix(group)}", fontsize=10)
    figure.suptitle(subtitle, fontsize=10)
    return figure


def _suffix(group: str) -> str:
    return f", group {group}" if group else ""
