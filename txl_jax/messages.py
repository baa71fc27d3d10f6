"""Formats values and errors for messages to the user: on one line, and truncated if too long."""

import errno
import os
import re

LONGEST_VALUE, LONGEST_MESSAGE = 200, 2000
"""The largest numbers of characters that are shown of a value or a word, and of a message."""


def truncate(text: str, longest: int = LONGEST_VALUE) -> str:
    """Returns ``text``, with the middle replaced by a count of its characters if it is too long."""
    if len(text) <= longest:
        return text
    kept = longest // 2
    return f"{text[:kept]}... [{len(text) - 2 * kept:,} characters left out] ...{text[-kept:]}"


def short_repr(value: object) -> str:
    """Returns ``repr(value)``, truncated; works even for an object whose ``repr`` fails."""
    try:
        return truncate(repr(value))
    except Exception as error:  # a user's class, or an integer of over 4300 digits
        return f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"


def one_line(message: object) -> str:
    """Returns an error or a warning as one line of text, truncated."""
    try:
        text = re.sub(r"\s*[\r\n]\s*", " ", str(message).strip())
    except Exception:  # from a user's exception class
        text = type(message).__name__
    text = re.sub(rf"\S{{{LONGEST_VALUE + 1},}}", lambda word: truncate(word[0]), text)
    return truncate(text, LONGEST_MESSAGE)


_ADVICE = {
    "check the path": (errno.ENOENT, errno.ENOTDIR),
    "check its permissions, or name another path": (errno.EACCES, errno.EPERM, errno.EROFS),
    "free some space, or name a path on another disk": (errno.ENOSPC, errno.EDQUOT),
    "name a file, not a folder": (errno.EISDIR,),
    "use a shorter path": (errno.ENAMETOOLONG,),
    "allow more open files with ulimit -n": (errno.EMFILE, errno.ENFILE),
    "the program that read the output has ended": (errno.EPIPE,),
}


def describe_os_error(error: OSError, action: str) -> str:
    """A message with the failed action (such as ``--mode=evaluate``), file, reason and advice."""
    reason = error.strerror or str(error) or type(error).__name__
    paths = [
        x for x in (error.filename, error.filename2) if isinstance(x, str | bytes | os.PathLike)
    ]
    names = " -> ".join(short_repr(os.fsdecode(path)) for path in paths)
    advice = next((text for text, codes in _ADVICE.items() if error.errno in codes), None)
    return ": ".join(filter(None, (action, names, reason))) + (f"; {advice}" if advice else "")
