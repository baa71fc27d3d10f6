"""Pictures of attention: every head by distance, terms by layer, the widest heads at one token."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from txl_jax.analysis.attention_averages import Averages
from txl_jax.analysis.pictures import new_figure, save
from txl_jax.data.vocab import SPACE, Vocab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 10
"""Tokens listed beside a head's picture, those it attends to most."""
LEAST = 5e-4
"""What gets less probability is not listed."""
TERMS = {
    "a": "(a) content",
    "b": "(b) content-dependent position",
    "c": "(c) global content",
    "d": "(d) global position",
}
_MONO: dict[str, Any] = {"family": "DejaVu Sans Mono", "parse_math": False}


@dataclasses.dataclass(frozen=True, eq=False)
class Attended:
    """What some heads look at from one token.

    Attributes:
      position: of the token in its split.
      probabilities: [L,N,K], of every head, entry d for distance d.
      tokens: ids of the text up to the token, which is the last; the one at distance d is
        ``tokens[-1 - d]``.
      heads: (layer, head) of those shown.
    """

    position: int
    probabilities: np.ndarray
    tokens: np.ndarray
    heads: list[tuple[int, int]]

    def largest(self, layer: int, head: int) -> list[int]:
        """Distances of the tokens that a head gives most to, most first; not of nothing."""
        x = self.probabilities[layer, head]
        order = np.argsort(-x, kind="stable")[:LARGEST]
        return [int(d) for d in order if x[d] >= LEAST]

    def around(self, vocab: Vocab, distance: int, width: int) -> tuple[str, str, str]:
        """Text before a token, the token, and text after it, some ``width`` characters each."""
        at = len(self.tokens) - 1 - distance
        wordy = vocab.kind in ("word", "sentence")
        join = " " if wordy else ""
        words = [shown(vocab, i) for i in self.tokens[max(0, at - width) : at + width + 1]]
        here = min(at, width)
        before, after = join.join(words[:here]) + join, join + join.join(words[here + 1 :])
        return before[-width:], words[here], after[:width]

    def to_json(self, vocab: Vocab, spans: np.ndarray) -> dict[str, Any]:
        """The same as numbers and text."""
        return {
            "position": self.position,
            "token": shown(vocab, self.tokens[-1]),
            "heads": [
                {
                    "layer": layer,
                    "head": head,
                    "mean_distance": round(float(spans[layer, head]), 3),
                    "largest": [
                        {
                            "distance": d,
                            "probability": round(float(self.probabilities[layer, head, d]), 6),
                            "token": shown(vocab, self.tokens[-1 - d]),
                            "text": "".join(self.around(vocab, d, 30)),
                        }
                        for d in self.largest(layer, head)
                    ],
                }
                for layer, head in self.heads
            ],
        }


def shown(vocab: Vocab, token: int) -> str:
    """A token so that it can be read: a space as ``␣``, a line's end and other bytes escaped."""
    symbol = vocab.symbols[int(token)]
    if vocab.kind in ("word", "sentence"):
        return symbol
    if vocab.kind == "byte":
        value = int(symbol)
        symbol = chr(value) if value < 128 else f"\\x{value:02x}"
    elif vocab.kind == "letter":
        symbol = symbol.replace(SPACE, " ")
    symbol = symbol.replace(" ", "␣")
    return symbol if symbol.isprintable() else symbol.encode("unicode_escape").decode()


def draw(
    workdir: str,
    about: dict[str, str],
    averages: Averages,
    attended: Attended,
    vocab: Vocab,
    longest: int,
) -> None:
    """Writes ``attention``, ``attention_heads`` and, with terms, ``attention_terms`` (PNG, SVG).

    Args:
      workdir: where to.
      about: ``model`` and ``data`` in words.
      averages: of the split.
      attended: of one token.
      vocab: of its text.
      longest: the largest distance in training, in tokens.
    """
    draw_averages(workdir, about, averages, longest)
    if averages.terms:
        draw_terms(workdir, about, averages, longest)
    draw_heads(workdir, about, averages, attended, vocab)


