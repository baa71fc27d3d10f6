"""Corpora as token arrays, prepared once and kept.

    sources ──▶ TFDS builder (ArrayRecord) ──▶ vocab.json, train.npy, valid.npy, test.npy
                                                             └──▶ Corpus, memory-mapped

A prepared corpus lies in a folder whose name holds the hash of its source files and of the
protocol (kind of vocabulary, where the text is cut, version of this code): other text or another
protocol is another folder. ``corpus.json`` in it holds the sha256 of every other file, checked at
each load; what does not match is prepared again. How it is made is in :mod:`txl_jax.data.prepare`.
"""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import DataConfig, ExperimentConfig
from txl_jax.config.folders import data_folder
from txl_jax.data.errors import DataError
from txl_jax.data.prepare import prepare
from txl_jax.data.sentences import Sentences
from txl_jax.data.sources import enwik8, lm1b, probe, ptb, stdlib, text, text8, wikitext
from txl_jax.data.sources.partial import clear_left_folders, remove_folder, writing
from txl_jax.data.sources.source import SPLITS, Source, file_hash
from txl_jax.data.vocab import Kind, Vocab, check_ids

__all__ = ["Corpus", "DataError", "corpus_from_config", "load_corpus"]

CODE_VERSION = 2
"""Raised when the same text would give other tokens than before."""

OWN_VOCAB: dict[str, Kind] = {
    "stdlib": "byte",
    "text": "byte",
    "ptb": "word",
    "wt103": "word",
    "wt2": "word",
    "lm1b": "sentence",
    "enwik8": "byte",
    "text8": "letter",
    "probe": "char",
}
"""What a token of each corpus is when the config does not say."""

FOREIGN_VOCAB = "; encoded with a trained model's vocabulary, not its own"
"""Ends the label of a text that another text's vocabulary encodes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as ids.

    Example:
      >>> import txl_jax
      >>> with open("words.txt", "w") as file:
      ...     for _ in range(100):
      ...         print("the cat saw a dog", file=file)
      >>> corpus = txl_jax.load_corpus("text", path="words.txt", vocab="word")
      >>> corpus.vocab.symbols
      ['<eos>', 'the', 'cat', 'saw', 'a', 'dog']
      >>> corpus.info["words"]["test"], len(corpus.test)
      (25, 30)

    Attributes:
      name: of the corpus.
      vocab: what an id means.
      train, valid, test: 1-D arrays of ids below ``len(vocab)``, memory-mapped, of
        ``vocab.dtype``. A word corpus has ``<eos>`` at the end of every line. ``lm1b``:
        :class:`~txl_jax.data.sentences.Sentences`, a sequence of such arrays.
      source_hash: sha256 over the files that the text was read from.
      info: ``tokens``, ``bytes`` (of the text), ``lines`` and ``words`` (between white space,
        no ``<eos>``) per split; ``published``: whether this is the published data byte for
        byte; ``counts_as_published``: whether what is published of its counts holds, ``None``
        if nothing is; ``label``: what it is, in words; ``foreign_vocab``: whether it is encoded
        with the vocabulary of a model that was trained on other text; ``python``: version, for
        ``stdlib``; ``protocol``: all that decided the tokens beside the text. Tokens of sentences
        are the targets: words and a ``<S>`` each, or two (protocol ``double``).
    """

    name: str
    vocab: Vocab
    train: Any  # np.ndarray | Sentences
    valid: Any
    test: Any
    source_hash: str
    info: Mapping[str, Any]


class DamagedError(DataError):
    """A prepared corpus with a file that is not what was prepared; ``what`` says which."""

    def __init__(self, folder: Path, path: Path, found: str):
        self.what = f"{path} {found}: the prepared corpus is damaged"
        super().__init__(f"{self.what}. Delete the folder {folder}; the next run prepares it again")


