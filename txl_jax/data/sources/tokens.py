"""Finds ``tokens``, a user's own arrays of ids, which are memory-mapped where they are.

A single file is cut into three splits. A folder has a file for each split; if it has no test file,
as with nanoGPT, the valid file is also the test split:

    ids.npy                           train ids | valid ids | test ids
    train.bin  val.bin                train, valid, and valid as test
    train.npy  valid.npy  test.npy    train, valid, test

For display, ``symbols.json`` beside the files lists the symbol of each id. nanoGPT's ``meta.pkl``
can take its place; it is never unpickled (:mod:`txl_jax.data.sources.plain_pickle`). An array
``ids.npy`` can have documents: they begin at the positions in ``ids.starts.npy`` beside it, or at
each ``data.document_separator``. If a folder has several arrays for one split, or several arrays
and none is named as a split, each array is a document. Those of a split, or of a text without
splits, are copied to one array in the cache.
"""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import DataConfig
from txl_jax.config.bounds import WORDS
from txl_jax.data.errors import DataError
from txl_jax.data.pieces import STARTS, Pieces, check_starts, flat_tokens, separated, split_edges
from txl_jax.data.sources import source
from txl_jax.data.sources.cache import json_hash, make_folder, write_errors, write_npy
from txl_jax.data.sources.plain_pickle import META, read_meta
from txl_jax.data.sources.source import SPLITS, file_hash, read_errors
from txl_jax.data.sources.splits import arrange, report, splits_named
from txl_jax.data.sources.text import OWN_SPLITS
from txl_jax.data.symbols import scan_ids
from txl_jax.data.vocab import Vocab
from txl_jax.file_kinds import LOOKED_AT, file_kind, is_text
from txl_jax.files import parse_json
from txl_jax.messages import argument

SUFFIXES = (".npy", ".bin")  # of arrays
SYMBOLS = "symbols.json"
NO_TEST = "; there is no test file, so the test split is the valid split"

