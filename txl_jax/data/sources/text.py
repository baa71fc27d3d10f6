"""Finds ``text``, any plain text of a user: a file, a folder or a download."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import DataConfig
from txl_jax.data import subword
from txl_jax.data.documents import split_edges
from txl_jax.data.errors import DataError
from txl_jax.data.sources import source
from txl_jax.data.sources.download import check_hash, download
from txl_jax.data.sources.headers import LLM_C
from txl_jax.data.sources.source import SPLITS, ByteRange, Source, Text
from txl_jax.data.tokenizer import import_tokenizers
from txl_jax.messages import argument

NPY_MAGIC = b"\x93NUMPY"  # begins every .npy file
OWN_SPLITS = ", its own splits"  # ends the label of a folder with a file for each split


def find(data: DataConfig, kind: str, cache: Path) -> Source:
    """Finds the text that ``data.path`` or ``data.url`` names, in three splits.

    A folder with ``train.txt``, ``valid.txt`` and ``test.txt`` is not cut. Any other text (a file,
    or all ``*.txt`` files of a folder in sorted order) is cut: the last ``test_fraction`` of its
    bytes is test, and the ``valid_fraction`` before is valid. A cut moves to the start of the next
    line for ``kind`` word, and otherwise to the next character (UTF-8). With documents, splits have
    whole documents. Subwords are learnt from the training split, and other vocabularies are counted
    over all splits. Raises DataError if there is no usable text, or if the package for subwords is
    missing.
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
        return _split({"text": path}, data, kind, data.url)
    if data.path is None:
        raise DataError("data.name = 'text': needs data.path (a file or folder) or data.url")
    path = source.existing_path(data.path, cache)
    if path.is_file():
        _refuse_array(path)
        if data.document_files:
            raise DataError(f"data.document_files: {path} is one file; name a folder of files")
        return _split({"text": path}, data, kind, str(path))
    fix = "; give train.txt, valid.txt and test.txt, or rename the files to have all *.txt"
    if own := source.split_files(path, "{}.txt", f"{path}:", f"{fix} cut into splits"):
        if data.document_files:
            raise DataError(f"data.document_files: {path} has a file for each split, not documents")
        texts = {split: [ByteRange.whole(file)] for split, file in own.items()}
        return Source("text", own, texts, counted=SPLITS, label=f"{path}{OWN_SPLITS}")
    found = {file.name: file for file in source.files_in(path, ".txt")}
    if not found:
        arrays = any(file.suffix in (".npy", ".bin") for file in path.iterdir())
        fix = f"; for its arrays use {argument('config.data.name', 'tokens')}" if arrays else ""
        raise DataError(f"{path}: there is no *.txt file in this folder{fix}")
    return _split(found, data, kind, str(path))


def _refuse_array(path: Path) -> None:
    """Raises DataError for a file of NumPy or llm.c, whose bytes are no text."""
    start = next(source.read([ByteRange.whole(path)[:6]]), b"")
    kinds = {
        "a NumPy": start == NPY_MAGIC,
        "an llm.c": int.from_bytes(start[:4], "little") in LLM_C,
    }
    if kind := next((kind for kind, found in kinds.items() if found), None):
        fix = argument("config.data.name", "tokens")
        raise DataError(f"data.path = {str(path)!r}: is {kind} array, not a text; use {fix}")


def _split(files: dict[str, Path], data: DataConfig, kind: str, label: str) -> Source:
    text = source.join_files(list(files.values()))
    size = source.text_size(text)
    if not size:
        raise DataError(f"{label}: the text is empty")
    shares = (data.valid_fraction, data.test_fraction)
    if data.document_files:
        return _split_files(files, text, shares, label)
    mark = b"\n" if kind == "word" else None
    if data.document_separator:
        mark = data.document_separator.encode("utf-8", "surrogateescape")
    valid = _boundary(text, size - round(size * sum(shares)), mark)
    test = _boundary(text, size - round(size * shares[1]), mark)
    if mark and kind != "byte" and not 0 < valid < test < size:
        source.check_utf8(files.values())  # another encoding is the reason of what follows
    if data.document_separator and not 0 < valid < test < size:
        fault = f"the separator {data.document_separator!r} ends too few documents"
        fix = "give more, or a folder with train.txt, valid.txt and test.txt"
        raise DataError(f"{label}: {fault} to cut the text into train, valid and test; {fix}")
    if mark == b"\n" and not 0 < valid < test < size:
        raise DataError(f"{label}: {_too_few_lines(text)}")
    ends = {"train": (0, valid), "valid": (valid, test), "test": (test, size)}
    splits = {split: source.slice_text(text, *ends[split]) for split in SPLITS}
    protocol: dict[str, Any] = {"valid_fraction": shares[0], "test_fraction": shares[1]}
    protocol["cut_at"] = "line" if kind == "word" else "character"
    return Source("text", files, splits, counted=SPLITS, protocol=protocol, label=label)


def _split_files(
    files: dict[str, Path], text: list[ByteRange | bytes], shares: tuple[float, float], label: str
) -> Source:
    """Returns a text whose documents are its files, with whole files in each split."""
    sizes: list[int] = []
    for part in text:
        if isinstance(part, bytes):
            sizes[-1] += len(part)  # the line end that a file lacks
        else:
            sizes.append(len(part))
    starts = np.cumsum([0, *sizes])
    edges = split_edges(starts[:-1], int(starts[-1]), *shares, label)
    spans = dict(zip(SPLITS, itertools.pairwise(edges), strict=True))
    splits = {s: source.slice_text(text, *starts[list(span)].tolist()) for s, span in spans.items()}
    protocol: dict[str, Any] = {"valid_fraction": shares[0], "test_fraction": shares[1]}
    protocol["documents"] = "files"
    sized = {split: sizes[slice(*span)] for split, span in spans.items()}
    known: dict[str, Any] = {"counted": SPLITS, "protocol": protocol, "sizes": sized}
    return Source("text", files, splits, label=label, **known)


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
    """Returns ``at``, or the next position after a ``mark``, or of a character without a mark."""
    if at == 0:
        return 0
    if mark is None:
        following = b"".join(source.read(source.slice_text(text, at, at + 3)))
        inside = [byte & 0xC0 == 0x80 for byte in following] + [False]
        return at + inside.index(False)
    position = max(at - len(mark), 0)
    blocks = source.read(source.slice_text(text, position, source.text_size(text)))
    return position + len(next(source.cut_after(blocks, mark), b""))
