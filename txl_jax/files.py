"""Files written whole or not at all, and errors that name them."""

import contextlib
import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def write_whole(path: str, data: bytes) -> None:
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
    """:func:`write_whole` of a value as indented JSON."""
    write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_csv(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """:func:`write_whole` of rows of equal keys as CSV, the keys first; there is at least one."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Names the file in an OSError; a full disk alone says only that it is full."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror or error}", path) from error
