"""Finds ``text``, any plain text of a user: a file, a folder or a download."""

import dataclasses
import hashlib
import itertools
import math
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import DataConfig
from txl_jax.data import subword
from txl_jax.data.errors import DataError
from txl_jax.data.pieces import split_edges
from txl_jax.data.sources import source
from txl_jax.data.sources.download import check_hash, download
from txl_jax.data.sources.headers import LLM_C
from txl_jax.data.sources.records import (
    JSON_LINES,
    READERS,
    TABLES,
    WHOLE_JSON,
    is_json,
    is_json_lines,
    texts,
)
from txl_jax.data.sources.source import SPLITS, ByteRange, Source, Text
from txl_jax.data.sources.splits import arrange, listed, report
from txl_jax.data.sources.stored import ZIP, PlainText, Stored, unpacked
from txl_jax.data.sources.text_files import (
    SUFFIXES,
    about_others,
    note_copies,
    of_one_kind,
    text_files,
    unread,
)
from txl_jax.data.tokenizer import import_tokenizers
from txl_jax.file_kinds import LOOKED_AT
from txl_jax.messages import argument

NPY_MAGIC = b"\x93NUMPY"  # begins every .npy file
OWN_SPLITS = ", its own splits"  # ends the label of a folder with files of splits
HELD_OUT = {
    split: f"; the {split} split is held out from the train files" for split in ("valid", "test")
}
"""The text that follows :data:`OWN_SPLITS` in a label, by the split that is held out."""


def find(data: DataConfig, kind: str, cache: Path) -> Source:
    """Finds the text that ``data.path`` or ``data.url`` names, in three splits.

    Files and folders may be named as splits (:mod:`txl_jax.data.sources.splits`). A missing valid
    or test split is cut from the end of the train split. Any other text (a file, or all text files
    of a folder in sorted order) is cut: the last ``test_fraction`` of its bytes is test, and the
    ``valid_fraction`` before is valid. A cut moves to the start of the next line for ``kind`` word,
    and otherwise to the next character (UTF-8). With documents, splits have whole documents.
    Subwords are learnt from the training split, and other vocabularies are counted over all splits.
    Raises DataError if there is no usable text, or if the package for subwords is missing.
    """
    if kind == "subword":
        import_tokenizers()
    found = _find(data, kind, cache)
    if data.document_separator:
        separator = data.document_separator.encode("utf-8", "surrogateescape")
        protocol = {**found.protocol, "document_separator": data.document_separator}
        found = dataclasses.replace(found, separator=separator, protocol=protocol)
    if kind != "subword":
        return found
    protocol = {**found.protocol, "vocab_size": data.vocab_size or subword.DEFAULT_SIZE}
    return dataclasses.replace(found, counted=("train",), protocol=protocol)


def _find(data: DataConfig, kind: str, cache: Path) -> Source:
    if data.url is not None:
        if data.hash is None:
            raise DataError(f"data.url = {data.url!r}: needs data.hash to check the download")
        into = cache / "downloads" / f"text-{data.hash.replace(':', '-')}"
        path = download(data.url, into, check_hash(data.hash, data.url))
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
        chosen = of_one_kind(files, where)
        chosen = [name for name in chosen if not about_others(name)] or chosen
        stem = lambda name: files[name].stem
        found, rest = arrange({name: sizes[name] for name in chosen}, where, stem)
        others = sorted(files.keys() - set(chosen))
        report(where, found, [*rest, *others, *unread(path, files)], sizes)
        note_copies(where, [files[name] for names in found.values() for name in names])
    else:
        files, found = (
            {"text": Stored(path, name, path.stat().st_size, shown=where)},
            {"": ["text"]},
        )
        if data.document_files:
            raise DataError(f"data.document_files: {path} is one file; name a folder of files")
    if data.document_files and "" not in found and max(map(len, found.values())) == 1:
        fault, fix = f"{path} has one file for each split", "name a folder of several files"
        raise DataError(f"data.document_files: {fault}; {fix}, or leave the key out")
    by_split = {
        split: {name: _plain(files[name], data, kind, cache) for name in names}
        for split, names in found.items()
    }
    return _source(by_split, data, kind, where)


