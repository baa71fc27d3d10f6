"""Figures of attention: by head and distance, by term and layer, and at one token."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from txl_jax.analysis.attention_weights import Averages
from txl_jax.analysis.results import new_figure
from txl_jax.data.vocab import Vocab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LISTED = 10
"""The largest number of tokens listed beside a head."""
TERMS = {
    "a": "(a) content",
    "b": "(b) content-dependent position",
    "c": "(c) global content",
    "d": "(d) global position",
}
_LIST: dict[str, Any] = {"family": "DejaVu Sans Mono", "parse_math": False, "va": "top"}
_LIST |= {"fontsize": 7.5, "linespacing": 1.5}


@dataclasses.dataclass(frozen=True, eq=False)
class PositionAttention:
    """The attention of one token to earlier tokens, for some heads."""

    position: int  # the token's index in its split
    probabilities: np.ndarray  # attention of every head at distance d = 0 .. K-1, [L,N,K]
    tokens: np.ndarray  # token ids up to this token; tokens[-1 - d] is at distance d
    heads: list[tuple[int, int]]  # (layer, head) of each head in the figure
    vocab: Vocab

    def largest(self, layer: int, head: int) -> list[int]:
        """Returns the distances with a head's largest attention weights, the largest first."""
        x = self.probabilities[layer, head]
        return [int(d) for d in np.argsort(-x, kind="stable")[:LISTED] if x[d] > 0]

    def text_around(self, distance: int, width: int) -> tuple[str, str, str]:
        """Returns the text before the token at ``distance``, the token, and the text after it.

        Each of the two texts has at most ``width`` characters.
        """
        at = len(self.tokens) - 1 - distance
        join = " " if self.vocab.kind in ("word", "sentence", "id") else ""
        window = self.tokens[max(0, at - width) : at + width + 1]
        words, here = [readable_token(self.vocab, i) for i in window], min(at, width)
        before, after = join.join(words[:here]) + join, join + join.join(words[here + 1 :])
        return before[-width:], words[here], after[:width]

    def to_json(self, spans: np.ndarray) -> dict[str, Any]:
        """Returns the position, the token, and each head's largest weights as a JSON object.

        ``spans`` [L,N] are the mean distances of all heads.
        """
        heads, token = [], lambda d: readable_token(self.vocab, self.tokens[-1 - d])
        for layer, head in self.heads:
            x = self.probabilities[layer, head]
            listed = [
                {"distance": d, "probability": round(float(x[d]), 6), "token": token(d)}
                | {"text": "".join(self.text_around(d, 30))}
                for d in self.largest(layer, head)
            ]
            span = round(float(spans[layer, head]), 3)
            heads.append({"layer": layer, "head": head, "mean_distance": span, "largest": listed})
        return {"position": self.position, "token": token(0), "heads": heads}


def readable_token(vocab: Vocab, token: int) -> str:
    """Returns a token as printable text, with ``␣`` for a space and escapes for other bytes."""
    symbol = vocab.symbols[int(token)]
    if vocab.kind == "byte":
        symbol = bytes([int(symbol)]).decode("ascii", "backslashreplace")
    symbol = symbol.replace(" ", "␣")
    return symbol if symbol.isprintable() else symbol.encode("unicode_escape").decode()


