"""Reads the text of a corpus as bytes of files, before the corpus is prepared."""

import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from txl_jax.config.folders import FROM_THE_HUB, expanded
from txl_jax.data.codecs import decode_utf8
from txl_jax.data.errors import DataError
from txl_jax.data.sources.cache import json_hash, make_folder
from txl_jax.files import mark_size, parse_json_object
from txl_jax.messages import nearest, shown_path
from txl_jax.parallel.processes import print_once
from txl_jax.paths import BUCKETS, is_remote, store
from txl_jax.paths import path as bucket_path

SPLITS = ("train", "valid", "test")
SAMPLES = ("sample.txt", "sample.npy", "sample.starts.npy")  # a run writes these in its workdir
RECORDS = (
    *("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "evaluation.json", "config.json"),
    *("vocab.json", "start.json", "autotuned.json", "speed.json", "recl_gains.csv"),
    *(f"{mode}.json" for mode in ("ablation", "attention", "context", "probe", "recl", "sweep")),
    *(f"{mode}.csv" for mode in ("ablation", "attention", "context", "probe", "recl", "sweep")),
)
"""Files that a run writes in its workdir, with suffixes that files of texts can have too."""
_OF_SYSTEMS = ("__macosx", "thumbs.db", "desktop.ini")
BESIDE = ("symbols.json", "meta.pkl", "1b_word_vocab.txt", "{}.starts.npy")
"""Files with these names beside a copied file of a bucket are copied too; ``{}`` is its stem."""
BLOCK = 256 * 1024  # the number of bytes that are read at a time


@dataclasses.dataclass(frozen=True)
class ByteRange:
    """A part of a file; like bytes, it has a length and can be sliced."""

    path: Path
    span: range

    @classmethod
    def whole(cls, path: Path) -> "ByteRange":
        """Returns the range of a file's bytes after its byte order mark, if it has one.

        Raises DataError if the file is unreadable, or is in UTF-16 or UTF-32.
        """
        with opened(path) as file:
            try:
                start = mark_size(file.read(4))
            except ValueError as error:
                raise DataError(f"{path}: {error}") from None
            return cls(path, range(start, os.fstat(file.fileno()).st_size))

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, part: slice) -> "ByteRange":
        return ByteRange(self.path, self.span[part])


Text = Sequence[ByteRange | bytes]  # parts of files, and bytes between them


