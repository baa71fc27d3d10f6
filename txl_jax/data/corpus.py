"""Loads corpora as token arrays, which are prepared once and kept in the cache.

    source ──▶ vocab.json, train.npy, valid.npy, test.npy ──▶ Corpus, memory-mapped

The name of a prepared folder has a hash of the source files and of the protocol (kind of
vocabulary, cuts between splits, version of code). Each load checks the files against the sha256
in ``corpus.json``, and prepares a damaged corpus again.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.config import DataConfig, ExperimentConfig
from txl_jax.config.folders import data_folder
from txl_jax.data.errors import DataError
from txl_jax.data.pieces import STARTS, Pieces, Split, flat_tokens
from txl_jax.data.prepare import prepare, report
from txl_jax.data.sources import benchmarks, lm1b, probe, stdlib, text, tokens
from txl_jax.data.sources.cache import json_hash, remove_damaged, write_errors
from txl_jax.data.sources.source import SPLITS, Source, existing_path, file_hash
from txl_jax.data.symbols import Kind
from txl_jax.data.vocab import Vocab
from txl_jax.parallel.processes import print_once
from txl_jax.paths import is_remote
from txl_jax.standard_streams import say

__all__ = ["Corpus", "DataError", "corpus_from_config", "load_corpus"]

CODE_VERSION = 4  # is increased if a code change gives a text other tokens or counts

DEFAULT_VOCAB: dict[str, Kind] = {
    "ptb": "word",
    "wt103": "word",
    "wt2": "word",
    "lm1b": "sentence",
    "text8": "letter",
    "probe": "char",
    "tokens": "id",
}
"""The kinds of vocabulary if ``data.vocab`` is not set; all other corpora have ``byte``."""

FOREIGN_VOCAB = "; encoded with a trained model's vocabulary, not its own"  # end of a label


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as token ids, in three splits.

    Example:
      >>> import pathlib, txl_jax
      >>> _ = pathlib.Path("words.txt").write_text("the cat saw a dog\\n" * 100)
      >>> corpus = txl_jax.load_corpus("text", path="words.txt", vocab="word")
      >>> corpus.vocab.symbols
      ['<eos>', 'the', 'cat', 'saw', 'a', 'dog']
      >>> corpus.info["words"]["test"], len(corpus.test)
      (25, 30)

    Attributes:
      name, vocab: the name of the corpus, and the vocabulary with the symbols of the ids.
      train, valid, test: memory-mapped 1-D arrays of ids of ``vocab.dtype``, with ``<eos>`` at the
        end of each line of words, or :class:`~txl_jax.Pieces`: the sentences of ``lm1b``,
        or documents.
      source_hash: the sha256 over the files of the text.
      info: numbers of ``tokens`` (for sentences, of targets), ``bytes``, ``lines`` and ``words`` of
        each split; whether the files are the ``published`` ones, and ``counts_as_published``
        (``None`` if no counts are published); a ``label`` for reports; whether the vocabulary is
        that of a model (``foreign_vocab``); the version of ``python`` for ``stdlib``; and the
        ``protocol``, the other settings that decided the tokens.
    """

    name: str
    vocab: Vocab
    train: Any  # Split
    valid: Any
    test: Any
    source_hash: str
    info: Mapping[str, Any]

    def __repr__(self) -> str:
        tokens = self.info["tokens"]
        sizes = ", ".join(f"{split} {tokens[split]:,} tokens" for split in SPLITS)
        return f"Corpus({self.name!r}, {self.vocab!r}: {sizes})"


def load_corpus(
    name: str,
    path: str | os.PathLike | None = None,
    *,
    url: str | None = None,
    hash: str | None = None,
    field: str | None = None,
    vocab: str | None = None,
    vocab_size: int | None = None,
    tokenizer: str | os.PathLike | None = None,
    dtype: str | None = None,
    document_separator: str | None = None,
    document_files: bool | None = None,
    cross_documents: bool | None = None,
    protocol: str | None = None,
    valid_fraction: float | None = None,
    test_fraction: float | None = None,
    cache_dir: str | os.PathLike | None = None,
    probe: Mapping[str, Any] | None = None,
) -> Corpus:
    """Loads a corpus, which the first call prepares and later calls read from the cache.

    The arguments and their defaults are those of :class:`txl_jax.config.DataConfig`.

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
      ConfigError: the name is unknown, or a setting is out of range.
      DataError: the text cannot be used, a hash is wrong, or the cache cannot be written.
    """
    given = {key: value for key, value in locals().items() if value is not None}
    return corpus_from_config(ExperimentConfig.from_dict({"data": given}).data)


def corpus_from_config(data: DataConfig, vocab: Vocab | None = None) -> Corpus:
    """Loads a corpus, encoded with ``vocab`` or else its own vocabulary, or raises DataError."""
    kind = _kind(data, vocab)
    if vocab is not None and vocab.kind != kind:
        what = f"the model has a vocabulary of kind {vocab.kind!r}, and the corpus {data.name!r} is"
        raise DataError(f"{what} read as {kind!r}; set data.vocab or data.name to get its kind")
    if data.name == "tokens":
        return _token_corpus(data, vocab)
    if data.tokenizer and vocab is None:
        path: Any = data.tokenizer
        if is_remote(path):
            path = existing_path(path, data_folder(data.cache_dir), "data.tokenizer")
        vocab = Vocab.from_tokenizer(path)
    source = find_source(data, vocab)
    identity: dict[str, Any] = {"name": data.name, "source_hash": source.hash()}
    identity["protocol"] = {"vocab": kind, **source.protocol, "code_version": CODE_VERSION}
    cache = data_folder(data.cache_dir)
    folder = cache / f"{data.name}-{kind}-{json_hash(identity, sort_keys=True)[:20]}"
    if vocab is not None and not _has_vocab(folder, vocab):
        identity["vocab_hash"] = json_hash(vocab.to_json())
        folder = folder.with_name(f"{folder.name}-{identity['vocab_hash'][:20]}")
    if folder.exists() and (fault := _damage(folder)):
        say(f"{fault}: preparing it again")
        with write_errors(cache):
            remove_damaged(folder, lambda: _damage(folder))
    if not folder.exists():
        prepare(source, kind, identity, folder, vocab)
    return _load(folder, source, data)