def load_corpus(
    name: str,
    path: str | os.PathLike | None = None,
    *,
    url: str | None = None,
    hash: str | None = None,
    vocab: str | None = None,
    vocab_size: int | None = None,
    protocol: str | None = None,
    valid_fraction: float | None = None,
    test_fraction: float | None = None,
    cache_dir: str | os.PathLike | None = None,
    probe: Mapping[str, Any] | None = None,
) -> Corpus:
    """The corpus, prepared at the first call and read from the cache later.

    The arguments are those of :class:`txl_jax.config.DataConfig`, with its defaults; ``drawn``
    is its section ``probe``.

    Example:
      >>> import pathlib, txl_jax
      >>> _ = pathlib.Path("mine.txt").write_text("the cat saw a dog " * 100)
      >>> corpus = txl_jax.load_corpus("text", path="mine.txt")
      >>> corpus.vocab.kind
      'byte'
      >>> corpus.vocab.decode(corpus.train[:7])
      'the cat'
      >>> len(corpus.train), len(corpus.valid), len(corpus.test)
      (1620, 90, 90)

    Raises:
      ConfigError: an unknown name, or a setting out of range.
      DataError: text that is missing, empty, damaged or not in UTF-8, a wrong hash, or a cache
        folder that cannot be written.
    """
    given = {
        "name": name,
        "path": None if path is None else os.fspath(path),
        "url": url,
        "hash": hash,
        "vocab": vocab,
        "vocab_size": vocab_size,
        "protocol": protocol,
        "valid_fraction": valid_fraction,
        "test_fraction": test_fraction,
        "cache_dir": None if cache_dir is None else os.fspath(cache_dir),
        "probe": probe,
    }
    given = {key: value for key, value in given.items() if value is not None}
    return corpus_from_config(ExperimentConfig.from_dict({"data": given}).data)


def corpus_from_config(data: DataConfig, vocab: Vocab | None = None) -> Corpus:
    """The corpus that an experiment's ``data`` section describes; see :func:`load_corpus`.

    ``vocab``: of a trained model. The text is encoded with it; where it is not the vocabulary
    that the text itself gives, ``corpus.info["foreign_vocab"]`` is true and the label says so.

    Raises:
      DataError: also a vocabulary of another kind, or one that lacks a symbol of the text.
    """
    kind: Kind = data.vocab or OWN_VOCAB[data.name]
    if vocab is not None and vocab.kind != kind:
        raise DataError(
            f"the model was trained with a vocabulary of kind {vocab.kind!r}, and the corpus"
            f" {data.name!r} is read as {kind!r} here; set data.vocab or data.name to one that is"
            f" {vocab.kind!r}"
        )
    cache = _cache_folder(data)
    source = _find(data, kind, cache)
    source_hash = source.hash()
    protocol = {"vocab": kind, **source.protocol, "code_version": CODE_VERSION}
    identity = {"name": data.name, "source_hash": source_hash, "protocol": protocol}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = cache / f"{data.name}-{kind}-{key[:20]}"
    folder = _prepared(source, kind, identity, folder, vocab)
    made = _made(folder)
    try:
        return _load(folder, source)
    except DamagedError as error:
        _put_away(folder, made, error.what)
    return _load(_prepared(source, kind, identity, folder, vocab), source)


def _prepared(
    source: Source, kind: Kind, identity: dict[str, Any], folder: Path, vocab: Vocab | None
) -> Path:
    """The prepared corpus's folder, made if it is not there; one beside it for a foreign vocab."""
    if vocab is not None and not _has_vocab(folder, vocab):
        folder = folder.with_name(f"{folder.name}-{_vocab_hash(vocab)[:20]}")
        identity = {**identity, "vocab_hash": _vocab_hash(vocab)}
    if not folder.exists():
        for place in ("unpacked", "downloads"):
            clear_left_folders(folder.parent / place)
        prepare(source, kind, identity, folder, vocab)
    return folder


def _made(folder: Path) -> tuple[int, int]:
    """What tells a prepared folder from one made later in its place."""
    status = folder.stat()
    return status.st_ino, status.st_ctime_ns


