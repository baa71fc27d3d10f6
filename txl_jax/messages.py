"""Formats values and errors for messages to the user: on one line, and truncated if too long."""

import contextlib
import dataclasses
import difflib
import errno
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


class UserError(Exception):
    """An error that the user can correct. The command prints it without a traceback.

    The command prints one line for the message, and one for each of ``details``.
    """

    def __init__(self, *args: object, details: Sequence[str] = ()):
        super().__init__(*args)
        self.details = tuple(details)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self.details])


LONGEST_VALUE, LONGEST_MESSAGE = 200, 2000
"""The largest numbers of characters that are shown of a value or a word, and of a message."""


def truncate(text: str, longest: int = LONGEST_VALUE) -> str:
    """Returns ``text``, with the middle replaced by a count of its characters if it is too long."""
    if len(text) <= longest:
        return text
    kept = longest // 2
    return f"{text[:kept]}... [{len(text) - 2 * kept:,} characters left out] ...{text[-kept:]}"


def short_repr(value: object) -> str:
    """Returns ``repr(value)``, truncated."""
    return truncate(repr(value))


def fields_repr(self: Any) -> str:
    """Formats a dataclass in one line, arrays by dtype and shape; serves as ``__repr__``."""
    names = [field.name for field in dataclasses.fields(self)]
    values = ", ".join(f"{name}={_brief(getattr(self, name))}" for name in names)
    return f"{type(self).__name__}({values})"


def _brief(value: Any) -> str:
    """Formats the value of a field: an array by dtype and shape, a long collection by its size."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{dtype}[{','.join(map(str, shape))}]"
    if isinstance(value, Mapping | list | tuple):
        plain = len(value) <= 8 and all(isinstance(item, str | int | float) for item in value)
        if isinstance(value, Mapping) or not plain:
            return f"<{type(value).__name__} of {len(value)}>"
    return one_line(short_repr(value))


_as_flags = False


@contextlib.contextmanager
def arguments_as_flags() -> Iterator[None]:
    """Makes :func:`argument` write flags of the command line while this context is open."""
    global _as_flags
    before, _as_flags = _as_flags, True
    try:
        yield
    finally:
        _as_flags = before


def names_flags() -> bool:
    """Whether messages name flags of the command line, see :func:`arguments_as_flags`."""
    return _as_flags


def argument(name: str, value: object) -> str:
    """Formats an argument for a message: ``workdir=runs/x``, or ``--workdir=runs/x`` in a command.

    ``name`` is the flag's name without dashes. In Python, a setting's key has no ``config.``.
    """
    if _as_flags:
        return shlex.quote(f"--{name}={value}")
    return f"{name.removeprefix('config.')}={value}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most like a word, or ``None`` if no name is like it."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.65)
    return names[near[0]] if near else None


def nearest_or_all(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word: the nearest known name, or all names."""
    names = list(known)
    near = nearest(word, names)
    return f"the nearest is {near!r}" if near else f"there are {', '.join(names) or 'none'}"


def shown_path(path: str) -> str:
    """Returns a path relative to the current folder if the path is inside it."""
    if not os.path.isabs(path):
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def one_line(message: object) -> str:
    """Returns an error or a warning as one line of text, truncated."""
    text = re.sub(r"\s*[\r\n]\s*", " ", str(message).strip())
    text = re.sub(rf"\S{{{LONGEST_VALUE + 1},}}", lambda word: truncate(word[0]), text)
    return truncate(text, LONGEST_MESSAGE)


def error_text(error: object) -> str:
    """Returns an error as one line of text, and an indented line for each of its details."""
    if not isinstance(error, UserError) or not error.details:
        return one_line(error)
    return "\n  ".join(map(one_line, (error.args[0], *error.details)))


_ADVICE = {
    "check the path": (errno.ENOENT, errno.ENOTDIR),
    "check its permissions, or name another path": (errno.EACCES, errno.EPERM, errno.EROFS),
    "free some space, or name a path on another disk": (errno.ENOSPC, errno.EDQUOT),
    "name a file, not a folder": (errno.EISDIR,),
}


def describe_os_error(error: OSError, action: str) -> str:
    """Returns a message with the failed action (such as ``--mode=x``), file, reason and advice."""
    reason = error.strerror or str(error) or type(error).__name__
    name = short_repr(error.filename) if error.filename else None
    advice = next((text for text, codes in _ADVICE.items() if error.errno in codes), None)
    return ": ".join(filter(None, (action, name, reason))) + (f"; {advice}" if advice else "")
