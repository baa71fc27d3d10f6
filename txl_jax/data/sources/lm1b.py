"""Finds ``lm1b``, the One Billion Word benchmark (Chelba et al. 2013) of shuffled sentences.

As in the authors' scripts, one of the 50 held-out files is both validation and test split. The
vocabulary is the published list of 793,471 words, in its order. The archive's hash is from
tensorflow_datasets. No hash of the vocabulary is published, so the hash of the downloaded file is
recorded, and later runs compare the file with it.

    protocol authors   <S> the cat sat <S> it rained <S>             PyTorch
    protocol double    <S> the cat sat <S> <S> it rained <S> <S>     TensorFlow

With ``double`` each sentence has one more target, an ``<S>`` that is easy to predict.
Perplexities of the two protocols therefore cannot be compared.
"""

import functools
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from txl_jax.data.errors import DataError
from txl_jax.data.sources.archives import extract, unpacked
from txl_jax.data.sources.download import download_folder
from txl_jax.data.sources.source import Source, existing_path, file_hash, is_file, join_files

Protocol = Literal["authors", "double"]
TITLES = {
    "authors": "the authors' protocol (one <S> between sentences)",
    "double": "TF's stream (two <S> between sentences, one trivial target in each sentence)",
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
    """Finds the corpus at ``path``, or downloads it (1.8 GB, 4 GB unpacked) and checks its hash.

    ``path`` is the archive, its unpacked folder, or the folder that the authors' script makes, with
    ``valid.txt`` and ``test.txt``. :data:`VOCAB` must be in this folder, or beside ``path``.
    Raises DataError if there is no usable text, or if a download has a wrong hash.
    """
    if path is None:
        return _downloaded(cache, protocol)
    given = existing_path(path, cache)
    if given.is_dir():
        label = "its files, for which no hash is published"
        return _source(given, _local_vocab(given, given.parent), protocol, label, published=None)
    vocab = _local_vocab(given.parent)
    folder = unpacked("lm1b", given, cache, wanted, (HELD_OUT,))
    published = file_hash(given) == SHA256
    checked = "published data (sha256 of the archive checked)"
    label = checked if published else "not the published data (the archive's sha256 differs)"
    return _source(folder, vocab, protocol, label, published=published)


def wanted(member: str) -> str | None:
    """Selects the training shards and one held-out file of the archive; see :func:`extract`."""
    folder, name = os.path.split(member)
    if os.path.basename(folder) == TRAIN and name.startswith("news.en-"):
        return f"{TRAIN}/{name}"
    return HELD_OUT if name == os.path.basename(HELD_OUT) else None


def _downloaded(cache: Path, protocol: Protocol) -> Source:
    downloads = cache / "downloads"
    unpack = functools.partial(extract, wanted=wanted, required=(HELD_OUT,), what=URL)
    sums = download_folder(URL, downloads / "lm1b", unpack, f"sha256:{SHA256}")
    copy = lambda file, folder: shutil.copyfile(file, folder / VOCAB)
    vocab_sums = download_folder(VOCAB_URL, downloads / "lm1b-vocab", copy)
    held_out = sums.pop(HELD_OUT)
    recorded = {f"train/{os.path.basename(path)}": sums[path] for path in sums}
    recorded |= {"valid": held_out, "test": held_out, "vocab": vocab_sums[VOCAB]}
    label = "published data (sha256 of the archive checked; no hash of the vocabulary is published)"
    vocab = downloads / "lm1b-vocab" / VOCAB
    return _source(downloads / "lm1b", vocab, protocol, label, published=True, recorded=recorded)


def _source(folder: Path, vocab: Path, protocol: Protocol, label: str, **known: Any) -> Source:
    shards = _train_files(folder)
    valid, test = _held_out(folder, "valid"), _held_out(folder, "test")
    files = {**{f"train/{p.name}": p for p in shards}, "valid": valid, "test": test, "vocab": vocab}
    texts = {"train": join_files(shards), "valid": join_files([valid]), "test": join_files([test])}
    same = valid == test or file_hash(valid) == file_hash(test)
    scored = "valid and test are the same held-out file" if same else "valid and test differ"
    return Source(
        name="lm1b",
        files=files,
        splits=texts,
        protocol={"protocol": protocol},
        label=f"One Billion Word, {TITLES[protocol]}, {scored}, {label}",
        counts=COUNTS,
        vocab_file=vocab,
        **known,
    )


def _train_files(folder: Path) -> list[Path]:
    """Returns the training shards in the order of their names."""
    for inside in (folder / TRAIN, folder / BASE / TRAIN):
        if found := sorted(path for path in inside.glob(SHARDS) if is_file(path)):
            return found
    fix = "name the archive, its unpacked folder, or the folder around it"
    where = f"{TRAIN}/{SHARDS} in {folder}, nor in its folder {BASE}"
    raise DataError(f"lm1b: there is no {where}; {fix}")


def _held_out(folder: Path, split: str) -> Path:
    paths = [folder / f"{split}.txt", folder / HELD_OUT, folder / BASE / HELD_OUT]
    return _first(paths, f"no {split}.txt and no {HELD_OUT} in {folder}")


def _local_vocab(*folders: Path) -> Path:
    missing = f"no {VOCAB} in {' and none in '.join(map(str, folders))}; fetch it from {VOCAB_URL}"
    return _first([folder / VOCAB for folder in folders], missing)


def _first(paths: list[Path], missing: str) -> Path:
    for path in filter(is_file, paths):
        return path
    raise DataError(f"lm1b: there is {missing}")
