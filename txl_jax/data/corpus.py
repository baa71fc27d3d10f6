"""Corpora as token arrays, prepared once and kept.

    sources ──▶ TFDS builder (ArrayRecord) ──▶ vocab.json, train.npy, valid.npy, test.npy
                                                             └──▶ Corpus, memory-mapped

A prepared corpus lies in a folder whose name holds the hash of its source files and of the
protocol (kind of vocabulary, where the text is cut, version of this code): other text or another
protocol is another folder. It gets its name in one move when it is complete, so an interrupted
preparation is never used and two at once do no harm; ``corpus.json`` in it holds the sha256 of
every other file, checked at each load.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from txl_jax.config import DataConfig, ExperimentConfig
from txl_jax.data.errors import DataError
from txl_jax.data.sources import ptb, stdlib, text
from txl_jax.data.sources.download import beside, rename_folder
from txl_jax.data.sources.source import SPLITS, Source, file_hash
from txl_jax.data.vocab import Kind, Vocab, check_ids

__all__ = ["Corpus", "DataError", "corpus_from_config", "load_corpus"]

CODE_VERSION = 1
"""Raised when the same text would give other tokens than before."""

OWN_VOCAB: dict[str, Kind] = {"stdlib": "byte", "ptb": "word", "text": "byte"}
"""What a token of each corpus is when the config does not say."""


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as ids.

    Attributes:
      name: of the corpus.
      vocab: what an id means.
      train, valid, test: 1-D arrays of ids below ``len(vocab)``, memory-mapped, of
        ``vocab.dtype``. A word corpus has ``<eos>`` at the end of every line.
      source_hash: sha256 over the files that the text was read from.
      info: ``tokens``, ``bytes`` (of the text), ``lines`` and ``words`` (between white space,
        no ``<eos>``) per split; ``published``: whether this is the published data byte for
        byte; ``label``: what it is, in words; ``python``: version, for ``stdlib``;
        ``protocol``: all that decided the tokens beside the text.
    """

    name: str
    vocab: Vocab
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    source_hash: str
    info: Mapping[str, Any]


def load_corpus(
    name: str,
    path: str | os.PathLike | None = None,
    *,
    url: str | None = None,
    hash: str | None = None,
    vocab: Kind | None = None,
    valid_fraction: float | None = None,
    test_fraction: float | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Corpus:
    """The corpus, prepared at the first call and read from the cache later.

    The arguments are those of :class:`txl_jax.config.DataConfig`, with its defaults.

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
        "valid_fraction": valid_fraction,
        "test_fraction": test_fraction,
        "cache_dir": None if cache_dir is None else os.fspath(cache_dir),
    }
    given = {key: value for key, value in given.items() if value is not None}
    return corpus_from_config(ExperimentConfig.from_dict({"data": given}).data)


def corpus_from_config(data: DataConfig) -> Corpus:
    """The corpus that an experiment's ``data`` section describes; see :func:`load_corpus`."""
    kind: Kind = data.vocab or OWN_VOCAB[data.name]
    cache = _cache_folder(data)
    try:
        source = _find(data, kind, cache)
        source_hash = source.hash()
    except OSError as error:
        raise DataError(f"the text of {data.name!r} cannot be read: {error}") from error
    protocol = {"vocab": kind, **source.protocol, "code_version": CODE_VERSION}
    identity = {"name": data.name, "source_hash": source_hash, "protocol": protocol}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = cache / f"{data.name}-{kind}-{key[:20]}"
    if not folder.exists():
        _prepare(source, kind, identity, folder)
    return _load(folder, source)


def _cache_folder(data: DataConfig) -> Path:
    chosen = data.cache_dir or os.environ.get("TXL_DATA_DIR") or "~/.cache/txl_jax"
    cache = Path(chosen).expanduser().absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(cache, error) from error
    return cache


def _not_writable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write in the cache folder {folder} ({error.strerror or error}); set"
        " data.cache_dir or $TXL_DATA_DIR to a folder that can be written"
    )


def _find(data: DataConfig, kind: Kind, cache: Path) -> Source:
    if data.hash is not None and data.url is None:
        raise DataError("data.hash: is of a download; it goes with data.url")
    if data.name == "stdlib":
        if data.path is not None:
            raise DataError("data.path: stdlib is the running Python's own; give no path")
        return stdlib.find()
    if data.name == "ptb":
        return ptb.find(data.path, cache)
    return text.find(data, kind, cache)


# --------------------------------------------------------------------------------------
# Preparing.