def _plain(file: Stored, data: DataConfig, kind: str, cache: Path) -> PlainText:
    """Returns the text of a file as a plain file, which is in the cache unless it was plain."""
    if file.suffix in READERS:
        if data.document_files:
            fault = f"each record of {file} already is a document"
            raise DataError(f"data.document_files: {fault}; leave the key out")
        if file.suffix not in TABLES:
            file.check_text(encoding=True)
        key = [data.field, data.document_separator]
        read = lambda folder: texts(file, data.field, data.document_separator or "", folder)
        return unpacked(file, read, True, key, cache)
    if data.vocab != "byte":
        _refuse_records(file)
    if data.field != DataConfig.field:
        rule = f"is for records ({', '.join(READERS)}), and {file} is a text"
        raise DataError(f"data.field = {data.field!r}: {rule}; leave the key out")
    _refuse_array(file, any_bytes=data.vocab == "byte")
    if data.vocab != "byte":  # "byte" is never a default: the user asked for it
        file.check_text(encoding=kind == "byte")
    if file.compression or file.member:
        any_bytes = kind == "byte"
        return unpacked(file, lambda _: file.blocks(any_bytes), False, any_bytes, cache)
    return PlainText(file.path)


def _refuse_records(file: Stored) -> None:
    """Raises DataError for JSON, unless the file has the suffix of a text."""
    with file.opened() as opened:
        start = opened.read(LOOKED_AT)
    if file.suffix in filter(None, SUFFIXES) or not (is_json(start) or is_json_lines(start)):
        return
    what, end = "is JSON", WHOLE_JSON
    if is_json_lines(start):
        what, end = "has an object of JSON in each line", JSON_LINES[0]
    fix = f"let its name end in {end}{file.compression}, or in .txt{file.compression} to train on"
    raise DataError(f"{file}: {what}; {fix} the characters as they are")


def _refuse_array(file: Stored, any_bytes: bool) -> None:
    """Raises DataError for a file of NumPy or llm.c, or raw numbers unless ``any_bytes``."""
    with file.opened() as opened:
        start = opened.read(LOOKED_AT)
    kinds = {
        "a NumPy": start.startswith(NPY_MAGIC),
        "an llm.c": int.from_bytes(start[:4], "little") in LLM_C,
        "a raw": file.suffix == ".bin" and b"\0" in start and not any_bytes,
    }
    if kind := next((kind for kind, found in kinds.items() if found), None):
        fix = argument("config.data.name", "tokens")
        raise DataError(f"data.path = {str(file)!r}: is {kind} array, not a text; use {fix}")


def _source(
    files: Mapping[str, Mapping[str, PlainText]], data: DataConfig, kind: str, path: str
) -> Source:
    """Returns the source of the files by split; missing splits are cut from the train split."""
    joined = {split: _joined(list(named.values()), data) for split, named in files.items()}
    keys = {s: s if len(named) == 1 else f"{s}/{{}}" for s, named in files.items()}
    whole = {keys[s].format(n): f.path for s, named in files.items() for n, f in named.items()}
    if "" in files:
        whole = {name: file.path for name, file in files[""].items()}
        joined = {"train": joined[""]}
    missing = [split for split in SPLITS if split not in joined]
    notes = "" if "" in files else OWN_SPLITS + "".join(HELD_OUT[split] for split in missing)
    label, protocol = path + notes, dict[str, Any]()
    text, sizes = joined["train"]
    for split, named in files.items():
        if not source.text_size(joined[split or "train"][0]):
            raise DataError(f"{path}: {_empty(split, list(named))}")
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
            bounds, edges = _bounds(text, whole, shares, data, kind, label), [0] * 4
        else:
            starts = np.concatenate([[0], np.cumsum(sizes)])
            edges = split_edges(starts[:-1], int(starts[-1]), *shares, label)
            bounds = starts[edges].tolist()
        for n, split in enumerate(SPLITS):
            if split == "train" or split in missing:
                part = source.slice_text(text, bounds[n], bounds[n + 1])
                joined[split] = part, sizes if sizes is None else sizes[edges[n] : edges[n + 1]]
        for split, share in zip(("valid", "test"), shares, strict=True):
            if share and not source.text_size(joined[split][0]):
                raise DataError(f"{label}: {_too_short(source.text_size(text), split, share)}")
    splits = {split: joined[split][0] for split in SPLITS}
    known: dict[str, Any] = {"counted": SPLITS, "label": label, "protocol": protocol}
    if sizes is not None:
        known["sizes"] = {split: joined[split][1] for split in SPLITS}
    return Source("text", whole, splits, **known)


