"""The units of a mean loss: nats per token, bits per byte or character, and perplexity."""

import math
from typing import Literal

Unit = Literal["bpb", "bpc", "ppl"]
"""The unit in which losses of a text are shown; the kind of its tokens determines it."""
UNIT_NAMES: dict[Unit, str] = {
    "bpb": "bits per byte",
    "bpc": "bits per character",
    "ppl": "perplexity",
}


def in_unit(loss: float, unit: Unit) -> float:
    """Converts nats per token to bits per token or perplexity (infinite on overflow)."""
    if unit != "ppl":
        return loss / math.log(2)
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def format_value(value: float, unit: Unit) -> str:
    """Formats bits with three decimals, and perplexity with two, or in powers of ten if large."""
    if unit != "ppl":
        return f"{value:.3f}"
    return f"{value:.2f}" if value < 1e6 else f"{value:.2e}"