@dataclasses.dataclass(frozen=True)
class Source:
    """The files and settings that determine the text of a corpus.

    ``counts`` has the published counts, with keys such as ``("tokens", "train")``; a value is a
    range if the count is not known exactly.
    """

    name: str
    files: Mapping[str, Path]  # by a name that does not depend on the folder
    splits: Mapping[str, Text]
    counted: tuple[str, ...] = ("train",)  # splits whose text decides the vocabulary
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings of the splits
    published: bool | None = False  # whether files are the published ones; None: unknown
    label: str = ""  # describes the text in reports
    counts: Mapping[tuple[str, str], int | range] = dataclasses.field(default_factory=dict)
    decode: Callable[[Iterable[bytes]], Iterator[bytes]] | None = None  # converts files to text
    vocab_file: Path | None = None  # the file that lists the vocabulary
    recorded: Mapping[str, str] = dataclasses.field(default_factory=dict)  # sha256 at the download
    separator: bytes | None = None  # ends each document
    sizes: Mapping[str, np.ndarray] | None = None  # bytes of each document, if no separator ends it
    records: bool = False  # whether each document is a record, which begins with a new word

    def __post_init__(self):
        for split in SPLITS:
            if not text_size(self.splits[split]):
                fix = "longer texts, more lines or documents (check separators), or files of splits"
                raise DataError(f"{self.label}: the {split} split is empty; give {fix}")

    def hash(self) -> str:
        """Returns the sha256 over names and texts of files; raises DataError if a download changed.

        Byte order marks are left out. A generated text has no files, so its bytes are hashed.
        """
        if not self.files:
            texts = [hashlib.sha256(b"".join(self.blocks(split))).hexdigest() for split in SPLITS]
            return hashlib.sha256("".join(texts).encode()).hexdigest()
        sums = {}
        for name, path in self.files.items():
            sums[name] = file_hash(path, start=ByteRange.whole(path).span.start)
            if sums[name] != self.recorded.get(name, sums[name]):
                fix = f"delete the folder {path.parent}, and the next run downloads it again"
                raise DataError(f"{path}: has changed since it was downloaded; {fix}")
        return json_hash(sums)

    @property
    def has_documents(self) -> bool:
        """Whether the text consists of documents."""
        return self.separator is not None or self.sizes is not None

    def documents(self, split: str, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yields the documents of a split, given the blocks of its text."""
        if self.sizes is not None:
            return cut_at(blocks, self.sizes[split])
        assert self.separator is not None
        return cut_after(blocks, self.separator)

    def blocks(self, split: str) -> Iterator[bytes]:
        """Yields the text of a split in blocks of about :data:`BLOCK` bytes."""
        parts = read(self.splits[split])
        return merge_small(self.decode(parts) if self.decode else parts)

    def size(self, split: str) -> int | None:
        """Returns the number of bytes of a split's text, or ``None`` if its files are decoded."""
        return None if self.decode else text_size(self.splits[split])


def check_utf8(files: Iterable[Path]) -> None:
    """Raises DataError, with the file and the byte, if a file is not UTF-8 or has a NUL."""
    for path in files:
        size = ByteRange.whole(path).span.stop
        for _ in decode_utf8(read([ByteRange(path, range(size))]), str(path)):
            pass


def split_files(folder: Path, pattern: str, label: str) -> dict[str, Path] | None:
    """Returns the file of each split in a folder, or ``None`` if all are missing.

    In ``pattern``, such as ``ptb.{}.txt``, the split replaces ``{}``. Raises DataError if only some
    of the files are missing.
    """
    files = {split: folder / pattern.format(split) for split in SPLITS}
    missing = [file.name for file in files.values() if not is_file(file)]
    if 0 < len(missing) < len(files):
        present = next(file.name for file in files.values() if file.name not in missing)
        raise DataError(f"{label} has {present} but no {missing[0]}")
    return None if missing else files


def text_size(text: Text) -> int:
    """Returns the number of bytes of a text."""
    return sum(map(len, text))


def read(text: Text) -> Iterator[bytes]:
    """Yields the bytes of a text; raises DataError if a file is unreadable or became shorter."""
    for piece in text:
        if isinstance(piece, bytes):
            yield piece
            continue
        with opened(piece.path) as file:
            file.seek(piece.span.start)
            left = len(piece)
            while left and (block := file.read(min(left, BLOCK))):
                yield block
                left -= len(block)
        if left:
            fault = f"became {left:,} bytes shorter while it was read"
            raise DataError(f"{piece.path}: {fault}; try again")


def cut_at(blocks: Iterable[bytes], sizes: Iterable[int]) -> Iterator[bytes]:
    """Yields consecutive parts of a text; ``sizes`` are their numbers of bytes."""
    held, rest = bytearray(), iter(blocks)
    for size in sizes:
        while len(held) < size:
            held += next(rest)
        yield bytes(held[:size])
        del held[:size]
    assert next(rest, None) is None, "sizes are those of the whole text"


def cut_after(blocks: Iterable[bytes], mark: bytes) -> Iterator[bytes]:
    """Yields the parts of a text that end with ``mark``, and the rest if there is one."""
    held = bytearray()
    for block in blocks:
        looked_at = max(len(held) - len(mark) + 1, 0)
        held += block
        begin = 0
        while (at := held.find(mark, max(begin, looked_at))) >= 0:
            yield bytes(held[begin : at + len(mark)])
            begin = at + len(mark)
        del held[:begin]
    if held:
        yield bytes(held)


def merge_small(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the bytes in blocks of at least :data:`BLOCK` bytes, except for the last block."""
    held = bytearray()
    for part in parts:
        held += part
        if len(held) >= BLOCK:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def slice_text(text: Text, start: int, stop: int) -> list[ByteRange | bytes]:
    """Returns the bytes ``start`` .. ``stop - 1`` of a text."""
    found: list[ByteRange | bytes] = []
    for part in text:
        found.append(part[max(start, 0) : max(stop, 0)])
        start, stop = start - len(part), stop - len(part)
    return [part for part in found if len(part)]


def join_files(files: Sequence[Path]) -> list[ByteRange | bytes]:
    """Returns the text of all files in order; adds a line end between files if it is missing."""
    text: list[ByteRange | bytes] = []
    for piece in filter(len, map(ByteRange.whole, files)):
        last = b"".join(read([part[-1:] for part in text[-1:]]))
        text += [piece] if last in (b"\n", b"") else [b"\n", piece]
    return text


def files_in(folder: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """Returns the wanted files of a folder, sorted, without hidden files and files of a run.

    A folder of texts can also be the workdir of a run. The files that the run wrote there are not
    texts.
    """
    found = [path for path in sorted(folder.iterdir()) if not hidden(path.name)]
    found = [path for path in found if wanted(path) and is_file(path)]
    if not _is_workdir(folder):
        return found
    if samples := [path.name for path in found if path.name in SAMPLES]:
        say_once(f"{folder}: left out {' and '.join(samples)}, which the run in this folder wrote")
    return [path for path in found if path.name not in (*SAMPLES, *RECORDS)]


def hidden(name: str) -> bool:
    """Whether a file, or a folder in its path, is hidden or made by an operating system."""
    return any(part.startswith(".") or part in _OF_SYSTEMS for part in Path(name.lower()).parts)


@functools.cache
def say_once(text: str) -> None:
    """Prints lines about the data on standard error in process 0, if not printed before."""
    print_once(text, sys.stderr)


def _is_workdir(folder: Path) -> bool:
    """Whether a folder has the record of a run, see :mod:`txl_jax.checkpoint.workdir`."""
    try:
        record = parse_json_object((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return all(isinstance(record.get(key), dict) for key in ("model", "data", "train"))


def file_hash(path: Path, kind: str = "sha256", start: int = 0) -> str:
    """Returns the hash of a file from byte ``start``; raises DataError if it is unreadable."""
    with opened(path) as file:
        file.seek(start)
        return hashlib.file_digest(file, kind).hexdigest()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file; an OSError while reading becomes a DataError that names the file."""
    with read_errors(path), open(path, "rb") as file:
        yield file


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Converts an OSError while reading a file to a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def local_copy(address: str, cache: Path) -> Path | None:
    """Returns a local copy of an object or folder in a bucket, or ``None`` if it does not exist.

    A local copy can be memory-mapped. It is made again only if a name, size or generation of the
    objects has changed.
    """
    bucket_path(address)  # raises an error if the bucket cannot be used
    bucket, root = store(), address.removeprefix(BUCKETS).rstrip("/")
    parent, name = os.path.split(root)
    names = [root]
    if bucket.isfile(root):
        stem = os.path.splitext(name)[0]
        names += [os.path.join(parent, beside.format(stem)) for beside in BESIDE]
    found = {key: info for one in names for key, info in bucket.find(one, detail=True).items()}
    found = {key: info for key, info in found.items() if not key.endswith("/")}
    if not found:
        return None
    state = [[key, info["size"], info.get("generation")] for key, info in sorted(found.items())]

    def fill(folder: Path) -> None:
        size = sum(info["size"] for info in found.values())
        print_once(f"copying {address}: {size / 1e6:,.1f} MB", sys.stderr)
        for key in found:
            relative = PurePosixPath(key.removeprefix(f"{parent}/"))
            if relative.is_absolute() or ".." in relative.parts:
                fault = "no local file can have this name; rename the object"
                raise DataError(f"{BUCKETS}{key}: {fault}")
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            bucket.get_file(key, str(folder / relative))

    return make_folder(cache / "copies" / json_hash(state)[:20], fill) / name


def existing_path(path: str, cache: Path, key: str = "data.path") -> Path:
    """Returns the path of a file or folder; raises DataError or ConfigError if there is none.

    A path inside the current folder is returned as a relative path, because messages and the label
    of the corpus show it. An object or folder of a bucket is first copied to the folder ``cache``.
    """
    if is_remote(path):
        if (copy := local_copy(path, cache)) is None:
            raise DataError(f"{key} = {path!r}: there is no such object or folder")
        return copy
    found = Path(shown_path(str(expanded(path, f"config key {key}"))))
    named = f"{key} = {shown_path(path)!r}"
    with read_errors(found):
        if found.is_file() or found.is_dir():
            return found
        if found.exists():  # a pipe, which can be read only once, or a device
            fix = "write the text to a regular file and name that file"
            raise DataError(f"{named}: is neither a regular file nor a folder; {fix}")
        beside = [other.name for other in found.parent.iterdir()] if found.parent.is_dir() else []
    fix = ""
    if near := nearest(found.name, [name for name in beside if name != found.name]):
        fix = f"; the nearest is {str(found.with_name(near))!r}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not found.parent.is_dir():
        fix = f"; {FROM_THE_HUB}"
    if any(mark in path for mark in "*?["):
        fix = "; patterns are not expanded: name a folder of the files, or of links to them"
    raise DataError(f"{named}: there is no such file or folder{fix}")


def name_of(found: Path, given: str) -> str:
    """Returns the name of a path for messages; for a copy, the address that was ``given``."""
    return given.rstrip("/") if is_remote(given) else str(found)


def is_file(path: Path) -> bool:
    """Whether a path is a regular file; raises DataError for a link to a missing file."""
    with read_errors(path):
        if path.is_symlink() and not path.exists():
            fix = "remove the link, or copy the file there"
            raise DataError(f"{path}: is a link to a file that does not exist; {fix}")
        return path.is_file()
