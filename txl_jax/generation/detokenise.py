"""WikiText's tokens as ordinary text: spaces and hyphens where a reader expects them."""

import re

_JOINED = re.compile(r" @([-,.–])@ ")
_BEFORE = re.compile(r" ([,.;:!?%)\]}…]|'(?:s|S|re|ve|ll|d|m|t)\b|n't\b)")
_AFTER = re.compile(r"([(\[{$£€#]) ")
_QUOTED = re.compile(r'" ?([^"\n]*?) ?"')


def detokenised(text: str) -> str:
    """Text as it was before WikiText split it at white space; a line is treated on its own.

    ``10 @,@ 000`` is 10,000, ``well @-@ known`` well-known, and spaces that the split put around
    marks are gone. What the split lost (which of two quotation marks opens) is guessed.
    """
    return "\n".join(_line(line) for line in text.split("\n"))


def _line(line: str) -> str:
    line = _JOINED.sub(r"\1", line)
    line = _QUOTED.sub(r'"\1"', line)
    return _AFTER.sub(r"\1", _BEFORE.sub(r"\1", line))
