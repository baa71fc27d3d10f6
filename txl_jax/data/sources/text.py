"""``text``: any plain text of the user's own, a file, a folder or a download."""

import dataclasses
from pathlib import Path

from txl_jax.config import DataConfig
from txl_jax.data import subword
from txl_jax.data.errors import DataError
from txl_jax.data.sources.download import check_hash, download
from txl_jax.data.sources.source import (
    SPLITS,
    ByteRange,
    Source,
    Text,
    existing,
    is_file,
    joined,
    part_of,
    read,
    text_size,
)

OWN_SPLITS = ", its own splits"
"""Ends the label of a folder that has a file for each split; the path is before it."""


def find(data: DataConfig, kind: str, cache: Path) -> Source:
    """The text that ``data.path`` or ``data.url`` names, in three splits.

    A folder with ``train.txt``, ``valid.txt`` and ``test.txt`` is used as it is. Any other text
    is cut: the last ``test_fraction`` of its bytes is test, the ``valid_fraction`` before it is
    valid. The cuts move on to the next line's start for ``kind`` word, else to the next
    character's (UTF-8). The text of a folder is its ``*.txt`` files in sorted order, one after
    the other; a file without a line end at its end gets one. A ``char`` or ``word`` vocabulary is
    counted over all three splits: plain text has no symbol for what training has not seen. A
    ``subword`` vocabulary, which takes any text, is learnt from the training split.

    Raises:
      DataError: no such file, one that is empty or not a regular file, a text with too few lines
        for ``kind`` word, a download without the hash ``data.hash``, or no package to learn
        subwords with.
    """
    if kind != "subword":
        return _find(data, kind, cache)
    subword.package()
    found = _find(data, kind, cache)
    protocol = {**found.protocol, "vocab_size": data.vocab_size}
    return dataclasses.replace(found, counted=("train",), protocol=protocol)


def _find(data: DataConfig, kind: str, cache: Path) -> Source:
    if data.url is not None:
        if data.hash is None:
            raise DataError(f"data.url = {data.url!r}: needs data.hash to check the download by")
        into = cache / "downloads" / f"text-{data.hash.replace(':', '-')}"
        path = download(data.url, into, check_hash(data.hash, data.url))
        return _cut({"text": path}, data, kind, data.url)
    if data.path is None:
        raise DataError("data.name = 'text': needs data.path (a file or folder) or data.url")
    path = existing(data.path)
    if path.is_file():
        return _cut({"text": path}, data, kind, str(path))
    files = {split: path / f"{split}.txt" for split in SPLITS}
    missing = [file.name for file in files.values() if not is_file(file)]
    if not missing:
        return Source(
            name="text",
            files=files,
            splits={split: [ByteRange.whole(file)] for split, file in files.items()},
            counted=SPLITS,
            label=f"{path}{OWN_SPLITS}",
        )
    if len(missing) < len(SPLITS):
        present = next(file.name for file in files.values() if is_file(file))
        raise DataError(
            f"{path}: has {present} but no {missing[0]}; give train.txt, valid.txt and test.txt,"
            " or name the files otherwise to have all *.txt cut into splits"
        )
    found = {file.name: file for file in sorted(path.glob("*.txt")) if is_file(file)}
    if not found:
        raise DataError(f"{path}: there is no *.txt file in this folder")
    return _cut(found, data, kind, str(path))


def _cut(files: dict[str, Path], data: DataConfig, kind: str, what: str) -> Source:
    text = joined(list(files.values()))
    size = text_size(text)
    if not size:
        raise DataError(f"{what}: the text is empty")
    valid = _boundary(text, size - round(size * (data.valid_fraction + data.test_fraction)), kind)
    test = _boundary(text, size - round(size * data.test_fraction), kind)
    if kind == "word" and not 0 < valid < test < size:
        raise DataError(_too_few_lines(text, what))
    return Source(
        name="text",
        files=files,
        splits={
            "train": part_of(text, 0, valid),
            "valid": part_of(text, valid, test),
            "test": part_of(text, test, size),
        },
        protocol={
            "valid_fraction": data.valid_fraction,
            "test_fraction": data.test_fraction,
            "cut_at": "line" if kind == "word" else "character",
        },
        counted=SPLITS,
        label=what,
    )


def _too_few_lines(text: Text, what: str) -> str:
    """What to say of a text without a line end in the right places."""
    lines = longest = length = 0
    for block in read(text):
        first, *others = block.split(b"\n")
        length += len(first)
        for line in others:
            lines, longest, length = lines + 1, max(longest, length), len(line)
    lines, longest = lines + bool(length), max(longest, length)
    return (
        f"{what}: cannot be cut into train, valid and test: data.vocab='word' cuts at line ends"
        f" only, and the text has {lines:,} line{'s' if lines > 1 else ''}, the longest with"
        f" {longest:,} of {text_size(text):,} bytes; add line ends, give a folder with train.txt,"
        " valid.txt and test.txt, or use data.vocab='byte', 'char' or 'subword'"
    )


def _boundary(text: Text, at: int, kind: str) -> int:
    """``at``, or the next position after it where a line (``word``) or a character starts."""
    if at == 0:
        return 0
    if kind != "word":
        following = b"".join(read(part_of(text, at, at + 3)))
        inside = [byte & 0xC0 == 0x80 for byte in following] + [False]
        return at + inside.index(False)
    position = at - 1
    for block in read(part_of(text, position, text_size(text))):
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(block)
    return position
