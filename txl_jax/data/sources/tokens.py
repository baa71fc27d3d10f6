"""Finds ``tokens``, the arrays of ids of a user, which stay where they are and are memory-mapped.

A file is cut into three splits. A folder has a file for each split (nanoGPT's has no test file):

    ids.npy                           train ids | valid ids | test ids
    train.bin  val.bin                train, valid, and valid as test
    train.npy  valid.npy  test.npy    train, valid, test

``symbols.json`` beside the files, a list of texts, has the symbol of each id for display, and so
has nanoGPT's ``meta.pkl``, which is never unpickled (:mod:`txl_jax.data.sources.plain_pickle`). The
documents of an array begin at the positions in ``ids.starts.npy`` beside ``ids.npy``, or at each
``data.document_separator``. If a folder's arrays are not named as splits, each is a document.
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
from txl_jax.data.sources.headers import HEADER, check_no_count, check_no_header, llm_c_type
from txl_jax.data.sources.plain_pickle import META, read_meta
from txl_jax.data.sources.source import SPLITS, file_hash, read_errors
from txl_jax.data.sources.splits import arrange, report, splits_named
from txl_jax.data.sources.text import OWN_SPLITS
from txl_jax.data.symbols import scan_ids
from txl_jax.data.vocab import Vocab
from txl_jax.file_kinds import is_text
from txl_jax.files import parse_json
from txl_jax.messages import argument

SUFFIXES = (".npy", ".bin")  # of arrays
SYMBOLS = "symbols.json"
NO_TEST = "; there is no test file, so the test split is the valid split"

HASHED_WHOLE = 64 << 20
"""The size in bytes up to which a whole file is hashed; of a larger file, samples are hashed."""
SAMPLES, SAMPLE = 64, 1 << 20
"""The number of samples of a large file, evenly spaced, and their size in bytes."""
LOOKED_AT = 1 << 16
"""The number of tokens at the start of a raw file that are looked at to find a wrong type."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFiles:
    """Arrays of ids on the disk.

    Attributes:
      files: the ids by the name of the split, or ``tokens`` for one file that is cut.
      splits: the ids of each split, 1-D or documents.
      folder: the folder of the files.
      label: describes them in reports.
      protocol: the settings that decided the splits.
    """

    files: Mapping[str, np.memmap | Pieces]
    splits: Mapping[str, np.ndarray | Pieces]
    folder: Path
    label: str
    protocol: Mapping[str, Any]

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
        """Returns the vocabulary of ``symbols.json`` or ``meta.pkl``, else of ``size`` or all ids.

        Raises DataError if an id or the size does not fit it.
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
        """Returns the largest id; raises DataError with file and offset for one outside of V."""
        return max(_largest_id(flat_tokens(split), vocab_size) for split in self.files.values())


def find(data: DataConfig, cache: Path) -> TokenFiles:
    """Finds the arrays that ``data.path`` names, or raises DataError.

    Only files that are documents are copied, into one array in the ``cache``.
    """
    if data.path is None:
        raise DataError("data.name = 'tokens': needs data.path, a .npy or .bin file or a folder")
    path = source.existing_path(data.path, cache)
    where = source.name_of(path, data.path)
    arrays = _arrays(path) if path.is_dir() else {}
    if len(arrays) == 1 and not splits_named(*arrays):
        [(name, path)] = arrays.items()  # the folder may also have its symbols or starts
        where = os.path.join(where, name)
    if path.is_file():
        return _cut(_with_documents(open_tokens(path, data), data), path.parent, where, data)
    sizes = {name: file.stat().st_size for name, file in arrays.items()}
    stem = lambda name: os.path.splitext(name)[0]
    named, rest = arrange(sizes, where, stem)
    report(where, named, rest, sizes)
    files = dict[str, np.memmap | Pieces]()
    for split, names in named.items():
        parts = [arrays[name] for name in names]
        if split and len(parts) == 1:
            files[split] = _with_documents(open_tokens(parts[0], data), data)
        else:
            files[split] = joined(parts, data, cache)
    if "" in files:
        return _cut(files[""], path, f"{where}, {len(arrays):,} files", data)
    if "valid" not in files:
        missing = " or ".join(f"valid{suffix}" for suffix in SUFFIXES)
        fix = "; name one file in data.path to have it cut into splits"
        raise DataError(f"{where}: there is no {missing} in this folder{fix}")
    splits = {split: files.get(split, files["valid"]) for split in SPLITS}
    label = f"{where}{OWN_SPLITS}{'' if 'test' in files else NO_TEST}"
    return _checked(TokenFiles(files, splits, path, label, {}))


def _arrays(folder: Path) -> dict[str, Path]:
    """Returns the arrays in a folder by name, sorted, without files of starts."""
    wanted = lambda path: path.suffix.lower() in SUFFIXES and not path.name.endswith(STARTS)
    if found := source.files_in(folder, wanted):
        return {path.name: path for path in found}
    raise DataError(f"{folder}: there is no *.npy and no *.bin file in this folder")


def read_documents(path: Path, data: DataConfig, vocab_size: int) -> list[np.ndarray]:
    """Returns a file's documents, or all its ids as one; raises DataError for an id outside V.

    A file of starts takes the place of ``data.document_separator``.
    """
    tokens = open_tokens(path, data)
    if source.is_file(path.with_suffix(STARTS)):
        data = dataclasses.replace(data, document_separator=None)
    _largest_id(tokens, vocab_size)
    found = _with_documents(tokens, data)
    return list(found) if isinstance(found, Pieces) else [np.asarray(found)]


def _with_documents(tokens: np.memmap, data: DataConfig) -> np.memmap | Pieces:
    """Returns an array, as documents if it has a separator or a file of starts."""
    path = Path(str(tokens.filename))
    beside = path.with_suffix(STARTS)
    has_starts, separator = source.is_file(beside), data.document_separator
    if has_starts and separator is not None:
        fix = "remove the file, or leave the setting out"
        fault = f"the file {beside} gives the starts of documents too"
        raise DataError(f"data.document_separator = {separator!r}: {fault}; {fix}")
    if separator is not None:
        return separated(tokens, _separator_id(separator, path.parent), str(path))
    if not has_starts:
        return tokens
    starts = _open_npy(beside)
    check_starts(starts, len(tokens), str(beside))
    return Pieces(tokens, starts.astype(np.int64), data.cross_documents)


def _separator_id(separator: str, folder: Path) -> int:
    known = symbols_in(folder)[1] or []
    if separator in known:
        return known.index(separator)
    if not (separator.isascii() and separator.isdigit() and len(separator) < 19):
        fix = "give an id, or a symbol of symbols.json"
        raise DataError(f"data.document_separator = {separator!r}: is no id and no symbol; {fix}")
    return int(separator)


def joined(paths: Sequence[Path], data: DataConfig, cache: Path) -> Pieces:
    """Returns the arrays of files as documents of one array in the cache."""
    if data.document_separator is not None:
        fix = "leave data.document_separator out"
        raise DataError(f"{paths[0].parent}: each file is a document; {fix}")
    sums, sizes, size = list[list[str]](), list[int](), 0
    for path in paths:  # one at a time, because each map needs an open file
        tokens = open_tokens(path, data)
        if source.is_file(beside := path.with_suffix(STARTS)):
            fault = "each of several arrays is one document, so none can have starts"
            fix = "join the arrays into one, and the starts into one"
            raise DataError(f"{beside}: {fault}; {fix}")
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
    """Cuts an array into three splits, of whole documents if it has some."""
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
        n = len(flat_tokens(tokens))
        if n < 2:
            fault = f"the {split} split has {n} token{'s' * (n != 1)}, and at least 2 are needed"
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
        shape = " x ".join(map(str, tokens.shape)) or "no axis"
        fix = "save array.reshape(-1), or for several ids per step see docs/own_data.md"
        raise DataError(f"{path}: has {tokens.ndim} axes ({shape}), not one; {fix}")
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
    with_header, dtype = llm_c_type(path, size), np.dtype(data.dtype)
    if size == (HEADER if with_header else 0):
        raise DataError(f"{path}: has no token; name a file of ids")
    if with_header:
        return np.memmap(path, with_header, mode="r", offset=HEADER)
    if size % dtype.itemsize:
        fault = f"has {size:,} bytes, no multiple of {dtype.itemsize}, the size of {dtype}"
        raise DataError(f"{path}: {fault}; set data.dtype to the type of its numbers")
    tokens = np.memmap(path, dtype, mode="r")
    first = np.asarray(tokens[:LOOKED_AT])
    if dtype.itemsize > 1 and size >= 64 and is_text(first.tobytes()):
        fix = argument("config.data.name", "text")
        raise DataError(f"{path}: is text, not raw ids; name it .txt and use {fix}")
    if dtype.itemsize < 8 and first[::2].any() and not first[1::2].any() and len(first) >= 16:
        wider = f"{dtype.kind.replace('i', 'int').replace('u', 'uint')}{16 * dtype.itemsize}"
        fault = f"every second number is 0 when read as {dtype}"
        fix = argument("config.data.dtype", wider)
        raise DataError(f"{path}: {fault}, so its numbers seem to be wider; try {fix}")
    if data.vocab_size is None:
        check_no_count(path, tokens)
        check_no_header(path, tokens)
    return tokens


def _largest_id(tokens: Any, vocab_size: int) -> int:
    """Returns the largest id of a memory map; raises DataError for one outside of V."""
    largest, at = scan_ids(tokens, vocab_size)
    if at is not None:
        where = f"{tokens.filename}: token {at} (byte {tokens.offset + at * tokens.itemsize})"
        fix = "correct the file, or set data.vocab_size or data.dtype"
        rule = f"must be from 0 to {vocab_size - 1}"
        raise DataError(f"{where} is {int(tokens[at])}: an id {rule}; {fix}")
    return largest


def symbols_in(folder: Path) -> tuple[Path, list[str] | None]:
    """Returns the file of a folder that lists symbols, and the symbols; ``None`` without a file."""
    path, meta = folder / SYMBOLS, folder / META
    if source.is_file(path):
        return path, read_symbols(path)
    return (meta, read_meta(meta)) if source.is_file(meta) else (path, None)


def read_symbols(path: Path) -> list[str]:
    """Returns the symbols in a JSON file, a list of texts in the order of the ids."""
    try:
        with read_errors(path):
            symbols = parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(symbols, list) or not all(isinstance(x, str) for x in symbols):
        raise DataError(f"{path}: must be a list of texts, one for each id in order")
    return symbols


def fingerprint(path: Path) -> str:
    """Returns a sha256 that identifies a file: of its bytes, or if it is large, of samples of them.

    A large file is identified by its size and :data:`SAMPLES` samples, so that 1e9 tokens take well
    under a second. A change between samples that keeps the size is not noticed.
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
