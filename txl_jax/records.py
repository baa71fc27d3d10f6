"""Reads, appends and truncates files with a JSON object on each line, such as ``metrics.jsonl``."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from txl_jax import files
from txl_jax.files import atomic_write
from txl_jax.paths import path


def append(metrics_path: str, *records: Mapping[str, Any]) -> None:
    """Appends all records to a file, or appends none and raises OSError, which names the file."""
    files.append(metrics_path, b"".join(_line(record) + b"\n" for record in records))


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode()


def append_new(metrics_path: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Adds the records that the file does not have, as :func:`append` does."""
    kept = path(metrics_path)
    known = set(kept.read_bytes().split(b"\n")) if kept.exists() else set()
    append(metrics_path, *(r for r in records if _line(r) not in known))


def truncate(metrics_path: str, step: int, rewritten: str | None) -> None:
    """Removes the records after ``step`` and a half-written last line; at step 0 removes all lines.

    Records of the kind ``rewritten`` are removed at ``step`` too. Lines that are not records are
    kept.
    """
    kept = []
    if step and path(metrics_path).exists():
        with path(metrics_path).open("rb") as file:
            for line in file:
                record = _parsed(line)
                stays = record is not None or line.endswith(b"\n")
                if is_record(record):
                    stays = record["step"] <= step - (record["kind"] == rewritten)
                if stays:
                    kept.append(line.rstrip(b"\n") + b"\n")
    atomic_write(metrics_path, b"".join(kept))


def is_record(value: Any) -> bool:
    """Whether a JSON value is a record of training, with a kind and a step."""
    known = isinstance(value, dict) and isinstance(value.get("kind"), str)
    return known and type(value.get("step")) is int and value["step"] >= 0


def _parsed(line: bytes) -> Any:
    """Returns the JSON value of a line, or ``None`` if the line is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read_counted(
    source: str | os.PathLike[str], accepts: Callable[[Any], bool] = is_record
) -> tuple[list[dict[str, Any]], int]:
    """Returns the accepted objects of a file with one per line, and the number of skipped lines.

    A last line that is not JSON and has no line end is not counted, because a run might be writing
    this line.
    """
    found, skipped = [], 0
    with path(os.fsdecode(source)).open("rb") as file:
        for line in file:
            value = _parsed(line)
            if accepts(value):
                found.append(value)
            elif value is not None or line.endswith(b"\n"):
                skipped += bool(line.strip())
    return found, skipped


def skipped_lines(source: str | os.PathLike[str], count: int) -> str:
    """Returns a sentence about the lines that :func:`read_counted` skipped."""
    lines = "line was" if count == 1 else "lines were"
    why = "damaged, or no record of a run"
    return f"{os.fsdecode(source)}: {count:,} {lines} skipped ({why})"


def plain(value: Any) -> Any:
    """Converts NumPy and JAX numbers to Python numbers, and non-finite numbers to None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
