"""Converts WikiText's tokens to ordinary text, with normal spaces and hyphens."""

import re

_REPLACEMENTS = [
    (re.compile(r" @([-,.–])@ "), r"\1"),
    (re.compile(r'" ?([^"\n]*?) ?"'), r'"\1"'),
    (re.compile(r" ([,.;:!?%)\]}…]|'(?:s|S|re|ve|ll|d|m|t)\b|n't\b)"), r"\1"),
    (re.compile(r"([(\[{$£€#]) "), r"\1"),
]


def detokenise(text: str) -> str:
    """Restores the text before WikiText's tokenisation, line by line.

    ``10 @,@ 000`` becomes 10,000, and ``well @-@ known`` becomes well-known. Spaces around
    punctuation are removed. The function guesses which of two quotation marks is the opening one.
    """
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text
