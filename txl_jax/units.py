"""The units of a mean loss: nats per token, bits per character and perplexity."""

import math
from typing import Literal

Unit = Literal["bpc", "ppl"]
UNIT_NAMES = {"bpc": "bits per character", "ppl": "perplexity"}


def in_unit(loss: float, unit: Unit) -> float:
    """Converts nats per token to bits per character or perplexity (infinite on overflow)."""
    if unit == "bpc":
        return loss / math.log(2)
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def format_value(value: float, unit: Unit) -> str:
    """Formats a value with three decimals for bits per character, and two for perplexity."""
    return f"{value:.3f}" if unit == "bpc" else f"{value:.2f}"