def averages(about: dict[str, str], found: Averages):
    """Draws attention with a row per head and a column per distance, and the mean distances.

    ``about`` has a text about ``model`` and one about ``data``, which the title shows.
    """
    from matplotlib.colors import LogNorm

    n_layer, n_head = found.spans.shape
    rows = n_layer * n_head
    figure = new_figure(11, min(max(2.4 + 0.2 * rows, 4), 15))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    edges = _edges(found.n_keys)
    x = found.binned(found.attention, edges).reshape(rows, -1)
    norm = LogNorm(x.max() * 1e-4, x.max(), clip=True)
    image = left.pcolormesh(edges, np.arange(rows + 1) - 0.5, x, norm=norm, rasterized=True)
    _distance_axis(left, found.n_keys)
    left.invert_yaxis()
    for axes, colour in ((left, "white"), (right, "0.8")):
        for layer in range(1, n_layer):
            axes.axhline(layer * n_head - 0.5, color=colour, lw=0.8)
    shown = range(0, rows, -(-rows // 48))  # at most 48 labels fit
    left.set_yticks(shown, ["{}.{}".format(*divmod(row, n_head)) for row in shown], fontsize=8)
    left.set_ylabel("layer.head")
    right.barh(np.arange(rows), found.spans.reshape(-1), color="0.55", height=0.8)
    right.set_xlabel("mean distance\n(tokens)")
    size = {"pad": 0.02, "shrink": 0.9, "aspect": 25 + rows / 2}
    figure.colorbar(image, ax=left, location="left", label="mean probability of one key", **size)
    _title(figure, f"Attention by distance, mean of {found.queries:,} tokens", about)
    return figure


def terms(about: dict[str, str], found: Averages):
    """Draws the softmax of each single term by distance, averaged over the heads of a layer."""
    import matplotlib

    figure = new_figure(11, 7)
    panels = figure.subplots(2, 2, sharex=True, sharey=True).reshape(-1)
    edges = _edges(found.n_keys)
    centres = (edges[:-1] + edges[1:] - 1) / 2
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, len(found.spans)))
    all_terms = found.binned(found.attention.mean(axis=(0, 1)), edges)
    for axes, letter in zip(panels, sorted(found.terms), strict=False):
        by_layer = found.binned(found.terms[letter].mean(axis=1), edges)
        for layer, (x, colour) in enumerate(zip(by_layer, colours, strict=True)):
            axes.plot(centres, x, color=colour, lw=1.2, label=f"layer {layer}")
        axes.plot(centres, all_terms, color="black", lw=1, ls=":", label="all terms, all heads")
        axes.set_yscale("log")
        axes.set_title(TERMS[letter], fontsize=10, loc="left")
        axes.grid(alpha=0.3)
        _distance_axis(axes, found.n_keys)
    for axes in panels[::2]:
        axes.set_ylabel("mean probability of one key")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    _title(figure, "Each term of the score through its own softmax, mean of heads", about)
    return figure


def heads(about: dict[str, str], found: Averages, attention: PositionAttention):
    """Draws the attention of some heads from one token to earlier tokens. Lists large weights."""
    figure = new_figure(13, 1.1 + 2.5 * len(attention.heads))
    panels = figure.subplots(len(attention.heads), 2, squeeze=False, width_ratios=[3, 2])
    for (layer, head), (axes, listed) in zip(attention.heads, panels, strict=True):
        x = attention.probabilities[layer, head]
        axes.vlines(np.arange(len(x)), 0, x, color="C0", lw=1)
        axes.set(xlim=(len(x), -len(x) / 20), ylim=(0, x.max() * 1.05), ylabel="probability")
        span = found.spans[layer, head]
        axes.set_title(f"layer {layer}, head {head}: mean distance {span:.0f} tokens", fontsize=10)
        listed.set_axis_off()
        lines = [f"{'prob.':>6} {'distance':>8}  the [token] in its text"]
        for d in attention.largest(layer, head):
            before, token, after = attention.text_around(d, 22)
            lines.append(f"{x[d]:6.3f} {d:8,}  {before:>22}[{token}]{after}")
        listed.text(0, 1, "\n".join(lines), transform=listed.transAxes, **_LIST)
    panels[-1, 0].set_xlabel("distance back to the attended token (tokens); 0 is the current token")
    before, token, _ = attention.text_around(0, 40)
    title = f"The widest heads at token {attention.position:,}, the last of …{before}[{token}]"
    _title(figure, title, about)
    return figure


def _edges(n_keys: int) -> np.ndarray:
    """Returns the bounds of bins of distances; bins of small distances are narrow."""
    return np.unique([0, *np.geomspace(1, n_keys, 100).round().astype(int)])


def _distance_axis(axes: "Axes", n_keys: int) -> None:
    """Sets an x axis for distances: logarithmic from 1 on, and linear between 0 and 1."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.5, base=2)
    ticks = [0, *(2**i for i in range((n_keys - 1).bit_length()))]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0, n_keys)
    axes.set_xlabel("distance (tokens)")


def _title(figure: Any, title: str, about: dict[str, str]) -> None:
    text = f"{title}\n{about['model']}\n{about['data']}"
    figure.suptitle(text, fontsize=10, x=0.01, ha="left", parse_math=False)
