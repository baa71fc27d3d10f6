"""Files written whole or not at all, and errors that name them."""

import contextlib
import json
import os
from collections.abc import Iterator
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


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Names the file in an OSError; a full disk alone says only that it is full."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror or error}", path) from error
