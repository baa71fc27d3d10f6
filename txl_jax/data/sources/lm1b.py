"""``lm1b``: the One Billion Word benchmark (Chelba et al. 2013), sentences in no order.

The authors' scripts score one held-out file, of 50, both as validation and as test; so does this.
The vocabulary is the published list of 793,471 words, in its order. The archive's hash is the one
that tensorflow_datasets has recorded; of the vocabulary file no hash is published, so the hash of
what came is recorded beside it when it is downloaded.

Two protocols, by name:

    authors   <S> the cat sat <S> it rained <S>             one <S> between sentences (PyTorch)
    double    <S> the cat sat <S> <S> it rained <S> <S>     two (TensorFlow)

With ``double`` a sentence has a target more, the second ``<S>``, which is always the same and
costs nothing: perplexities of the two do not compare.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from txl_jax.data.errors import DataError
from txl_jax.data.sources.archives import unpacked
from txl_jax.data.sources.download import (
    check_hash,
    download,
    download_folder,
    read_origin,
    write_origin,
)
from txl_jax.data.sources.partial import folder_in_the_making, rename_folder, writing
from txl_jax.data.sources.source import Source, existing, file_hash, is_file, joined

Protocol = Literal["authors", "double"]
TITLES = {
    "authors": "the authors' protocol (one <S> between sentences)",
    "double": "TF's stream (two <S> between sentences, a trivial target for each)",
}

BASE = "1-billion-word-language-modeling-benchmark-r13output"
URL = f"http://www.statmt.org/lm-benchmark/{BASE}.tar.gz"
SHA256 = "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"
VOCAB = "1b_word_vocab.txt"
VOCAB_URL = f"https://github.com/rafaljozefowicz/lm/raw/master/{VOCAB}"
TRAIN = "training-monolingual.tokenized.shuffled"
HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050"
SHARDS = "news.en-*"
COUNTS = {("symbols", ""): 793_471, ("lines", "train"): 30_301_028}


def find(path: str | None, cache: Path, protocol: Protocol = "authors") -> Source:
    """The corpus at ``path``, or downloaded (1.8 GB, 4 GB unpacked).

    Args:
      path: the archive, its unpacked folder, or the folder in which the authors' script unpacks
        it, with ``valid.txt`` and ``test.txt``. :data:`VOCAB` must lie in that folder or beside
        the archive. ``None``: downloaded; the archive's hash is enforced.
      cache: folder for what is downloaded or unpacked.
      protocol: see the head of this file.

    Raises:
      DataError: nothing usable is there, or a download has a wrong hash.
    """
    if path is None:
        folder, recorded = _downloaded(cache)
        vocab, vocab_sum = _downloaded_vocab(cache)
        about = "published data (sha256 of the archive checked; none is published of its words)"
        recorded = {**recorded, "vocab": vocab_sum}
        return _source(folder, vocab, protocol, True, about, recorded)
    at = existing(path)
    if at.is_dir():
        about = "its files, for which no hash is published"
        return _source(at, _local_vocab(at, at.parent), protocol, None, about)
    vocab = _local_vocab(at.parent)
    folder = unpacked("lm1b", at, cache, wanted, (HELD_OUT,))
    if file_hash(at) == SHA256:
        about = "published data (sha256 of the archive checked)"
        return _source(folder, vocab, protocol, True, about)
    about = "not the published data (the archive's sha256 differs)"
    return _source(folder, vocab, protocol, False, about)


def wanted(member: str) -> str | None:
    """Where a file of the archive goes: training shards and the one held-out file are taken."""
    folder, name = os.path.split(member)
    if os.path.basename(folder) == TRAIN and name.startswith("news.en-"):
        return f"{TRAIN}/{name}"
    return HELD_OUT if name == os.path.basename(HELD_OUT) else None


def _source(
    folder: Path,
    vocab: Path,
    protocol: Protocol,
    published: bool | None,
    label: str,
    recorded: Mapping[str, str] | None = None,
) -> Source:
    shards, valid, test = (
        _train_files(folder),
        _held_out(folder, "valid"),
        _held_out(folder, "test"),
    )
    files = {**{f"train/{p.name}": p for p in shards}, "valid": valid, "test": test, "vocab": vocab}
    same = valid == test or file_hash(valid) == file_hash(test)
    scored = "valid and test are the same held-out file" if same else "valid and test differ"
    return Source(
        name="lm1b",
        files=files,
        splits={"train": joined(shards), "valid": joined([valid]), "test": joined([test])},
        protocol={"protocol": protocol},
        published=published,
        label=f"One Billion Word, {TITLES[protocol]}, {scored}, {label}",
        counts=COUNTS,
        vocab_file=vocab,
        recorded=recorded or {},
    )


def _train_files(folder: Path) -> list[Path]:
    """The training shards, in the order of their names."""
    for inside in (folder / TRAIN, folder / BASE / TRAIN):
        found = sorted(path for path in inside.glob(SHARDS) if is_file(path))
        if found:
            return found
    raise DataError(
        f"lm1b: there is no {TRAIN}/{SHARDS} in {folder}, nor in its folder {BASE}; name the"
        " archive, its unpacked folder, or the folder around it"
    )


def _held_out(folder: Path, split: str) -> Path:
    places = [folder / f"{split}.txt", folder / HELD_OUT, folder / BASE / HELD_OUT]
    for path in places:
        if is_file(path):
            return path
    raise DataError(f"lm1b: there is no {split}.txt and no {HELD_OUT} in {folder}")


def _local_vocab(*folders: Path) -> Path:
    for folder in folders:
        if is_file(folder / VOCAB):
            return folder / VOCAB
    raise DataError(
        f"lm1b: there is no {VOCAB} in {' and none in '.join(map(str, folders))}; fetch it from"
        f" {VOCAB_URL}"
    )


def _downloaded(cache: Path) -> tuple[Path, dict[str, str]]:
    into = cache / "downloads" / "lm1b"
    check = check_hash(f"sha256:{SHA256}", URL, "as published")
    came = download_folder(URL, into, wanted, (HELD_OUT,), check)
    names = {path: f"train/{os.path.basename(path)}" for path in came if path != HELD_OUT}
    recorded = {name: came[path] for path, name in names.items()}
    return into, {**recorded, "valid": came[HELD_OUT], "test": came[HELD_OUT]}


def _downloaded_vocab(cache: Path) -> tuple[Path, str]:
    """The vocabulary, and its sha256 when it came."""
    into = cache / "downloads" / "lm1b-vocab"
    if not into.is_dir():
        with writing(into.parent), folder_in_the_making(into) as folder:
            file = download(VOCAB_URL, folder / VOCAB)
            write_origin(folder, VOCAB_URL, file_hash(file))
            rename_folder(folder, into)
    return into / VOCAB, read_origin(into)["files"][VOCAB]