HASHED_WHOLE = 64 << 20  # bytes; only samples of larger files are hashed
SAMPLES, SAMPLE = 64, 1 << 20  # the number of samples, evenly spaced, and their size in bytes
HEADER = 1024
"""The number of bytes of llm.c's header, and of the start that is checked for other headers."""
LLM_C: dict[int, tuple[int, np.dtype]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}
"""llm.c's magic numbers, each with the version and the type of ids (dev/data/data_common.py)."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFiles:
    """Arrays of ids on the disk."""

    files: Mapping[str, np.memmap | Pieces]  # by split; ``tokens`` is an array to cut
    splits: Mapping[str, np.ndarray | Pieces]
    folder: Path  # of the files
    label: str  # describes them in reports
    protocol: Mapping[str, Any]  # the settings that decided the splits

    def hash(self) -> str:
        """Returns the sha256 over the :func:`fingerprint`, the type and the starts of each file."""
        sums = dict[str, list[str]]()
        for name, split in self.files.items():
            ids: Any = flat_tokens(split)
            sums[name] = [fingerprint(Path(str(ids.filename))), ids.dtype.str]
            if isinstance(split, Pieces):
                sums[name].append(hashlib.sha256(np.asarray(split.starts, "<i8").data).hexdigest())
        return json_hash(sums)

    def vocab(self, size: int | None) -> Vocab:
        """Returns the vocabulary in ``symbols.json`` or ``meta.pkl``, or else of ``size`` ids.

        Without ``size``, the largest id decides the size. Raises DataError if an id is too large,
        or if ``size`` is not the number of symbols.
        """
        path, symbols = symbols_in(self.folder)
        if symbols is not None:
            if size not in (None, len(symbols)):
                what = f"data.vocab_size = {size}: {path} has {len(symbols):,} symbols"
                raise DataError(f"{what}; leave the setting out to use these")
            size = len(symbols)
        largest = self.largest_id(size or WORDS)
        try:
            return Vocab.from_ids(size or max(largest + 1, 2), symbols)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    def largest_id(self, vocab_size: int) -> int:
        """Returns the largest id; raises DataError, with file and offset, for a wrong id.

        A right id is from 0 to ``vocab_size`` - 1.
        """
        return max(_largest_id(flat_tokens(split), vocab_size) for split in self.files.values())

    def check(self, vocab: Vocab) -> None:
        """Raises DataError if ids or their symbols do not fit the vocabulary of a model."""
        self.largest_id(len(vocab))
        path, symbols = symbols_in(self.folder)
        if vocab.symbols == [str(n) for n in range(len(vocab))]:  # the model knows no symbols
            return
        for n, (own, of_model) in enumerate(zip(symbols or (), vocab.symbols, strict=False)):
            if own != of_model:
                fault = f"id {n} is {own!r} here and {of_model!r} in the model's vocabulary"
                fix = "write arrays with the ids of the model, and its symbols beside them"
                raise DataError(f"{path}: {fault}; {fix}")


def find(data: DataConfig, cache: Path, symbols: Sequence[str] | None = None) -> TokenFiles:
    """Finds the arrays that ``data.path`` names, or raises DataError.

    Several files are copied to one array in the ``cache`` if each file is a document; other files
    are not copied. ``symbols`` are those of a model's vocabulary; ``None`` reads the symbols beside
    the files. The setting ``data.document_separator`` can be one of the symbols.
    """
    if data.path is None:
        raise DataError("data.name = 'tokens': needs data.path, a .npy or .bin file or a folder")
    path = source.existing_path(data.path, cache)
    where = source.name_of(path, data.path)
    arrays = _arrays(path) if path.is_dir() else {}
    if len(arrays) == 1 and not splits_named(*arrays):
        [(name, path)] = arrays.items()  # perhaps beside its symbols or starts
        where = os.path.join(where, name)
    if path.is_file():
        tokens = _with_documents(open_tokens(path, data), data, symbols)
        return _cut(tokens, path.parent, where, data)
    sizes = {name: file.stat().st_size for name, file in arrays.items()}
    named, rest = arrange(sizes, where, lambda name: os.path.splitext(name)[0])
    report(where, named, rest, sizes)
    files = dict[str, np.memmap | Pieces]()
    for split, names in named.items():
        parts = [arrays[name] for name in names]
        if split and len(parts) == 1:
            files[split] = _with_documents(open_tokens(parts[0], data), data, symbols)
        else:
            files[split] = joined(parts, data, cache)
    if "" in files:
        return _cut(files[""], path, f"{where}, {len(arrays):,} files", data)
    if "valid" not in files:
        fix = "name one file in data.path to have it cut into splits"
        raise DataError(f"{where}: there is no valid.npy or valid.bin in this folder; {fix}")
    splits = {split: files.get(split, files["valid"]) for split in SPLITS}
    label = f"{where}{OWN_SPLITS}{'' if 'test' in files else NO_TEST}"
    return _checked(TokenFiles(files, splits, path, label, {}))


def _arrays(folder: Path) -> dict[str, Path]:
    """Returns the arrays in a folder by name, sorted, without files of starts."""
    wanted = lambda path: path.suffix.lower() in SUFFIXES and not path.name.endswith(STARTS)
    if found := source.files_in(folder, wanted):
        return {path.name: path for path in found}
    raise DataError(f"{folder}: there is no *.npy and no *.bin file in this folder")


def read_documents(
    path: Path, data: DataConfig, vocab_size: int, symbols: Sequence[str] | None = None
) -> list[np.ndarray]:
    """Returns the documents of a file, or all its ids as one document.

    If there is a file of starts, ``data.document_separator`` is ignored. ``symbols`` are those of
    :func:`find`. Raises DataError for an id that is not below ``vocab_size``.
    """
    tokens = open_tokens(path, data)
    if source.is_file(path.with_suffix(STARTS)):
        data = dataclasses.replace(data, document_separator=None)
    _largest_id(tokens, vocab_size)
    found = _with_documents(tokens, data, symbols)
    return list(found) if isinstance(found, Pieces) else [np.asarray(found)]


def _with_documents(
    tokens: np.memmap, data: DataConfig, symbols: Sequence[str] | None
) -> np.memmap | Pieces:
    """Returns an array, as documents if it has a separator or a file of starts."""
    path = Path(str(tokens.filename))
    beside, separator = path.with_suffix(STARTS), data.document_separator
    has_starts = source.is_file(beside)
    if has_starts and separator is not None:
        fault = f"the file {beside} gives the starts of documents too; remove it"
        raise DataError(f"data.document_separator = {separator!r}: {fault}, or leave the key out")
    if separator is not None:
        known, owner = symbols, "the model"
        if known is None:
            known, owner = symbols_in(path.parent)[1] or [], SYMBOLS
        return separated(tokens, _separator_id(separator, known, owner), str(path))
    if not has_starts:
        return tokens
    starts = _open_npy(beside)
    check_starts(starts, len(tokens), str(beside))
    return Pieces(tokens, starts.astype(np.int64), data.cross_documents)


def _separator_id(separator: str, known: Sequence[str], owner: str) -> int:
    if separator in known:
        return known.index(separator)
    if not (separator.isascii() and separator.isdigit() and len(separator) < 19):
        fault = f"is no id and no symbol of {owner}; give one"
        raise DataError(f"data.document_separator = {separator!r}: {fault}")
    return int(separator)


def joined(paths: Sequence[Path], data: DataConfig, cache: Path) -> Pieces:
    """Copies the ids of files to one array in the cache; returns it with a document per file."""
    if data.document_separator is not None:
        raise DataError("data.document_separator: each file is a document; leave the key out")
    sums, sizes, size = list[list[str]](), list[int](), 0
    for path in paths:  # one at a time, because each map needs an open file
        tokens = open_tokens(path, data)
        if source.is_file(beside := path.with_suffix(STARTS)):
            fault = "each of several arrays is one document, so none can have starts"
            raise DataError(f"{beside}: {fault}; join the arrays, and their starts")
        if len(tokens) < 2:
            raise DataError(f"{path}: has one token; a document needs at least 2")
        size = max(size, _largest_id(tokens, data.vocab_size or WORDS) + 1)
        sums.append([path.name, fingerprint(path), tokens.dtype.str])
        sizes.append(len(tokens))
    starts = np.cumsum([0, *sizes[:-1]])

    def fill(unfinished: Path) -> None:
        with write_errors(unfinished.parent):
            dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.int32)
            write_npy(unfinished / "tokens.npy", dtype, (open_tokens(path, data) for path in paths))

    folder = make_folder(cache / f"tokens-{json_hash(sums)[:20]}", fill)
    return Pieces(open_tokens(folder / "tokens.npy", data), starts, data.cross_documents)


def _cut(tokens: np.memmap | Pieces, folder: Path, label: str, data: DataConfig) -> TokenFiles:
    """Cuts an array into three splits; if it has documents, it is cut between them."""
    n, shares = len(flat_tokens(tokens)), (data.valid_fraction, data.test_fraction)
    if isinstance(tokens, Pieces):
        edges = split_edges(tokens.starts, n, *shares, label)
    else:
        edges = [0, n - round(n * sum(shares)), n - round(n * shares[1]), n]
    splits = {
        split: tokens[begin:end]
        for split, (begin, end) in zip(SPLITS, itertools.pairwise(edges), strict=True)
    }
    protocol = {"valid_fraction": shares[0], "test_fraction": shares[1]}
    return _checked(TokenFiles({"tokens": tokens}, splits, folder, label, protocol))


def _checked(found: TokenFiles) -> TokenFiles:
    for split, tokens in found.splits.items():
        if (n := len(flat_tokens(tokens))) < 2:
            fault = f"the {split} split needs at least 2 tokens, and has {n}"
            raise DataError(f"{found.label}: {fault}; give more tokens, or a file for each split")
    return found


def open_tokens(path: Path, data: DataConfig) -> np.memmap:
    """Maps a ``.npy`` or ``.bin`` file to memory as integers [N], or raises DataError.

    A ``.bin`` file without a header of llm.c is read as numbers of the type ``data.dtype``.
    """
    with read_errors(path):
        size = path.stat().st_size
        if path.suffix.lower() == ".npy":
            tokens = _open_npy(path)
        elif path.suffix.lower() == ".bin":
            tokens = _open_raw(path, data, size)
        else:
            fix = f"to read it as text use {argument('config.data.name', 'text')}"
            raise DataError(f"{path}: must be a .npy or .bin file of ids; {fix}")
    if not np.issubdtype(tokens.dtype, np.integer):
        fix = "save array.astype(numpy.uint16), or a larger type of integer"
        raise DataError(f"{path}: has numbers of type {tokens.dtype}, not integers; {fix}")
    if tokens.ndim != 1:
        fix = "save array.reshape(-1), or for several ids per step see docs/own_data.md"
        raise DataError(f"{path}: has the shape {tokens.shape}, not one axis; {fix}")
    if not len(tokens):
        raise DataError(f"{path}: has no token; name a file of ids")
    return tokens


def _open_npy(path: Path) -> np.memmap:
    try:
        return np.lib.format.open_memmap(path, mode="r")  # reads no pickle
    except (ValueError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        fix = "write the ids with numpy.save"
        raise DataError(f"{path}: is not a NumPy array of numbers ({reason}); {fix}") from error


def _open_raw(path: Path, data: DataConfig, size: int) -> np.memmap:
    with_header, dtype = _llm_c_type(path, size), np.dtype(data.dtype)
    if with_header and size > HEADER:
        return np.memmap(path, with_header, mode="r", offset=HEADER)
    if with_header or not size:
        raise DataError(f"{path}: has no token; name a file of ids")
    if size % dtype.itemsize:
        fault = f"has {size:,} bytes, no multiple of the size of {dtype}"
        raise DataError(f"{path}: {fault}; set data.dtype to the type of its numbers")
    tokens = np.memmap(path, dtype, mode="r")
    first = np.asarray(tokens[:LOOKED_AT])
    if dtype.itemsize > 1 and size >= 64 and is_text(first.tobytes()):
        fix = argument("config.data.name", "text")
        raise DataError(f"{path}: is text, not raw ids; name it .txt and use {fix}")
    if dtype.itemsize < 8 and first[::2].any() and not first[1::2].any() and len(first) >= 16:
        wider = f"{'int' if dtype.kind == 'i' else 'uint'}{16 * dtype.itemsize}"
        fault = f"every second number is 0 when read as {dtype}, so its numbers seem to be wider"
        raise DataError(f"{path}: {fault}; try {argument('config.data.dtype', wider)}")
    if data.vocab_size is None:
        _check_no_header(path, tokens)
    return tokens


def _llm_c_type(path: Path, size: int) -> np.dtype | None:
    """Returns the type of the ids after llm.c's header, or ``None`` for a file without one.

    ``size`` is the file's size in bytes. Raises DataError if the header contradicts the file, or
    the file is of another kind.
    """
    with open(path, "rb") as file:
        start = file.read(LOOKED_AT)
    may_be_ids = start.startswith(b"\xff" * 4)  # other formats begin so too
    pickled = start.startswith(b"\x80") and start[7:11] == bytes(4)  # a frame's length
    if not may_be_ids and (kind := file_kind(start, least=3 if pickled else 4)):
        raise DataError(f"{path}: is {kind}, not raw ids; write the ids with numpy.save")
    magic, version, count = np.frombuffer(start[:12].ljust(12, b"\0"), "<i4").tolist()
    if magic not in LLM_C:
        return None
    known, dtype = LLM_C[magic]
    if version != known:
        fault = f"has version {version} of llm.c's format {magic}, not version {known}"
        raise DataError(f"{path}: {fault}; write the ids with numpy.save")
    found = max(size - HEADER, 0)
    if size < HEADER or found != count * dtype.itemsize:
        fault = f"has {found:,} bytes of ids, and its header says {count:,} ids of {dtype}"
        raise DataError(f"{path}: {fault}; get the file again, because it is incomplete or damaged")
    return dtype


def _check_no_header(path: Path, tokens: np.memmap) -> None:
    """Raises DataError if a raw file seems to begin with a header of an unknown format.

    That is so if a number in the first HEADER bytes is over twice the largest number after them.
    """
    first = HEADER // tokens.itemsize
    start, rest = np.asarray(tokens[:first]), tokens[first:]
    at = int(np.argmax(start))
    if len(rest) < first or scan_ids(rest, (int(start[at]) - 15) // 2)[1] is not None:
        return
    fault = f"token {at} is {start[at]:,}, over twice every id after byte {HEADER}"
    raise DataError(
        f"{path}: {fault}, so the file seems to begin with a header; save"
        f" numpy.fromfile(path, '{tokens.dtype}', offset=BYTES) with numpy.save, or if all numbers"
        f" are ids, give {argument('config.data.vocab_size', int(start[at]) + 1)}"
    )


def _largest_id(tokens: Any, vocab_size: int) -> int:
    """Returns the largest id; raises DataError for an id outside 0 .. ``vocab_size`` - 1."""
    largest, at = scan_ids(tokens, vocab_size)
    if at is not None:
        where = f"{tokens.filename}: token {at} (byte {tokens.offset + at * tokens.itemsize})"
        fix = f"from 0 to {vocab_size - 1}; correct the file, or set data.vocab_size or data.dtype"
        raise DataError(f"{where} is {int(tokens[at])}: an id must be {fix}")
    return largest


def symbols_in(folder: Path) -> tuple[Path, list[str] | None]:
    """Returns the file in a folder that lists symbols, and the symbols, or ``None`` if missing."""
    path, meta = folder / SYMBOLS, folder / META
    if not source.is_file(path):
        return (meta, read_meta(meta)) if source.is_file(meta) else (path, None)
    try:
        with read_errors(path):
            symbols = parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(symbols, list) or not all(isinstance(x, str) for x in symbols):
        raise DataError(f"{path}: must be a list of texts, one for each id in order")
    return path, symbols


def fingerprint(path: Path) -> str:
    """Returns a sha256 that identifies a file: of all its bytes, or of samples of a large file.

    For a large file, only its size and :data:`SAMPLES` samples are hashed. For 1e9 tokens this
    takes well under a second. A change between two samples is not noticed if the size is the same.
    """
    with read_errors(path):
        size = path.stat().st_size
        if size <= HASHED_WHOLE:
            return file_hash(path)
        digest = hashlib.sha256(str(size).encode())
        with open(path, "rb") as file:
            for n in range(SAMPLES):
                file.seek(n * (size - SAMPLE) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
        return digest.hexdigest()
