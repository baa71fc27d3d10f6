"""A source's text made into a vocabulary and token files.

What is prepared is counted, held against what is published of it, and told on stderr. Tokens of a
text are ``train.npy``, …; of sentences there is ``train.offsets.npy``, … beside them: where each
begins, and where the last one ends.
"""

import dataclasses
import importlib
import json
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from txl_jax.data.errors import DataError
from txl_jax.data.sources.partial import folder_in_the_making, rename_folder, writing
from txl_jax.data.sources.progress import watched
from txl_jax.data.sources.source import SPLITS, Source, file_hash
from txl_jax.data.vocab import Kind, Vocab


def prepare(
    source: Source,
    kind: Kind,
    identity: Mapping[str, Any],
    folder: Path,
    vocab: Vocab | None = None,
) -> None:
    """Makes ``folder``, the prepared corpus of a source.

    It gets its name in one move when it is complete, so an interrupted preparation is never used
    and two at once do no harm.

    Args:
      source: the text.
      kind: of its vocabulary.
      identity: ``source_hash`` and whatever else goes into ``corpus.json``.
      folder: where nothing is yet.
      vocab: to encode with, of that kind. ``None``: the one that the text gives.

    Raises:
      DataError: text that cannot be encoded or that changes meanwhile, published files whose
        counts are not the published ones, or a folder that cannot be written.
    """
    logging.info("preparing %s (%s) in %s", source.label, kind, folder)
    with writing(folder.parent), folder_in_the_making(folder) as partial:
        try:
            if kind != "byte":
                source.check_utf8()
            record = _write(source, kind, partial, vocab)
        except DataError:
            _check_unchanged(source, identity["source_hash"])  # if it changed, that is the reason
            raise
        _check_unchanged(source, identity["source_hash"])
        (partial / "corpus.json").write_text(json.dumps({**identity, **record}, indent=1))
        rename_folder(partial, folder)


def _check_unchanged(source: Source, source_hash: str) -> None:
    changed = "changed while it was being prepared; try again"
    try:
        now = source.hash()
    except DataError as error:
        raise DataError(f"{error}: the text {changed}") from error
    if now != source_hash:
        raise DataError(f"{source.label}: {changed}")


def _write(source: Source, kind: Kind, folder: Path, given: Vocab | None) -> dict[str, Any]:
    """Writes the token files and ``vocab.json``; gives what ``corpus.json`` says of them."""
    prepared = _prepared_text(source, folder / "tfds")

    def blocks(split: str, what: str) -> Iterator[bytes]:
        total = None if source.decoded else source.size(split)
        return watched(prepared.blocks(split), f"{source.name}: {what} {split}", total)

    texts = [blocks(split, "counting") for split in source.counted]
    own = _vocab(kind, source, texts)
    vocab = given or own
    foreign = vocab.to_json() != own.to_json()
    if foreign:  # what is published was counted with the text's own
        source = dataclasses.replace(source, counts={})
    (folder / "vocab.json").write_text(json.dumps(vocab.to_json()))
    counts: dict[str, dict[str, int]] = {}
    double = source.protocol.get("protocol") == "double"
    for split in SPLITS:
        where = f"{source.label}, {split} split"
        n = _write_tokens(blocks(split, "encoding"), vocab, where, folder / f"{split}.npy", double)
        if n < 2:
            raise DataError(f"{where}: has {n} token, at least 2 are needed; give a longer text")
        counts[split] = {"tokens": n, **_counts(prepared.blocks(split))}
    shutil.rmtree(folder / "tfds")
    info = {key: {s: counts[s][key] for s in SPLITS} for key in counts["train"]}
    agrees = _check_counts(source, {**info, "symbols": {"": len(vocab)}})
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    return {
        "info": {
            **info,
            "counts_as_published": agrees,
            "foreign_vocab": foreign,
            "python": platform.python_version() if source.name == "stdlib" else None,
        },
        "files": {
            path.name: {"size": path.stat().st_size, "sha256": file_hash(path)} for path in files
        },
    }


def _vocab(kind: Kind, source: Source, texts: list[Iterator[bytes]]) -> Vocab:
    if kind == "sentence":
        assert source.vocab_file is not None
        return Vocab.from_lines(source.vocab_file)
    if kind == "letter":
        return Vocab.from_letters(*texts)
    if kind == "char":
        return Vocab.from_chars(block for text in texts for block in text)
    if kind == "word":
        return Vocab.from_words(*texts, lower_case=source.name == "ptb")
    if kind == "subword":
        return Vocab.from_subwords(*texts, vocab_size=source.protocol["vocab_size"])
    if source.name == "enwik8":
        return Vocab.from_counted_bytes(*texts, newline=source.protocol["protocol"] == "bytes")
    return Vocab.all_bytes()