def draw_averages(workdir: str, about: dict[str, str], averages: Averages, longest: int) -> None:
    """``attention``: a row per head, a column per distance, and mean distances beside it."""
    from matplotlib.colors import LogNorm

    n_layer, n_head = averages.spans.shape
    rows = n_layer * n_head
    figure = new_figure(11, min(2.4 + 0.2 * rows, 15))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    edges = _edges(averages.n_keys)
    x = averages.binned(averages.attention, edges).reshape(rows, -1)
    norm = LogNorm(max(x.max() * 1e-4, x[x > 0].min()), x.max(), clip=True)
    image = left.pcolormesh(edges, np.arange(rows + 1) - 0.5, x, norm=norm, rasterized=True)
    _by_distance(left, averages.n_keys, longest)
    left.invert_yaxis()
    for layer in range(1, n_layer):
        for axes in (left, right):
            axes.axhline(layer * n_head - 0.5, color="white" if axes is left else "0.8", lw=0.8)
    _name_rows(left, n_layer, n_head)
    right.barh(np.arange(rows), averages.spans.reshape(-1), color="0.55", height=0.8)
    right.set_xlabel("mean distance\n(tokens)")
    bar = figure.colorbar(
        image, ax=left, location="left", pad=0.02, shrink=0.9, aspect=25 + rows / 2
    )
    bar.set_label("mean probability of one key at this distance")
    _title(figure, f"Attention by distance, mean of {averages.queries:,} tokens", about)
    save(figure, workdir, "attention")


def draw_terms(workdir: str, about: dict[str, str], averages: Averages, longest: int) -> None:
    """``attention_terms``: each term's own softmax by distance, the mean of a layer's heads."""
    import matplotlib

    figure = new_figure(11, 7)
    panels = figure.subplots(2, 2, sharex=True, sharey=True).reshape(-1)
    edges = _edges(averages.n_keys)
    n_layer = len(averages.spans)
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, n_layer))
    lines: list[Any] = []
    for axes, (letter, what) in zip(panels, TERMS.items(), strict=True):
        if letter not in averages.terms:
            axes.set_axis_off()
            continue
        by_layer = averages.binned(averages.terms[letter].mean(axis=1), edges)
        places = (edges[:-1] + edges[1:] - 1) / 2
        lines = [
            axes.plot(places, x, color=colour, lw=1.2)[0]
            for x, colour in zip(by_layer, colours, strict=True)
        ]
        whole = averages.binned(averages.attention.mean(axis=(0, 1)), edges)
        lines += axes.plot(places, whole, color="black", lw=1, ls=":")
        axes.set_yscale("log")
        axes.set_title(what, fontsize=10, loc="left")
        axes.grid(alpha=0.3)
        _by_distance(axes, averages.n_keys, longest)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(min(low, high / 100), high)  # flat lines look flat
    for axes in panels[::2]:
        axes.set_ylabel("mean probability of one key")
    names = [f"layer {layer}" for layer in range(n_layer)]
    figure.legend(
        lines,
        [*names, "all terms, all heads"],
        loc="outside right upper",
        fontsize=8,
        frameon=False,
    )
    _title(figure, "Each term of the score through its own softmax, mean of heads", about)
    save(figure, workdir, "attention_terms")


