"""``wt103`` and ``wt2``: WikiText-103 and WikiText-2 (Merity et al. 2016), words as tokenised.

The first address of both is gone; :data:`MIRROR` is kept by their first author. The hashes of the
archives are those that torchtext published. The unpacked files have no published hash: what is
known of them is how many tokens they hold.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from txl_jax.data.sources.archives import plain_names, unpacked
from txl_jax.data.sources.download import check_hash, download_folder
from txl_jax.data.sources.folders import file_names, nothing_in, split_files
from txl_jax.data.sources.source import SPLITS, ByteRange, Source, existing, file_hash

MIRROR = "https://wikitext.smerity.com/"
PATTERNS = ("wiki.{}.tokens", "{}.txt")
NAMES = file_names(PATTERNS[0], SPLITS)


@dataclasses.dataclass(frozen=True)
class WikiText:
    """One of the two.

    Attributes:
      title: for reports.
      archive: name of the published file; its unpacked folder is this without ``-v1.zip``.
      md5: of the archive.
      counted: splits that the authors count the vocabulary over.
      counts: published, with ``<eos>``.
    """

    title: str
    archive: str
    md5: str
    counted: tuple[str, ...]
    counts: Mapping[tuple[str, str], int]


def _counts(train: int, symbols: int) -> Mapping[tuple[str, str], int]:
    held_out = {("tokens", "valid"): 217_646, ("tokens", "test"): 245_569}  # of both the same text
    return {("tokens", "train"): train, **held_out, ("symbols", ""): symbols}


CORPORA = {
    "wt103": WikiText(
        "WikiText-103",
        "wikitext-103-v1.zip",
        "9ddaacaf6af0710eda8c456decff7832",
        ("train",),
        _counts(103_227_021, 267_735),
    ),
    "wt2": WikiText(
        "WikiText-2",
        "wikitext-2-v1.zip",
        "542ccefacc6c27f945fb54453812b3cd",
        SPLITS,
        _counts(2_088_628, 33_278),
    ),
}


def find(name: str, path: str | None, cache: Path) -> Source:
    """The corpus ``wt103`` or ``wt2`` at ``path``, or downloaded.

    Case is kept. The vocabulary of ``wt103`` is counted over its training split, that of ``wt2``
    over all three, as the authors do.

    Args:
      name: of the corpus.
      path: the archive, its unpacked folder, or a folder with ``wiki.train.tokens``, … or with
        ``train.txt``, ``valid.txt`` and ``test.txt``. ``None``: downloaded; the hash is enforced.
      cache: folder for what is downloaded or unpacked.

    Raises:
      DataError: nothing usable is there, or a download has a wrong hash.
    """
    corpus = CORPORA[name]
    recorded: Mapping[str, str] = {}
    files: Mapping[str, Path]
    published: bool | None
    if path is None:
        into, came = _downloaded(name, corpus, cache)
        files = {split: into / file for split, file in NAMES.items()}
        recorded = {split: came[file] for split, file in NAMES.items()}
        published, label = True, "published data (md5 of the archive checked)"
    else:
        files, published, label = _local(name, corpus, existing(path), cache)
    return Source(
        name=name,
        files=files,
        splits={split: [ByteRange.whole(file)] for split, file in files.items()},
        counted=corpus.counted,
        published=published,
        label=f"{corpus.title}, {label}",
        counts=corpus.counts,
        recorded=recorded,
    )


def _local(
    name: str, corpus: WikiText, path: Path, cache: Path
) -> tuple[Mapping[str, Path], bool | None, str]:
    if path.is_file():
        required = tuple(NAMES.values())
        folder = unpacked(name, path, cache, plain_names(required), required)
        files = {split: folder / file for split, file in NAMES.items()}
        if file_hash(path, "md5") == corpus.md5:
            return files, True, "published data (md5 of the archive checked)"
        return files, False, "not the published data (the archive's md5 differs)"
    inside = (".", corpus.archive.removesuffix("-v1.zip"))
    found = split_files(name, path, inside, PATTERNS, SPLITS)
    if found is None:
        raise nothing_in(name, path, inside, [pattern.format("train") for pattern in PATTERNS])
    return found[1], None, "its files, for which no hash is published"


def _downloaded(name: str, corpus: WikiText, cache: Path) -> tuple[Path, Mapping[str, str]]:
    url = MIRROR + corpus.archive
    into, required = cache / "downloads" / name, tuple(NAMES.values())
    check = check_hash(f"md5:{corpus.md5}", url, "as published")
    return into, download_folder(url, into, plain_names(required), required, check)