def _check_counts(source: Source, found: Mapping[str, Mapping[str, int]]) -> bool | None:
    """Tells the counts; whether they are as published, ``None`` if none are."""
    sizes = " / ".join(f"{found['tokens'][split]:,}" for split in SPLITS)
    wrong = []
    for (what, split), expected in source.counts.items():
        n = found[what][split]
        if n != expected if isinstance(expected, int) else n not in expected:
            wrong.append(f"{n:,} {what} {split}".rstrip() + f" instead of {_shown(expected)}")
    if wrong and source.published:
        raise DataError(
            f"{source.label}: has {wrong[0]}, though its files are the published ones; please"
            " report this"
        )
    told = "; counts as published" if source.counts and not wrong else ""
    told = f"; not as published: {', '.join(wrong)}" if wrong else told
    symbols = f"{found['symbols']['']:,} symbols"
    print(
        f"prepared {source.label}: {sizes} tokens (train / valid / test), {symbols}{told}",
        file=sys.stderr,
    )
    return not wrong if source.counts else None


def _shown(expected: int | range) -> str:
    if isinstance(expected, int):
        return f"{expected:,}"
    return f"{expected.start:,} to {expected.stop - 1:,}"


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


def _write_tokens(
    blocks: Iterable[bytes], vocab: Vocab, where: str, path: Path, double: bool
) -> int:
    """Writes the ids of a text as one ``.npy`` file, and of sentences where they begin.

    ``double``: between two sentences there are two ``<S>``, see :func:`doubled`.

    Returns:
      The number of tokens; of sentences that of their targets, see :class:`Corpus`.
    """
    if vocab.kind != "sentence":
        ids = vocab.encode_blocks(blocks, where, end_last_line=True)
        return _write_array(ids, vocab.dtype, path)
    ends = path.with_suffix(".offsets.npy")
    offset = 0

    def token_parts(offsets: Any) -> Iterator[np.ndarray]:
        nonlocal offset
        encoded = vocab.encode_sentences(blocks, where)
        for ids, places in doubled(encoded) if double else encoded:
            (places + offset).astype(np.int64).tofile(offsets)
            offset += len(ids)
            yield ids

    raw = ends.with_suffix(".raw")
    with open(raw, "wb") as offsets:
        n = _write_array(token_parts(offsets), vocab.dtype, path)
    _as_npy(raw, np.dtype(np.int64), ends)
    return n - 1


def doubled(
    parts: Iterable[tuple[np.ndarray, np.ndarray]],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The ids of sentences, each boundary twice but for the first, and where sentences begin.

        <S> the cat <S> it rained <S>           <S> the cat <S> <S> it rained <S> <S>
         ^           ^             ^     ──▶     ^               ^                 ^

    So ``<S> the cat <S>`` is a sentence and the next one's ``<S>`` its last target. All sentences
    are alike, the last one too, so that they make such a stream in any order. TF's own text ends
    one ``<S>`` earlier.

    Args:
      parts: ids and the places of boundaries in them, :meth:`Vocab.encode_sentences`.
    """
    first = True
    for ids, places in parts:
        times = np.ones(len(ids), np.int64)
        times[places] = 2
        if first and len(places):
            times[places[0]], first = 1, False
        yield np.repeat(ids, times), np.cumsum(times)[places] - 1


def _write_array(parts: Iterator[np.ndarray], dtype: np.dtype, path: Path) -> int:
    """Writes arrays, one after another, as one ``.npy`` file; gives their length."""
    raw = path.with_suffix(".raw")
    with open(raw, "wb") as file:
        for part in parts:
            part.astype(dtype, copy=False).tofile(file)
    return _as_npy(raw, dtype, path)


def _as_npy(raw: Path, dtype: np.dtype, path: Path) -> int:
    """Puts numbers that lie in a file into an ``.npy`` file instead; gives how many there are."""
    n = raw.stat().st_size // dtype.itemsize
    header = {"descr": dtype.str, "fortran_order": False, "shape": (n,)}
    with open(raw, "rb") as numbers, open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        shutil.copyfileobj(numbers, file, 1 << 20)
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
