"""Values and texts in messages for the user: on one line, never too long to read."""

import re

LONGEST_VALUE = 200
LONGEST_MESSAGE = 2000
"""Characters that are shown of a value or a word, and of a whole message."""


def shortened(text: str, longest: int = LONGEST_VALUE) -> str:
    """``text``, its middle replaced by the number of characters left out if it is too long."""
    if len(text) <= longest:
        return text
    kept = longest // 2
    return f"{text[:kept]}... [{len(text) - 2 * kept:,} characters left out] ...{text[-kept:]}"


def shown(value: object) -> str:
    """``repr(value)`` for a message, shortened; also of an object whose own ``repr`` fails."""
    try:
        return shortened(repr(value))
    except Exception as error:  # a class of the user's, or an integer of over 4300 digits
        return f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"


def one_line(message: object) -> str:
    """The text of an error or a warning on one line, its long words and the whole shortened."""
    try:
        text = re.sub(r"\s*[\r\n]\s*", " ", str(message).strip())
    except Exception:  # of an exception class of the user's
        text = type(message).__name__
    text = re.sub(rf"\S{{{LONGEST_VALUE + 1},}}", lambda word: shortened(word[0]), text)
    return shortened(text, LONGEST_MESSAGE)