def draw_heads(
    workdir: str, about: dict[str, str], averages: Averages, attended: Attended, vocab: Vocab
) -> None:
    """``attention_heads``: what chosen heads give to each token before one, and their largest."""
    heads = attended.heads
    figure = new_figure(13, 1.1 + 2.5 * len(heads))
    panels = figure.subplots(len(heads), 2, squeeze=False, width_ratios=[3, 2])
    for (layer, head), (axes, listed) in zip(heads, panels, strict=True):
        x = attended.probabilities[layer, head]
        axes.vlines(np.arange(len(x)), 0, x, color="C0", lw=1)
        axes.set_xlim(len(x), -len(x) / 20)
        axes.set_ylim(0, x.max() * 1.3)
        axes.set_yticks([tick for tick in axes.get_yticks() if tick <= min(1, x.max() * 1.3)])
        axes.set_ylabel("probability")
        span = averages.spans[layer, head]
        axes.set_title(f"layer {layer}, head {head}: mean distance {span:.0f} tokens", fontsize=10)
        placed: list[int] = []
        for d in attended.largest(layer, head):
            apart = all(abs(d - other) > len(x) / 45 for other in placed)
            if apart and x[d] > x.max() / 10:
                placed.append(d)
                name = shown(vocab, attended.tokens[-1 - d])
                turned: dict[str, Any] = {"rotation": 30, "rotation_mode": "anchor", "ha": "left"}
                how: dict[str, Any] = turned if len(name) > 2 else {"ha": "center"}
                high = x[d] + x.max() * 0.03
                axes.text(d, high, name, color="C3", fontsize=8, va="baseline", **how, **_MONO)
        _list(listed, attended, vocab, layer, head)
    panels[-1, 0].set_xlabel(
        "distance back to the attended token (tokens); 0 is the token itself, its prediction next"
    )
    before, token, _ = attended.around(vocab, 0, 40)
    _title(
        figure,
        f"The widest heads at token {attended.position:,}, the last of …{before}[{token}]",
        about,
    )
    save(figure, workdir, "attention_heads")


def _list(axes: "Axes", attended: Attended, vocab: Vocab, layer: int, head: int) -> None:
    """The largest weights as lines of text: probability, distance, the token in its place."""
    axes.set_axis_off()
    width = 22
    font: dict[str, Any] = {"fontsize": 7.5, "va": "baseline", "transform": axes.transAxes, **_MONO}
    axes.text(0, 0.95, f"{'prob.':>6} {'distance':>8}  the token where it stands", **font)
    for line, d in enumerate(attended.largest(layer, head), 1):
        before, token, after = attended.around(vocab, d, width)
        y = 0.95 - line / (LARGEST + 1)
        start = f"{attended.probabilities[layer, head, d]:6.3f} {d:8,}  "
        column = len(start) + width
        axes.text(0, y, f"{start}{before:>{width}}", color="0.4", **font)
        axes.text(0, y, " " * column + token, color="C3", weight="bold", **font)
        axes.text(0, y, " " * (column + len(token)) + after, color="0.4", **font)


def _edges(n_keys: int) -> np.ndarray:
    """0, 1, 2, .. K with steps of at most a sixteenth: one distance each while they are few."""
    edges = [0]
    while edges[-1] < n_keys:
        edges.append(min(n_keys, edges[-1] + max(1, edges[-1] // 16)))
    return np.array(edges)


def _by_distance(axes: "Axes", n_keys: int, longest: int) -> None:
    """The axis of distances: logarithmic from 1 on, with 0 in front."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.5, base=2)
    ticks = [0, *(2**i for i in range((n_keys - 1).bit_length()))]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0, n_keys)
    axes.set_xlabel("distance (tokens)")
    if longest < n_keys - 1:
        axes.axvline(longest + 1, color="C3", lw=1, ls="--")
        axes.annotate(
            "longest in training ",
            (longest + 1, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            fontsize=7,
            color="C3",
        )


def _name_rows(axes: "Axes", n_layer: int, n_head: int) -> None:
    if n_layer * n_head <= 48:
        names = [f"{layer}.{head}" for layer in range(n_layer) for head in range(n_head)]
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylabel("layer.head")
        return
    axes.set_yticks(np.arange(n_layer) * n_head + (n_head - 1) / 2, map(str, range(n_layer)))
    axes.set_ylabel(f"layer ({n_head} heads each, from head 0 down)")


def _title(figure: Any, what: str, about: dict[str, str]) -> None:
    figure.suptitle(
        f"{what}\n{about['model']}\n{about['data']}",
        fontsize=10,
        x=0.01,
        ha="left",
        parse_math=False,
    )
