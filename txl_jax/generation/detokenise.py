"""Ordinary text from WikiText's tokens: spaces and hyphens where a reader expects them."""

import re

_REPLACEMENTS = [
    (re.compile(r" @([-,.–])@ "), r"\1"),
    (re.compile(r'" ?([^"\n]*?) ?"'), r'"\1"'),
    (re.compile(r" ([,.;:!?%)\]}…]|'(?:s|S|re|ve|ll|d|m|t)\b|n't\b)"), r"\1"),
    (re.compile(r"([(\[{$£€#]) "), r"\1"),
]


def detokenise(text: str) -> str:
    """The text as it was before WikiText split it; each line by itself.

    ``10 @,@ 000`` becomes 10,000 and ``well @-@ known`` well-known, and added spaces around marks
    are removed. What the split lost (which of two quotation marks opens) is guessed.
    """
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text
