"""Reads the text of each record in a file of JSON, JSON lines, CSV, Parquet or Arrow.

Each text is a document. The setting ``data.field`` names the field with the text. Memory holds one
record at a time. Exceptions are a Parquet or Arrow table, of which it holds a batch of rows, and a
file of JSON, of which it holds all records.
"""

import codecs
import contextlib
import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from txl_jax.data.codecs import TO_UTF8
from txl_jax.data.errors import DataError
from txl_jax.data.sources.cache import write_errors
from txl_jax.data.sources.source import BLOCK
from txl_jax.data.sources.stored import Stored, check_unpacked_size
from txl_jax.file_kinds import file_kind
from txl_jax.files import parse_json, parse_json_object
from txl_jax.library_errors import import_optional
from txl_jax.messages import argument, nearest, one_line, short_repr

LONGEST = 64 << 20
"""The largest number of bytes of a line, and of a file that is one array of JSON."""
ROWS = 256  # the number of rows of a Parquet table that are read at a time
JSON_LINES, WHOLE_JSON = (".jsonl", ".ndjson", ".ldjson", ".jsonlines", ".jl"), ".json"
TABLES = (".parquet", ".arrow", ".feather")
STATE = "state.json"  # lists the files of a folder that Hugging Face's datasets saved
OTHERS = (STATE, "dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # have no text


def texts(stored: Stored, field: str, separator: str, folder: Path) -> Iterator[bytes]:
    """Yields the text of each record, unless it is empty, in UTF-8 with ``separator`` at its end.

    ``folder`` is for temporary files. Raises DataError with file and line for a bad record.
    """
    for where, text in READERS[stored.suffix](stored, field, folder):
        if not isinstance(text, str):
            fix = f"correct or remove the record, or set {argument('config.data.field', 'NAME')}"
            raise DataError(f"{where}: {field!r} is {short_repr(text)}, not a text; {fix}")
        text = text.lstrip("\ufeff")
        if "\0" in text:
            raise DataError(f"{where}: has the character U+0000 (NUL); remove it")
        if text:
            try:
                yield (text.removesuffix(separator) + separator).encode()
            except UnicodeEncodeError as error:
                wrong = f"{text[error.start]!r} is half of a character (a lone surrogate)"
                raise DataError(f"{where}: {wrong}; write the character") from None


Records = Iterator[tuple[str, Any]]  # where a record is, and its text


def _json_lines(stored: Stored, field: str, folder: Path) -> Records:
    with stored.opened() as file:
        for number, line in enumerate(_lines(file, str(stored)), 1):
            where = f"{stored}, line {number}"
            if line.strip():
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    fix = "write an object in each line, or let the name of one array end in .json"
                    raise DataError(f"{where}: is not JSON ({error}); {fix}") from None
                for record in value if isinstance(value, list) else [value]:
                    yield where, _field(record, field, where)


def _json(stored: Stored, field: str, folder: Path) -> Records:
    """Reads one array of records, one record, one object with a list of records, or JSON lines."""
    with stored.opened() as file:
        start = file.read(LONGEST + 1)
    is_array = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
    if len(start) > LONGEST and is_array:
        fix = f"write one object in each line:  jq -c '.[]' {stored.name}"
        raise DataError(f"{stored}: is one array of more than {LONGEST:,} bytes; {fix}")
    try:
        value = parse_json(start)
    except ValueError as error:
        if is_array:
            raise DataError(f"{stored}: {error}") from None
        del start
        yield from _json_lines(stored, field, folder)
        return
    if isinstance(value, dict) and field not in value:
        lists = [x for x in value.values() if isinstance(x, list) and x and isinstance(x[0], dict)]
        value = lists[0] if len(lists) == 1 else value
    records = value if isinstance(value, list) else [value]
    texts_alone = all(isinstance(record, str) for record in records)
    for number, record in enumerate(records, 1):
        where = f"{stored}, record {number}"
        yield where, record if texts_alone else _field(record, field, where)


def is_json(start: bytes) -> bool:
    """Whether a text begins as JSON: an array of objects, or an object in one or several lines."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(json.loads(start.partition(b"\n")[0]), dict):
            return True
    return bool(re.match(rb'(\xef\xbb\xbf)?\s*(\[\s*\{\s*"|\{\s*\n\s*"[^"\n]*"\s*:)', start))


def _field(record: Any, field: str, where: str) -> Any:
    if not isinstance(record, dict):
        fix = f'write an object such as {{"{field}": "…"}}'
        raise DataError(f"{where}: is {short_repr(record)}, not an object; {fix}")
    if field not in record:
        raise _no_field(field, list(record), where)
    return record[field]


def _no_field(field: str, names: list[str], where: str) -> DataError:
    if field in names:
        return DataError(f"{where}: names {field!r} twice; give each column a name of its own")
    fix = argument("config.data.field", nearest(field, names) or "NAME")
    known = f", but {one_line(', '.join(map(str, names)))}" if names else ""
    return DataError(f"{where}: has no field {field!r}{known}; name the field of the text: {fix}")


def _csv(stored: Stored, field: str, folder: Path) -> Records:
    limit, rows = csv.field_size_limit(LONGEST), csv.reader([])
    where = lambda: f"{stored}, line {rows.line_num}"
    try:
        with stored.opened() as file:
            lines = _lines(file, str(stored))
            first = next(lines, "")
            delimiter = _delimiter(first, field, "," if stored.suffix == ".csv" else "\t")
            rows = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
            names = next(rows, [])
            if names.count(field) != 1:
                raise _no_field(field, names, f"{stored}, line 1 (of column names)")
            for row in filter(None, rows):
                if len(row) != len(names):
                    fault = f"has {len(row)} values for {len(names)} columns"
                    fix = 'write a text with commas, line ends or quotes as "…", and " as ""'
                    raise DataError(f"{where()}: {fault}; {fix}")
                yield where(), row[names.index(field)]
    except csv.Error as error:
        fix = 'write " inside a text as "", and end a text that begins with " by another "'
        raise DataError(f"{where()}: is not CSV ({error}); {fix}") from None
    finally:
        csv.field_size_limit(limit)


def _delimiter(first: str, field: str, usual: str) -> str:
    """Returns the delimiter with which the first line names ``field``, or else a likely one."""
    for delimiter in (usual, ";", "\t", "|", ","):
        with contextlib.suppress(csv.Error):
            if field in next(csv.reader([first], delimiter=delimiter), []):
                return delimiter
    return max((usual, ";", "\t", "|"), key=first.count)  # the error then shows these names


def _lines(file: IO[bytes], where: str) -> Iterator[str]:
    """Yields lines with their ends; raises DataError for a line that is too long or not UTF-8."""
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            fault = f"has more than {LONGEST:,} bytes"
            raise DataError(f"{where}, line {number}: {fault}; divide the line")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            fault = f"is not UTF-8 ({error.reason})"
            raise DataError(f"{where}, line {number}: {fault}; {TO_UTF8}") from None
        yield text.removeprefix("\ufeff") if number == 1 else text


def _table(stored: Stored, field: str, folder: Path) -> Records:
    """Reads Parquet, or Arrow in its file or stream format; Arrow is memory-mapped."""
    fix = "run pip install '.[parquet]' in the project's folder"
    missing = DataError(f"{stored}: reading a table needs the package pyarrow; {fix}")
    pa = import_optional("pyarrow", missing)
    path, row = stored.path, 0
    if stored.member or stored.compression:
        path = folder / "table"
        with stored.opened() as file, write_errors(folder), open(path, "wb") as copy:
            while block := file.read(BLOCK):
                copy.write(block)
                check_unpacked_size(copy.tell(), stored.size, str(stored))
    try:
        for column in _columns(path, stored.suffix, field, str(stored)):
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if column.type not in (pa.string(), pa.large_string(), pa.string_view(), pa.null()):
                fault = f"{field!r} is a column of {column.type}, not of text"
                raise DataError(f"{stored}: {fault}; set data.field to a column of text")
            for text in column:
                row += 1
                yield f"{stored}, row {row}", text.as_py()
    except (pa.ArrowException, OSError) as error:
        kind = file_kind(stored.start()) or "of an unknown kind"
        fault = f"is {kind}, and cannot be read as {stored.suffix} ({one_line(error)})"
        raise DataError(f"{stored}: {fault}; get the file again, or correct its name") from None
    finally:
        if path != stored.path:
            path.unlink(missing_ok=True)


def _columns(path: Path, suffix: str, field: str, where: str) -> Iterator[Any]:
    """Yields a column of a table in batches."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if suffix == ".parquet":
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if names.count(field) != 1:
                raise _no_field(field, names, where)
            for group in range(table.num_row_groups):  # all groups at once take more memory
                for batch in table.iter_batches(ROWS, [group], [field], use_threads=False):
                    yield batch.column(0)
        return
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        names = reader.schema.names
        if names.count(field) != 1:
            raise _no_field(field, names, where)
        parts = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in parts:
            yield batch.column(names.index(field))


READERS: dict[str, Callable[[Stored, str, Path], Records]] = {
    **dict.fromkeys(JSON_LINES, _json_lines),
    **dict.fromkeys((".csv", ".tsv", ".tab", ".psv"), _csv),
    **dict.fromkeys(TABLES, _table),
    WHOLE_JSON: _json,
}
"""Functions that read the records of a file, by its suffix."""


def saved_files(folder: Path) -> list[str] | None:
    """Returns the Arrow files of a folder that ``datasets`` saved, or ``None`` for another folder.

    Only listed files count, because other Arrow files in the folder are a cache of ``datasets``.
    Raises DataError if a listed file is missing, or if the dataset is a selection of rows.
    """
    try:
        state = parse_json_object((folder / STATE).read_bytes())
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if state.get("_indices_data_files"):
        fix = "save dataset.flatten_indices() instead"
        raise DataError(f"{folder}: is a dataset with a selection of rows (indices); {fix}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        fault = f"{STATE} lists {missing[0]}, which is missing"
        raise DataError(f"{folder}: {fault}; copy that file too")
    return names