def _prepare(source: Source, kind: Kind, identity: Mapping[str, Any], folder: Path) -> None:
    if kind != "byte":
        source.check_utf8()
    partial = beside(folder)
    try:
        partial.mkdir()
    except OSError as error:
        raise _not_writable(folder.parent, error) from error
    logging.info("preparing %s (%s) in %s", source.label, kind, folder)
    try:
        record = _write(source, kind, partial)
        if source.hash() != identity["source_hash"]:
            raise DataError(f"{source.label}: changed while it was being prepared; try again")
        (partial / "corpus.json").write_text(json.dumps({**identity, **record}, indent=1))
        rename_folder(partial, folder)
    except OSError as error:
        raise _not_writable(folder.parent, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(source: Source, kind: Kind, folder: Path) -> dict[str, Any]:
    """Writes the token files and ``vocab.json``; gives what ``corpus.json`` says of them."""
    prepared = _prepared_text(source, folder / "tfds")
    if kind == "byte":
        vocab = Vocab.of_bytes()
    elif kind == "char":
        vocab = Vocab.of_chars(block for s in source.counted for block in prepared.blocks(s))
    else:
        vocab = Vocab.of_words(*(prepared.blocks(split) for split in source.counted))
    (folder / "vocab.json").write_text(json.dumps(vocab.to_json()))
    counts: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        where = f"{source.label}, {split} split"
        ids = vocab.encode_blocks(prepared.blocks(split), where, end_last_line=True)
        n = _write_tokens(ids, vocab, folder / f"{split}.npy")
        if n < 2:
            raise DataError(f"{where}: has {n} token, at least 2 are needed; give a longer text")
        counts[split] = {"tokens": n, **_counts(prepared.blocks(split))}
    shutil.rmtree(folder / "tfds")
    names = ["vocab.json", *(f"{split}.npy" for split in SPLITS)]
    return {
        "info": {
            **{key: {s: counts[s][key] for s in SPLITS} for key in counts["train"]},
            "python": platform.python_version() if source.name == "stdlib" else None,
        },
        "files": {
            name: {"size": (folder / name).stat().st_size, "sha256": file_hash(folder / name)}
            for name in names
        },
    }


def _prepared_text(source: Source, folder: Path):
    """The source's text, out of the TFDS builder that has the corpus's name."""
    try:
        from txl_jax.data.builders.source_builder import PreparedText
    except ImportError as error:
        raise DataError(
            f"preparing a corpus needs the package {error.name}: install tensorflow-datasets,"
            " array_record and importlib_resources, or copy the cache folder from a machine"
            " where the corpus is prepared"
        ) from error
    module = importlib.import_module(f"txl_jax.data.builders.{source.name}")
    return PreparedText(getattr(module, source.name.capitalize()), source, folder)


def _write_tokens(ids: Iterator[np.ndarray], vocab: Vocab, path: Path) -> int:
    """Writes arrays of ids, one after another, as one ``.npy`` file; gives their number."""
    raw = path.with_suffix(".raw")
    with open(raw, "wb") as file:
        for block in ids:
            block.astype(vocab.dtype, copy=False).tofile(file)
    n = raw.stat().st_size // vocab.dtype.itemsize
    if n:
        np.save(path, np.memmap(raw, vocab.dtype, "r"), allow_pickle=False)
    raw.unlink()
    return n


def _counts(blocks: Iterable[bytes]) -> dict[str, int]:
    n_bytes = lines = words = 0
    last = b"\n"
    for block in blocks:
        n_bytes += len(block)
        lines += block.count(b"\n")
        words += len(block.split()) - bool(last.strip() and block[:1].strip())
        last = block[-1:]
    return {"bytes": n_bytes, "lines": lines + (last != b"\n"), "words": words}


# --------------------------------------------------------------------------------------
# Loading.


def _load(folder: Path, source: Source) -> Corpus:
    try:
        record = json.loads((folder / "corpus.json").read_text())
        files, info = dict(record["files"]), dict(record["info"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, folder / "corpus.json", f"cannot be read ({error})") from error
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise _damaged(folder, path, "is missing")
        if path.stat().st_size != expected["size"]:
            found = f"has {path.stat().st_size} bytes, not {expected['size']}"
            raise _damaged(folder, path, found)
        if (found := file_hash(path)) != expected["sha256"]:
            raise _damaged(folder, path, f"has the sha256 {found}, not {expected['sha256']}")
    vocab = Vocab.from_json(json.loads((folder / "vocab.json").read_text()))
    arrays = {s: np.load(folder / f"{s}.npy", mmap_mode="r", allow_pickle=False) for s in SPLITS}
    for split, array in arrays.items():
        check_ids(array, len(vocab), str(folder / f"{split}.npy"))
    info |= {"published": source.published, "label": source.label, "protocol": record["protocol"]}
    return Corpus(record["name"], vocab, **arrays, source_hash=record["source_hash"], info=info)


def _damaged(folder: Path, path: Path, found: str) -> DataError:
    return DataError(
        f"{path} {found}: the prepared corpus is damaged. Delete the folder {folder}; the next"
        " run prepares it again"
    )
