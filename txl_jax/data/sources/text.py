"""Finds ``text``, any plain text of a user: a file, a folder or a download."""

import dataclasses
import hashlib
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import DataConfig
from txl_jax.data.errors import DataError
from txl_jax.data.pieces import split_edges
from txl_jax.data.sources import source
from txl_jax.data.sources.download import download
from txl_jax.data.sources.records import READERS, TABLES, is_json, texts
from txl_jax.data.sources.source import SPLITS, ByteRange, Source, Text
from txl_jax.data.sources.splits import report
from txl_jax.data.sources.stored import ZIP, PlainText, Stored, unpacked
from txl_jax.data.sources.text_files import (
    SUFFIXES,
    note_copies,
    selected,
    text_files,
    unread,
)
from txl_jax.data.tokenizer import DEFAULT_SIZE, import_tokenizers
from txl_jax.messages import argument

NPY_MAGIC = b"\x93NUMPY"  # begins every .npy file
OWN_SPLITS = ", its own splits"  # end of the label of a folder with files of splits
HELD_OUT = {
    split: f"; the {split} split is held out from the train files" for split in ("valid", "test")
}
"""The text that is added to :data:`OWN_SPLITS` in a label for each split that is held out."""


def find(data: DataConfig, kind: str, cache: Path) -> Source:
    """Finds the text that ``data.path`` or ``data.url`` names, in three splits.

    Files and folders can be named as splits (:mod:`txl_jax.data.sources.splits`). If they have no
    valid or test split, it is cut from the end of the train split. Any other text (a file, or all
    text files of a folder in sorted order) is cut into three: the last ``test_fraction`` of its
    bytes is the test split, and the ``valid_fraction`` before it is the valid split. A cut moves
    forward to the start of the next line for ``kind`` word, and otherwise to the start of the next
    character (UTF-8). If the text has documents, it is cut only between documents. Subwords are
    learnt from the train split, and other vocabularies are counted over all splits. Raises
    DataError if there is no usable text, or if the package for subwords is missing.
    """
    if kind == "subword":
        import_tokenizers()
    found = _find(data, kind, cache)
    if separator := _separator(data):
        protocol = {**found.protocol, "document_separator": data.document_separator}
        found = dataclasses.replace(found, separator=separator, protocol=protocol)
    if kind != "subword":
        return found
    protocol = {**found.protocol, "vocab_size": data.vocab_size or DEFAULT_SIZE}
    return dataclasses.replace(found, counted=("train",), protocol=protocol)


def _find(data: DataConfig, kind: str, cache: Path) -> Source:
    if data.url is not None:
        if data.hash is None:
            raise DataError(f"data.url = {data.url!r}: needs data.hash to check the download")
        into = cache / "downloads" / f"text-{data.hash.replace(':', '-')}"
        path = download(data.url, into, data.hash)
        name, where = os.path.basename(urllib.parse.urlsplit(data.url).path), data.url
    elif data.path is None:
        where = argument("config.data.path", "FILE_OR_FOLDER")
        raise DataError(f"data.name = 'text': needs {where}, or data.url and data.hash")
    else:
        path = source.existing_path(data.path, cache)
        name, where = path.name, source.name_of(path, data.path)
    if path.is_dir() or name.lower().endswith(ZIP):
        files = text_files(path)
        sizes = {name: file.size for name, file in files.items()}
        found, rest = selected(files, where)
        rest += unread(path, files)
        report(where, found, rest, sizes)
        note_copies(where, [files[name] for names in found.values() for name in names])
    else:
        files = {"text": Stored(path, name, path.stat().st_size, shown=where)}
        found = {"": ["text"]}
    by_split = {
        split: {name: _plain(files[name], data, kind, cache) for name in names}
        for split, names in found.items()
    }
    if data.document_files and max(map(len, found.values())) == 1:
        fault, fix = f"no split of {path} has several files", "name a folder of documents"
        raise DataError(f"data.document_files: {fault}; {fix}, or leave the key out")
    return _source(by_split, data, kind, where)


def _plain(file: Stored, data: DataConfig, kind: str, cache: Path) -> PlainText:
    """Returns a plain file with the text of ``file``: the file itself, or a copy in the cache."""
    if file.suffix in READERS:
        if data.document_files:
            fault = f"each record of {file} already is a document"
            raise DataError(f"data.document_files: {fault}; leave the key out")
        if file.suffix not in TABLES:
            file.check_text()
        key = [data.field, data.document_separator]
        read = lambda folder: texts(file, data.field, data.document_separator or "", folder)
        return unpacked(file, read, True, key, cache)
    _check_text(file, any_bytes=data.vocab == "byte")
    if data.field != DataConfig.field:
        rule = f"is for records ({', '.join(READERS)}), and {file} is a text"
        raise DataError(f"data.field = {data.field!r}: {rule}; leave the key out")
    if file.compression or file.member:
        any_bytes = kind == "byte"
        return unpacked(file, lambda _: file.blocks(any_bytes), False, any_bytes, cache)
    return PlainText(file.path)