def _token_corpus(data: DataConfig, vocab: Vocab | None) -> Corpus:
    """Returns a corpus of the user's own arrays, with ``vocab`` or else their own vocabulary."""
    symbols = None if vocab is None else vocab.symbols
    found = tokens.find(data, data_folder(data.cache_dir), symbols)
    sizes = {split: len(flat_tokens(found.splits[split])) for split in SPLITS}
    if vocab is None:
        vocab = found.vocab(data.vocab_size)
        counts = " / ".join(f"{n:,}" for n in sizes.values())
        about = f"{counts} tokens (train / valid / test), {len(vocab):,} ids"
        print_once(f"{found.label}: {about}", sys.stderr)
    else:
        found.check(vocab)
    info = {
        "tokens": sizes,
        "published": False,
        "counts_as_published": None,
        "label": found.label,
        "foreign_vocab": False,
        "python": None,
        "protocol": {"vocab": "id", **found.protocol},
    }
    if any(isinstance(split, Pieces) for split in found.files.values()):
        info["documents"] = {split: len(found.splits[split]) for split in SPLITS}
    return Corpus(data.name, vocab, **found.splits, source_hash=found.hash(), info=info)


def find_source(data: DataConfig, vocab: Vocab | None = None) -> Source:
    """Finds, downloads or unpacks the text of a ``data`` section, or raises DataError.

    ``vocab`` is the vocabulary of a trained model that will read the text, if there is one.
    """
    if data.name == "tokens":
        raise DataError("data.name = 'tokens': has arrays of ids and no text; name another corpus")
    kind, cache = _kind(data, vocab), data_folder(data.cache_dir)
    with write_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
    if data.hash is not None and data.url is None:
        raise DataError("data.hash: needs data.url, whose download it checks")
    if data.path is not None and data.name in ("stdlib", "probe"):
        own = "the source code of the running Python"
        origin = own if data.name == "stdlib" else "generated from the settings data.probe"
        raise DataError(f"data.path: {data.name} is {origin}; give no path")
    if data.name == "stdlib":
        source = stdlib.find()
    elif data.name == "probe":
        source = probe.find(data.probe)
    elif data.name == "text":
        source = text.find(data, kind, cache)
    elif data.name == "lm1b":
        protocol: Any = data.protocol or "authors"  # the config allows only lm1b's protocols
        source = lm1b.find(data.path, cache, protocol)
    else:
        source = benchmarks.CORPORA[data.name, data.protocol].find(data.path, cache)
    if kind != DEFAULT_VOCAB.get(data.name, "byte"):  # counts are published for the default only
        source = dataclasses.replace(source, counts={})
    return source


def _kind(data: DataConfig, vocab: Vocab | None) -> Kind:
    own = vocab is not None and vocab.kind == "tokenizer"  # a model stores its own tokenizer
    if data.tokenizer or (own and data.name == "text" and data.vocab is None):
        return "tokenizer"
    return data.vocab or DEFAULT_VOCAB.get(data.name, "byte")


def _has_vocab(folder: Path, vocab: Vocab) -> bool:
    """Whether a prepared corpus exists and has this vocabulary, or is damaged."""
    try:
        return json.loads((folder / "vocab.json").read_text()) == vocab.to_json()
    except (OSError, ValueError) as error:
        return isinstance(error, ValueError)


def _damage(folder: Path) -> str | None:
    """Returns what is wrong with a prepared corpus, or ``None``."""
    try:
        files = json.loads((folder / "corpus.json").read_text())["files"]
        wrong = [name for name in files if file_hash(folder / name) != files[name]["sha256"]]
    except (DataError, OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder}: the prepared corpus is damaged ({error})"
    return f"{folder / wrong[0]} has changed: the prepared corpus is damaged" if wrong else None


def _load(folder: Path, source: Source, data: DataConfig) -> Corpus:
    record = json.loads((folder / "corpus.json").read_text())
    vocab = Vocab.from_json(json.loads((folder / "vocab.json").read_text()))
    cross = data.cross_documents
    splits = {split: _load_split(folder, split, vocab, source, cross) for split in SPLITS}
    info, label = record["info"], source.label
    if info["foreign_vocab"]:
        label += FOREIGN_VOCAB
    elif source.published is None:
        same = info["counts_as_published"]
        label += "; counts as published" if same else "; not the published data (its counts differ)"
    info |= {"published": bool(source.published), "label": label, "protocol": record["protocol"]}
    if source.has_documents:
        info["documents"] = {split: len(splits[split]) for split in SPLITS}
    report(record, source.label, len(vocab), data.vocab == "byte")
    return Corpus(record["name"], vocab, **splits, source_hash=record["source_hash"], info=info)


def _load_split(folder: Path, split: str, vocab: Vocab, source: Source, cross: bool) -> Split:
    path = folder / f"{split}.npy"
    tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    if source.has_documents:
        starts = np.load(path.with_suffix(STARTS), allow_pickle=False)
        return Pieces(tokens, starts, source.separator is not None or cross)
    if vocab.kind != "sentence":
        return tokens
    offsets = np.load(folder / f"{split}.offsets.npy", mmap_mode="r", allow_pickle=False)
    return Pieces(tokens, offsets[:-1], True, "sentences")
