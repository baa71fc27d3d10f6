"""Values and texts in messages for the user: on one line, never too long to read."""

import errno
import os
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


_ADVICE = {
    "check the path": (errno.ENOENT, errno.ENOTDIR),
    "check its permissions, or name another path": (errno.EACCES, errno.EPERM, errno.EROFS),
    "free some space, or name a path on another disk": (errno.ENOSPC, errno.EDQUOT),
    "name a file, not a folder": (errno.EISDIR,),
    "use a shorter path": (errno.ENAMETOOLONG,),
    "allow more open files with ulimit -n": (errno.EMFILE, errno.ENFILE),
    "whatever read the output has ended": (errno.EPIPE,),
}


def of_system(error: OSError, doing: str) -> str:
    """An error of the operating system for the user: what was being done, to which file, advice.

    Args:
      error: its ``filename`` may be missing.
      doing: what the program was doing, such as ``--mode=evaluate``.
    """
    reason = error.strerror or str(error) or type(error).__name__
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if _is_path(name)]
    parts = [doing, *([" -> ".join(map(shown, names))] if names else []), reason]
    advice = next((text for text, codes in _ADVICE.items() if error.errno in codes), None)
    return ": ".join(parts) + (f"; {advice}" if advice else "")


def _is_path(name: object) -> bool:
    return isinstance(name, str | bytes | os.PathLike)