def _empty(split: str, names: list[str]) -> str:
    files = f" ({listed(names)})" if names != ["text"] else ""
    if not split:
        return f"the text is empty{files}; a split needs at least 2 tokens: name a file with text"
    fault = f"the {split} split{files} is empty, and at least 2 tokens are needed"
    if split == "train":
        return f"{fault}; write the text for training there"
    return f"{fault}; write text there, or remove the file to hold the split out from train"


def _too_short(size: int, split: str, share: float) -> str:
    fault = f"the text has {size:,} byte{'s' * (size != 1)}, too few for a {split} split of"
    fix = f"give a longer text, or a larger data.{split}_fraction, or a folder with files of splits"
    return f"{fault} {100 * share:g}%; about {math.ceil(2 / share):,} bytes are needed: {fix}"


def _joined(
    files: Sequence[PlainText], data: DataConfig
) -> tuple[list[ByteRange | bytes], np.ndarray | None]:
    """Returns the text of files, and the number of bytes of each of its documents, if it has any.

    If records end with a separator, the separator alone marks the documents.
    """
    if any(file.sizes is None for file in files):
        text = source.join_files([file.path for file in files])
        return text, _file_sizes(text) if data.document_files else None
    text = [part for file in files if len(part := ByteRange.whole(file.path))]
    if data.document_separator:
        return text, None
    return text, np.concatenate([file.sizes for file in files])


def _bounds(
    text: Text,
    files: Mapping[str, Path],
    shares: Sequence[float],
    data: DataConfig,
    kind: str,
    label: str,
) -> list[int]:
    """Returns where train, valid and test begin in a text, and its size, or raises DataError.

    ``shares`` are the fractions of valid and test, 0 for a split that is not cut.
    """
    size = source.text_size(text)
    mark = b"\n" if kind == "word" else None
    if data.document_separator:
        mark = data.document_separator.encode("utf-8", "surrogateescape")
    valid = _boundary(text, size - round(size * sum(shares)), mark)
    test = _boundary(text, size - round(size * shares[1]), mark)
    bounds = [0, valid, test, size]
    if mark is None or all(
        begin < end or not share
        for (begin, end), share in zip(itertools.pairwise(bounds), (1.0, *shares), strict=True)
    ):
        return bounds
    if kind != "byte":
        source.check_utf8(files.values())  # another encoding may be why marks are missing
    if data.document_separator:
        fault = f"the separator {data.document_separator!r} ends too few documents"
        fix = "give more documents, or a folder with train.txt, valid.txt and test.txt"
        raise DataError(f"{label}: {fault} to cut the text into train, valid and test; {fix}")
    raise DataError(f"{label}: {_too_few_lines(text)}")


def _file_sizes(text: Text) -> np.ndarray:
    """Returns the number of bytes of each file of a text, with the line end that was added."""
    sizes: list[int] = []
    for part in text:
        if isinstance(part, bytes):
            sizes[-1] += len(part)
        else:
            sizes.append(len(part))
    return np.array(sizes, np.int64)


def _too_few_lines(text: Text) -> str:
    lines, longest, length = 1, 0, 0
    for block in source.read(text):
        begun, *others = block.split(b"\n")
        length += len(begun)
        for line in others:
            lines, longest, length = lines + 1, max(longest, length), len(line)
    lines, longest = lines - (length == 0), max(longest, length)
    return (
        "cannot be cut into train, valid and test: data.vocab='word' cuts at line ends"
        f" only, and the text has {lines:,} line{'s' if lines > 1 else ''}, the longest"
        f" with {longest:,} of {source.text_size(text):,} bytes; add line ends, give a folder"
        " with train.txt, valid.txt and test.txt, or use data.vocab='byte', 'char' or 'subword'"
    )


def _boundary(text: Text, at: int, mark: bytes | None) -> int:
    """Returns the first position from ``at`` on that follows ``mark`` or, if None, a character."""
    if at == 0:
        return 0
    if mark is None:
        following = b"".join(source.read(source.slice_text(text, at, at + 3)))
        inside = [byte & 0xC0 == 0x80 for byte in following] + [False]
        return at + inside.index(False)
    position = max(at - len(mark), 0)
    blocks = source.read(source.slice_text(text, position, source.text_size(text)))
    return position + len(next(source.cut_after(blocks, mark), b""))
