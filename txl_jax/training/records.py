"""``metrics.jsonl``: one JSON object per line, read, appended, cut back for a resumed run."""

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from txl_jax.files import naming, write_whole


def append(metrics_path: str, *records: Mapping[str, Any]) -> None:
    """Adds records, all of them or none; raises OSError, which names the file, where it cannot."""
    lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
    with naming(metrics_path), open(metrics_path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # no file that can be cut, /dev/full
                file.truncate(size)
            raise


def keep_until(metrics_path: str, step: int, remade: str | None) -> None:
    """Removes the records after ``step`` (all, if it is 0) and lines that are not whole.

    Those of the kind ``remade`` go at ``step`` already.
    """
    kept = []
    if step and os.path.exists(metrics_path):
        with open(metrics_path, "rb") as file:
            for line in file:
                record = _parsed(line)
                if record is None or record["step"] > step:
                    continue
                if record["step"] < step or record["kind"] != remade:
                    kept.append(line.rstrip(b"\n") + b"\n")
    write_whole(metrics_path, b"".join(kept))


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A record, or None where a killed process left a line half-written."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "step" in record else None


def read(metrics_path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, in order; a half-written line is left out."""
    with open(metrics_path, "rb") as file:
        return [record for line in file if (record := _parsed(line)) is not None]


def plain(value: Any) -> Any:
    """NumPy and JAX numbers as Python's own, numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
