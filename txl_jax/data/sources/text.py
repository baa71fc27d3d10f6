"""Finds ``text``, any plain text of a user: a file, a folder or a download."""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
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
from txl_jax.data.sources.splits import arrange, report, splits_named
from txl_jax.data.tokenizer import import_tokenizers
from txl_jax.messages import argument

NPY_MAGIC = b"\x93NUMPY"  # begins every .npy file
SUFFIXES = (".txt", ".text", ".tokens", ".raw")
"""The ends of names of text files in a folder, of which the first one with most splits is read."""
WEAK = (".raw",)  # beside files of another kind, these are left out
ARRAYS, NO_DATA = (".npy", ".bin"), (".py", ".pkl", ".md", ".log")  # also if named as splits
OWN_SPLITS = ", its own splits"  # ends the label of a folder with files of splits
HELD_OUT = {
    split: f"; the {split} split is held out from the train files" for split in ("valid", "test")
}
"""Ends a label after :data:`OWN_SPLITS`."""


def find(data: DataConfig, kind: str, cache: Path) -> Source:
    """Finds the text that ``data.path`` or ``data.url`` names, in three splits.

    Files and sub-folders that are named as splits are these (:mod:`txl_jax.data.sources.splits`). A
    missing split is cut from the end of the train split. Any other text (a file, or all text files
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
        return _source({"": {"text": path}}, data, kind, data.url)
    if data.path is None:
        raise DataError("data.name = 'text': needs data.path (a file or folder) or data.url")
    path = source.existing_path(data.path, cache)
    if path.is_file():
        _refuse_array(path)
        if data.document_files:
            raise DataError(f"data.document_files: {path} is one file; name a folder of files")
        return _source({"": {"text": path}}, data, kind, str(path))
    files = _files(path)
    sizes = {name: file.stat().st_size for name, file in files.items()}
    chosen = _of_one_kind(list(files), str(path))
    stem = lambda name: name.removesuffix(PurePosixPath(name).suffix)
    found, rest = arrange({name: sizes[name] for name in chosen}, str(path), stem)
    report(str(path), found, [*rest, *sorted(files.keys() - set(chosen))], sizes)
    by_split = {split: {name: files[name] for name in names} for split, names in found.items()}
    if data.document_files and "" not in found and max(map(len, found.values())) == 1:
        raise DataError(f"data.document_files: {path} has a file for each split, not documents")
    return _source(by_split, data, kind, str(path))


def _files(folder: Path) -> dict[str, Path]:
    """Returns the files of a folder that may be text, and those in folders named as splits."""
    found = {path.name: path for path in source.files_in(folder, _may_be_text)}
    for inner in filter(Path.is_dir, sorted(folder.iterdir())):
        if splits_named(inner.name):
            for root, _, _ in os.walk(inner):
                paths = source.files_in(Path(root), lambda path: path.suffix in SUFFIXES)
                found |= {path.relative_to(folder).as_posix(): path for path in paths}
    if not found:
        arrays = any(file.suffix in ARRAYS for file in folder.iterdir())
        fix = f"; for its arrays use {argument('config.data.name', 'tokens')}" if arrays else ""
        raise DataError(f"{folder}: there is no *.txt file in this folder{fix}")
    return found


def _may_be_text(path: Path) -> bool:
    named = bool(splits_named(path.name)) and path.suffix not in (*ARRAYS, *NO_DATA)
    return path.suffix in SUFFIXES or named


def _of_one_kind(names: list[str], where: str) -> list[str]:
    """Returns the files of one suffix: of the one with most splits, or the only one without."""
    kinds: dict[str, list[str]] = {suffix: [] for suffix in SUFFIXES}
    for name in names:
        suffix = PurePosixPath(name).suffix
        kinds.setdefault("" if splits_named(suffix) else suffix, []).append(name)
    splits = {suffix: set().union(*map(splits_named, found)) for suffix, found in kinds.items()}
    usable = [s for s in kinds if kinds[s] and (s in SUFFIXES or {"train"} < splits[s])]
    if not usable:
        raise DataError(f"{where}: there is no *.txt file in this folder")
    chosen = max(usable, key=lambda suffix: len(splits[suffix]))
    if splits[chosen] and chosen in SUFFIXES:
        others = [suffix for suffix in usable if splits[suffix] - splits[chosen]]
    else:
        others = [suffix for suffix in usable if suffix not in (chosen, *WEAK)]
    if others:
        both = f"{kinds[chosen][0]} and {kinds[others[0]][0]}"
        fix = "name one file, or put the files of one kind into a folder of their own"
        raise DataError(f"{where}: has files of several kinds, such as {both}; {fix}")
    return kinds[chosen]


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


def _source(
    files: Mapping[str, Mapping[str, Path]], data: DataConfig, kind: str, path: str
) -> Source:
    """Returns the text of files by split, of which the missing splits are cut from the rest."""
    texts = {split: source.join_files(list(named.values())) for split, named in files.items()}
    sizes = {split: _document_sizes(text) for split, text in texts.items()}
    keys = {s: s if len(named) == 1 else f"{s}/{{}}" for s, named in files.items()}
    whole = {keys[s].format(n): p for s, named in files.items() for n, p in named.items()}
    if "" in files:
        whole, texts, sizes = dict(files[""]), {"train": texts[""]}, {"train": sizes[""]}
    missing = [split for split in SPLITS if split not in texts]
    notes = "" if "" in files else OWN_SPLITS + "".join(HELD_OUT[split] for split in missing)
    label, protocol = path + notes, dict[str, Any]()
    if missing:
        shares = (
            data.valid_fraction if "valid" in missing else 0.0,
            data.test_fraction if "test" in missing else 0.0,
        )
        protocol = {"valid_fraction": shares[0], "test_fraction": shares[1]}
        text = texts["train"]
        if not source.text_size(text):
            raise DataError(f"{label}: the text is empty")
        if data.document_files:
            starts = np.cumsum([0, *sizes["train"]])
            edges = split_edges(starts[:-1], int(starts[-1]), *shares, label)
            bounds = starts[edges].tolist()
            for split, span in zip(SPLITS, itertools.pairwise(edges), strict=True):
                sizes.setdefault(split, sizes["train"][slice(*span)])
            sizes["train"] = sizes["train"][: edges[1]]
        else:
            protocol["cut_at"] = "line" if kind == "word" else "character"
            bounds = _bounds(text, whole, shares, data, kind, label)
        for split, span in zip(SPLITS, itertools.pairwise(bounds), strict=True):
            if split == "train" or split in missing:
                texts[split] = source.slice_text(text, *span)
    known: dict[str, Any] = {"counted": SPLITS, "label": label}
    if data.document_files:
        protocol["documents"], known["sizes"] = "files", sizes
    return Source("text", whole, texts, protocol=protocol, **known)


def _bounds(
    text: Text,
    files: Mapping[str, Path],
    shares: Sequence[float],
    data: DataConfig,
    kind: str,
    label: str,
) -> list[int]:
    """Returns where train, valid and test begin in a text, and its size; DataError if one cannot.

    ``shares`` are those of valid and test, 0 for a split that is not cut.
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
        source.check_utf8(files.values())  # another encoding is the reason of what follows
    if data.document_separator:
        fault = f"the separator {data.document_separator!r} ends too few documents"
        fix = "give more, or a folder with train.txt, valid.txt and test.txt"
        raise DataError(f"{label}: {fault} to cut the text into train, valid and test; {fix}")
    raise DataError(f"{label}: {_too_few_lines(text)}")


def _document_sizes(text: Text) -> list[int]:
    """Returns the number of bytes of each file of a text, with the line end that it lacks."""
    sizes: list[int] = []
    for part in text:
        if isinstance(part, bytes):
            sizes[-1] += len(part)
        else:
            sizes.append(len(part))
    return sizes


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
