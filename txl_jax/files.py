"""Writes bytes, JSON and CSV atomically, decodes text and JSON, and adds file names to errors."""

import codecs
import contextlib
import csv
import errno
import io
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from txl_jax.file_kinds import LOOKED_AT, not_text, wide_encoding
from txl_jax.paths import is_remote, store


def atomic_write(path: str, data: bytes) -> None:
    """Writes the whole file or nothing; an OSError names the file.

    Several processes can write a file at the same time; the file then has the data of the last one.
    Each process first writes its own temporary file, which is then renamed. An object in a bucket
    is replaced by one request.
    """
    with name_in_os_errors(path):
        if is_remote(path):
            store().pipe_file(path, data)
            return
        temporary = f"{path}.{secrets.token_hex(4)}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise


def append(path: str, data: bytes) -> None:
    """Appends all data to a file, or appends nothing and raises OSError, which names the file.

    An object in a bucket cannot grow, so it is read and written again.
    """
    if is_remote(path):
        before = b""
        with name_in_os_errors(path), contextlib.suppress(FileNotFoundError):
            before = store().cat_file(path)
        atomic_write(path, before + data)
        return
    with name_in_os_errors(path), open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # /dev/full cannot be truncated
                file.truncate(size)
            raise


def written_as(name: str) -> str:
    """Returns the final name of a file, given this name or the name of its temporary file."""
    return re.sub(r"(\.[0-9a-f]{8})?\.tmp$", "", name)


def write_json(path: str, value: Any) -> None:
    """Writes indented JSON atomically in UTF-8. Characters that UTF-8 cannot encode are escaped."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    atomic_write(path, text.encode(errors="backslashreplace") + b"\n")


def write_csv(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes one or more rows with equal keys as CSV, atomically; the first line has the keys."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(path, text.getvalue().encode())


_OTHER_MARKS = {
    # UTF-32 is first, because its little-endian mark begins with that of UTF-16
    **{codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"},
    **{codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"},
}


def mark_size(start: bytes) -> int:
    """Returns how many bytes of a file are its byte order mark in UTF-8: 3, or 0 without one.

    ``start`` is the file or its first 4 bytes. Raises ValueError for the mark of UTF-16 or UTF-32.
    The caller must put the file's name before the message.
    """
    for mark, name in _OTHER_MARKS.items():
        if start.startswith(mark):
            found = f"it begins with the byte order mark {mark.hex(' ').upper()}"
            raise ValueError(f"is {name} text, not UTF-8 ({found}); save it as UTF-8")
    return len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0


def _not_utf8(data: bytes, at: int) -> str:
    byte = f"byte {at} is 0x{data[at]:02x}"
    if kind := not_text(data[:LOOKED_AT]):
        return f"is {kind}, not text ({byte}); name a text file"
    if name := wide_encoding(data):
        return f"is {name} text without a byte order mark, not UTF-8 ({byte}); save it as UTF-8"
    if data[at] == 0:
        fix = "remove the character, or name another file"
        return f"has a NUL character ({byte}), which no text has; {fix}"
    return f"is not UTF-8 text ({byte}); save it as UTF-8"


def decode_text(data: bytes, errors: str = "strict") -> str:
    r"""Returns the text of a file in UTF-8, without a byte order mark.

    Line ends such as ``\r\n`` do not change. ``errors`` is the argument of ``bytes.decode``. Raises
    ValueError for other encodings, and with ``strict`` also for NUL characters. The caller must put
    the file's name before the message.
    """
    start = mark_size(data[:4])
    if errors == "strict" and (at := data.find(0)) >= 0:
        raise ValueError(_not_utf8(data, at))
    try:
        return data[start:].decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(data, start + error.start)) from error


def parse_json(data: bytes) -> Any:
    """Returns the value in the bytes of a JSON file.

    Raises ValueError for bytes that are not JSON. The caller must put the file's name before the
    message.
    """
    try:
        return json.loads(decode_text(data))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from error


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Returns the object in the bytes of a JSON file. Raises ValueError like :func:`parse_json`."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise ValueError("is JSON, but not an object {...}")
    return value


@contextlib.contextmanager
def name_in_os_errors(path: str) -> Iterator[None]:
    """Adds the file's name to an OSError, because Python's error for a full disk has no name.

    The errors of a bucket, which are of many types, become an OSError.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or is_remote(path)):
            raise
        reason = getattr(error, "strerror", None) or error
        raise OSError(getattr(error, "errno", None), f"cannot write: {reason}", path) from error


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_failure_reason(error: Exception) -> str:
    """Returns in one line why a write failed, from an error number or from tensorstore's text."""
    text = str(error)
    found = re.search(r"os_error_code='(\d+)|OS error (\d+)", text)
    number = getattr(error, "errno", None) or (int(found[1] or found[2]) if found else None)
    if number in _DISK_FULL or any(os.strerror(full) in text for full in _DISK_FULL):
        return "the disk is full"
    if number is not None:
        return os.strerror(number)
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0][:300]}"