def _put_away(folder: Path, made: tuple[int, int], what: str) -> None:
    """Removes a damaged corpus, saying so, unless another process has prepared it anew by now.

    ``made``: of the damaged folder. One that cannot be removed stays, for the next load to refuse.
    """
    try:
        if _made(folder) != made:
            return
        remove_folder(folder)
    except OSError:
        return
    print(f"{what}: preparing it again", file=sys.stderr, flush=True)


def _has_vocab(folder: Path, vocab: Vocab) -> bool:
    """Whether a prepared corpus is there and of this vocabulary."""
    try:
        return json.loads((folder / "vocab.json").read_text()) == vocab.to_json()
    except FileNotFoundError:
        return False
    except ValueError:
        return True  # damaged: the loading of this folder says so


def _vocab_hash(vocab: Vocab) -> str:
    return hashlib.sha256(json.dumps(vocab.to_json()).encode()).hexdigest()


def _cache_folder(data: DataConfig) -> Path:
    cache = data_folder(data.cache_dir)
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    return cache


def _find(data: DataConfig, kind: Kind, cache: Path) -> Source:
    if data.hash is not None and data.url is None:
        raise DataError("data.hash: is of a download; it goes with data.url")
    if data.name == "stdlib":
        if data.path is not None:
            raise DataError("data.path: stdlib is the running Python's own; give no path")
        return stdlib.find()
    if data.name == "probe":
        if data.path is not None:
            raise DataError("data.path: probe is drawn from data.probe; give no path")
        return probe.find(data.probe)
    if data.name == "text":
        return text.find(data, kind, cache)
    protocol: Any = data.protocol or "authors"  # one that the corpus has, as the config checks
    finders: dict[str, Callable[[], Source]] = {
        "ptb": lambda: ptb.find(data.path, cache),
        "wt103": lambda: wikitext.find("wt103", data.path, cache),
        "wt2": lambda: wikitext.find("wt2", data.path, cache),
        "lm1b": lambda: lm1b.find(data.path, cache, protocol),
        "enwik8": lambda: enwik8.find(data.path, protocol, cache),
        "text8": lambda: text8.find(data.path, cache),
    }
    source = finders[data.name]()
    if kind != OWN_VOCAB[data.name]:  # what is published was counted in its own tokens
        source = dataclasses.replace(source, counts={})
    return source


# --------------------------------------------------------------------------------------
# Loading.


def _load(folder: Path, source: Source) -> Corpus:
    try:
        record = json.loads((folder / "corpus.json").read_text())
        files, info = dict(record["files"]), dict(record["info"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(folder, folder / "corpus.json", f"cannot be read ({error})") from error
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(folder, path, "is missing")
        if path.stat().st_size != expected["size"]:
            found = f"has {path.stat().st_size} bytes, not {expected['size']}"
            raise DamagedError(folder, path, found)
        if (found := file_hash(path)) != expected["sha256"]:
            raise DamagedError(folder, path, f"has the sha256 {found}, not {expected['sha256']}")
    vocab = Vocab.from_json(json.loads((folder / "vocab.json").read_text()))
    splits = {split: _load_split(folder, split, vocab) for split in SPLITS}
    info |= {
        "published": bool(source.published),
        "foreign_vocab": bool(info.get("foreign_vocab")),
        "label": _label(source, info),
        "protocol": record["protocol"],
    }
    return Corpus(record["name"], vocab, **splits, source_hash=record["source_hash"], info=info)


def _load_split(folder: Path, split: str, vocab: Vocab) -> np.ndarray | Sentences:
    path = folder / f"{split}.npy"
    tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    check_ids(tokens, len(vocab), str(path))
    if vocab.kind != "sentence":
        return tokens
    offsets = np.load(folder / f"{split}.offsets.npy", mmap_mode="r", allow_pickle=False)
    return Sentences(tokens, offsets)


def _label(source: Source, info: Mapping[str, Any]) -> str:
    if info.get("foreign_vocab"):
        return source.label + FOREIGN_VOCAB
    if source.published is not None:
        return source.label
    if info["counts_as_published"]:
        return f"{source.label}; counts as published"
    return f"{source.label}; not the published data (its counts differ)"