def _check_text(file: Stored, any_bytes: bool) -> None:
    """Raises DataError for a file that is not text; ``any_bytes`` allows all but .npy arrays."""
    start = file.start()
    raw = file.suffix == ".bin" and b"\0" in start and not any_bytes
    if raw or start.startswith(NPY_MAGIC):
        fix = argument("config.data.name", "tokens")
        raise DataError(f"data.path = {str(file)!r}: is an array of ids, not a text; use {fix}")
    if any_bytes:
        return
    if file.suffix not in filter(None, SUFFIXES) and is_json(start):
        ends = f".jsonl{file.compression} (an object in each line) or .json{file.compression}"
        fix = f"let its name end in {ends}, or in .txt{file.compression} to train on the characters"
        raise DataError(f"{file}: is JSON; {fix} as they are")
    file.check_text()


def _source(
    files: Mapping[str, Mapping[str, PlainText]], data: DataConfig, kind: str, path: str
) -> Source:
    """Returns the source of the files by split; missing splits are cut from the train split."""
    joined = {
        split or "train": _joined(list(named.values()), data) for split, named in files.items()
    }
    keys = {s: s if len(named) == 1 else f"{s}/{{}}" for s, named in files.items()}
    whole = {keys[s].format(n): f.path for s, named in files.items() for n, f in named.items()}
    if "" in files:
        whole = {name: file.path for name, file in files[""].items()}
    missing = [split for split in SPLITS if split not in joined]
    notes = "" if "" in files else OWN_SPLITS + "".join(HELD_OUT[split] for split in missing)
    label, protocol = path + notes, dict[str, Any]()
    text, sizes = joined["train"]
    if sizes is not None:
        digest = hashlib.sha256(b"".join(np.asarray(s, "<i8").data for _, s in joined.values()))
        protocol["documents"] = "files" if data.document_files else digest.hexdigest()[:20]
    if missing:
        shares = (
            data.valid_fraction if "valid" in missing else 0.0,
            data.test_fraction if "test" in missing else 0.0,
        )
        protocol |= {"valid_fraction": shares[0], "test_fraction": shares[1]}
        if sizes is None:
            protocol["cut_at"] = "line" if kind == "word" else "character"
            bounds, edges = _bounds(text, shares, data, kind), [0] * 4
        else:
            starts = np.concatenate([[0], np.cumsum(sizes)])
            edges = split_edges(starts[:-1], int(starts[-1]), *shares, label)
            bounds = starts[edges].tolist()
        for n, split in enumerate(SPLITS):
            if split == "train" or split in missing:
                part = source.slice_text(text, bounds[n], bounds[n + 1])
                joined[split] = part, sizes if sizes is None else sizes[edges[n] : edges[n + 1]]
    splits = {split: joined[split][0] for split in SPLITS}
    known: dict[str, Any] = {"counted": SPLITS, "label": label, "protocol": protocol}
    known["records"] = all(f.sizes is not None for named in files.values() for f in named.values())
    if sizes is not None:
        known["sizes"] = {split: joined[split][1] for split in SPLITS}
    return Source("text", whole, splits, **known)


def _joined(
    files: Sequence[PlainText], data: DataConfig
) -> tuple[list[ByteRange | bytes], np.ndarray | None]:
    """Returns the joined text of files, and the number of bytes of each document, or ``None``.

    ``None`` means that the text has no documents, or that a separator marks where each one ends.
    """
    if any(file.sizes is None for file in files):
        text = source.join_files([file.path for file in files])
        if not data.document_files:
            return text, None
        following = zip(text, [*text, None][1:], strict=True)  # parts and their next parts
        sizes = [len(file) + isinstance(x, bytes) for file, x in following if file != b"\n"]
        return text, np.array(sizes, np.int64)
    text = [part for file in files if len(part := ByteRange.whole(file.path))]
    if data.document_separator:
        return text, None
    return text, np.concatenate([file.sizes for file in files])


def _bounds(text: Text, shares: Sequence[float], data: DataConfig, kind: str) -> list[int]:
    """Returns the positions where train, valid and test begin in a text, and the text's size.

    ``shares`` are the fractions of valid and test, 0 for a split that has files of its own.
    """
    size = source.text_size(text)
    mark = _separator(data) or (b"\n" if kind == "word" else None)
    valid = _boundary(text, size - round(size * sum(shares)), mark)
    return [0, valid, _boundary(text, size - round(size * shares[1]), mark), size]


def _separator(data: DataConfig) -> bytes | None:
    text = data.document_separator
    return text.encode("utf-8", "surrogateescape") if text else None


def _boundary(text: Text, at: int, mark: bytes | None) -> int:
    """Returns the first position from ``at`` on that follows a ``mark``.

    If ``mark`` is ``None``, it is the first position at which a character begins.
    """
    if at == 0:
        return 0
    if mark is None:
        following = b"".join(source.read(source.slice_text(text, at, at + 3)))
        inside = [byte & 0xC0 == 0x80 for byte in following] + [False]
        return at + inside.index(False)
    position = max(at - len(mark), 0)
    blocks = source.read(source.slice_text(text, position, source.text_size(text)))
    return position + len(next(source.cut_after(blocks, mark), b""))
