"""Files written whole or not at all, errors that name them, and JSON objects read back."""

import contextlib
import csv
import errno
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def atomic_write(path: str, data: bytes) -> None:
    """Writes a file whole or not at all: who dies in here leaves the file that was there.

    Raises:
      OSError: it cannot be written; the text names it.
    """
    with naming(path):
        with open(path + ".tmp", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)


def write_json(path: str, value: Any) -> None:
    """:func:`atomic_write` of a value as indented JSON in UTF-8.

    A text with bytes that are not UTF-8 (``surrogateescape``), such as a file's name, is escaped.
    """
    try:
        data = json.dumps(value, indent=1, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        data = json.dumps(value, indent=1).encode()
    atomic_write(path, data + b"\n")


DEEPEST = 50
"""Levels of nesting in a JSON object that is read; what this program writes has fewer."""


def json_object(data: bytes) -> dict[str, Any]:
    """The object in the bytes of a JSON file.

    Raises:
      ValueError: there is none; the text says why and is to be read after the file's name.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
        _check_depth(value, DEEPEST)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from error
    except RecursionError:
        raise ValueError(f"is nested more than {DEEPEST} levels deep") from None
    if not isinstance(value, dict):
        raise ValueError("holds no JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has the key {twice!r} twice")
    return found


def _check_depth(value: Any, levels: int) -> None:
    """Raises RecursionError where lists and objects are nested deeper than so many levels."""
    if not isinstance(value, dict | list):
        return
    if not levels:
        raise RecursionError
    for inner in value.values() if isinstance(value, dict) else value:
        _check_depth(inner, levels - 1)


def write_csv(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """:func:`atomic_write` of rows of equal keys as CSV, the keys first; there is at least one."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(path, text.getvalue().encode())


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Names the file in an OSError; a full disk alone says only that it is full."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror or error}", path) from error


_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST = 300
"""Characters that are kept of an error without a number of the system; a library's can have
thousands."""


def why_not_written(error: Exception) -> str:
    """What kept something from being written, in one short line; a full disk is called that.

    ``error``: of Python's own calls or of tensorstore, which has the system's number in its text.
    """
    text = str(error)
    found = re.search(r"os_error_code='(\d+)|OS error (\d+)", text)
    number = getattr(error, "errno", None) or (int(found[1] or found[2]) if found else None)
    if number in _FULL or any(os.strerror(full) in text for full in _FULL):
        return "the disk is full"
    if number is not None:
        return os.strerror(number)
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0][:_LONGEST]}"
