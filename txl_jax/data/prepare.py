"""Encodes the text of a source, and stores the vocabulary and the tokens in files.

The tokens are in ``train.npy``, …. For sentences, ``train.offsets.npy``, … have the positions where
each sentence begins and the last one ends. The numbers of tokens, lines, words, bytes and symbols
are counted, and compared with published numbers. These counts and notes on the text are kept in
``corpus.json``, and each run prints them.
"""

import codecs
import collections
import dataclasses
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from txl_jax.data.codecs import TO_UTF8
from txl_jax.data.errors import DataError
from txl_jax.data.pieces import STARTS, check_starts
from txl_jax.data.sources.cache import make_folder, write_errors, write_npy
from txl_jax.data.sources.source import SPLITS, Source, check_utf8, file_hash, say_once
from txl_jax.data.symbols import Kind
from txl_jax.data.vocab import Vocab, separator_ids
from txl_jax.messages import argument, short_repr
from txl_jax.progress import watched


def prepare(
    source: Source, kind: Kind, identity: Mapping[str, Any], folder: Path, vocab: Vocab | None
) -> None:
    """Prepares a source's corpus in ``folder`` unless the folder exists, or raises DataError.

    ``identity`` has the corpus's name, hash and protocol, and is written to ``corpus.json``. The
    text is encoded with ``vocab``, or, if ``vocab`` is ``None``, with the text's own vocabulary.
    """

    def fill(unfinished: Path) -> None:
        logging.info("preparing %s (%s) in %s", source.label, kind, folder)
        with write_errors(folder.parent):
            if kind != "byte":
                check_utf8(source.files.values())
            record = _write(source, kind, unfinished, vocab)
            if source.hash() != identity["source_hash"]:
                raise DataError(f"{source.label}: changed while it was being prepared; try again")
            (unfinished / "corpus.json").write_text(json.dumps({**identity, **record}, indent=1))

    make_folder(folder, fill)


def _write(source: Source, kind: Kind, folder: Path, given: Vocab | None) -> dict[str, Any]:
    """Writes the token files and ``vocab.json``; returns their record for ``corpus.json``."""

    def blocks(split: str, what: str) -> Iterator[bytes]:
        return watched(source.blocks(split), f"{source.name}: {what} {split}", source.size(split))

    if given is not None and kind == "tokenizer":
        own = given  # a tokenizer does not depend on the text
    else:
        counted = {split: blocks(split, "counting") for split in source.counted}
        if kind == "word" and source.has_documents:
            counted = {split: _ended(source.documents(split, x)) for split, x in counted.items()}
        own = _vocab(kind, source, list(counted.values()))
    vocab = given or own
    foreign = vocab.to_json() != own.to_json()
    if foreign:  # the published counts hold for the text's own vocabulary
        source = dataclasses.replace(source, counts={})
    (folder / "vocab.json").write_text(json.dumps(vocab.to_json()))
    counts, crlf = dict[str, dict[str, int]](), 0
    found: dict[str, Any] = {"short": {}, "not_utf8": ""}
    for split in SPLITS:
        where, path = f"{source.label}, {split} split", folder / f"{split}.npy"
        of_text: dict[str, int] = {}
        text = _counted(blocks(split, "encoding"), of_text)
        if kind == "byte" and source.name == "text":
            text = _utf8_checked(text, split, found)
        if source.has_documents:
            documents = source.documents(split, text)
            n, left_out, kept = _write_documents(source, documents, vocab, where, path)
            found["short"][split] = left_out
            if source.separator is None:  # counts only the documents that are kept
                of_text = dict(kept)
        elif kind == "sentence":
            n = _write_sentences(text, vocab, where, path, source.protocol["protocol"] == "double")
        else:
            n = write_npy(path, vocab.dtype, vocab.encode_blocks(text, where, end_last_line=True))
        if n < 2:
            many = f"has {n} token{'s' * (n != 1)}"
            raise DataError(f"{where}: {many}, and at least 2 are needed; give a longer text")
        crlf += of_text.pop("crlf")
        counts[split] = {"tokens": n, **of_text}
    info: dict[str, Any] = {key: {s: counts[s][key] for s in SPLITS} for key in counts["train"]}
    wrong = _wrong_counts(source, {**info, "symbols": {"": len(vocab)}})
    agrees = not wrong if source.counts else None
    found |= {"wrong": wrong, "crlf": crlf if vocab.keeps_line_ends else 0}
    python = platform.python_version() if source.name == "stdlib" else None
    of_file = lambda path: {"size": path.stat().st_size, "sha256": file_hash(path)}
    info |= {"counts_as_published": agrees, "foreign_vocab": foreign, "python": python}
    files = {path.name: of_file(path) for path in sorted(folder.iterdir())}
    return {"info": info, "found": found, "files": files}


def report(record: Mapping[str, Any], label: str, symbols: int, bytes_asked_for: bool) -> None:
    """Prints once the sizes and notes in ``record``, the ``corpus.json`` of a prepared corpus."""
    info, found, protocol = record["info"], record.get("found", {}), record["protocol"]
    sizes = " / ".join(f"{info['tokens'][split]:,}" for split in SPLITS)
    said = [f"{label}: {sizes} tokens (train / valid / test), {symbols:,} symbols"]
    if wrong := found.get("wrong"):
        said[0] += f"; not as published: {', '.join(wrong)}"
    elif info["counts_as_published"]:
        said[0] += "; counts as published"
    shares = {split: protocol.get(f"{split}_fraction", 0) for split in ("valid", "test")}
    if held_out := ", ".join(f"{100 * x:g}% {split}" for split, x in shares.items() if x):
        said[0] += f"; held out from the end: {held_out}"
    if crlf := found.get("crlf"):
        fault = f"{crlf:,} line ends are CRLF (Windows)"
        said.append(f"note: {label}: {fault}; \\r is a part of the text, and prompts need it too")
    if (place := found.get("not_utf8")) and not bytes_asked_for:
        fix = f"{TO_UTF8}, or give {argument('config.data.vocab', 'byte')}"
        said.append(f"note: {label}: is not UTF-8 ({place}), and is read as bytes; {fix}")
    for split, n in found.get("short", {}).items():
        if n:
            fault = f"documents of one token, which has no target, are left out: {n:,}"
            said.append(f"note: {label}, {split} split: {fault}")
    say_once("\n".join(said))


def _ended(documents: Iterable[bytes]) -> Iterator[bytes]:
    """Yields each document, then a line end, so that no word continues in the next document."""
    for document in documents:
        yield from (document, b"\n")


def _vocab(kind: Kind, source: Source, texts: list[Iterator[bytes]]) -> Vocab:
    if source.vocab_file is not None:
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


def _wrong_counts(source: Source, found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns a message for each count that differs from the published count.

    Raises DataError if a count differs although the files are the published ones.
    """
    wrong = []
    for (what, split), expected in source.counts.items():
        n = found[what][split]
        allowed = range(expected, expected + 1) if isinstance(expected, int) else expected
        if n not in allowed:
            shown = f"{allowed[0]:,}" + (f" to {allowed[-1]:,}" if len(allowed) > 1 else "")
            place = f" in {split}" if split else ""
            wrong.append(f"{n:,} {what}{place} instead of {shown}")
    if wrong and source.published:
        fault = f"has {wrong[0]}, though its files are the published ones; please report this"
        raise DataError(f"{source.label}: {fault}")
    return wrong


def _write_documents(
    source: Source, documents: Iterable[bytes], vocab: Vocab, where: str, path: Path
) -> tuple[int, int, collections.Counter[str]]:
    """Writes the ids of documents, and the positions where the documents begin.

    Returns the number of tokens, the number of documents that are left out, and the counts
    (:func:`_counted`) of the other documents. Without a separator, documents of fewer than two
    tokens are left out, because they have no target. The last token of a separator begins the next
    document (:mod:`txl_jax.data.pieces`).
    """
    starts, ended, mark, short = list[int](), [False], source.separator, 0
    kept = collections.Counter[str]()
    separator = None if mark is None else mark.decode("utf-8", "surrogateescape")
    mark_ids = separator_ids(vocab, separator)
    if mark is not None and not len(mark_ids):
        fix = "set data.document_separator to a text with a token"
        raise DataError(f"{where}: the separator {mark!r} has no token in this vocabulary; {fix}")

    def ids() -> Iterator[np.ndarray]:
        nonlocal short
        offset = 0
        for number, document in enumerate(documents):
            begin, last = offset - ended[-1], mark is not None and document.endswith(mark)
            name = f"{where}, document {number}"
            parts = list(vocab.encode_blocks([document], name, end_last_line=not last))
            size = sum(map(len, parts))
            if last and vocab.kind == "word":
                _check_whole(np.concatenate(parts), mark_ids, vocab, name)
            if ended[-1] and vocab.kind == "word" and not source.records:
                _check_new_word(document, str(separator), name)
            if mark is None and size < 2:
                short += 1
                continue
            of_document = dict[str, int]()
            collections.deque(_counted([document], of_document), maxlen=0)
            kept.update(of_document)
            starts.append(begin)
            ended.append(last)
            offset += size
            yield from parts

    n = write_npy(path, vocab.dtype, ids())
    if mark is None and not starts:
        raise DataError(f"{where}: no document has two tokens; give longer ones")
    if mark is None:
        check_starts(np.array(starts), n, where)
    elif not any(ended):
        fix = "set data.document_separator to a text that ends each document"
        raise DataError(f"{where}: the separator {mark!r} does not occur; {fix}")
    write_npy(path.with_suffix(STARTS), np.dtype(np.int64), [np.unique(starts)])
    return n, short, kept


def _check_whole(ids: np.ndarray, mark_ids: np.ndarray, vocab: Vocab, name: str) -> None:
    """Raises DataError if a document of words does not end with the words of the separator."""
    if ids[-len(mark_ids) :].tolist() != mark_ids.tolist():
        mark, word = vocab.decode(mark_ids), vocab.decode(ids[-len(mark_ids) :])
        fix = "write the separator between spaces or lines in the text"
        raise DataError(f"{name}: ends with {word!r}, and the separator is {mark!r}; {fix}")


def _check_new_word(document: bytes, separator: str, name: str) -> None:
    """Raises DataError if the separator before a document is the beginning of a word."""
    first = document[:4].decode("utf-8", "ignore")[:1]
    if not (separator[-1].isspace() or first.isspace()):
        fault = f"begins with {short_repr(document.decode('utf-8', 'ignore').split()[0])}"
        fix = "write the separator between spaces or lines in the text"
        raise DataError(f"{name}: {fault} right after the separator {separator!r}; {fix}")


def _write_sentences(
    blocks: Iterable[bytes], vocab: Vocab, where: str, path: Path, double: bool
) -> int:
    """Writes ids of sentences and the positions where they begin; returns the number of targets."""
    starts: list[np.ndarray] = []

    def ids() -> Iterator[np.ndarray]:
        offset = 0
        encoded = vocab.encode_sentences(blocks, where)
        for part, boundaries in double_boundaries(encoded) if double else encoded:
            starts.append(boundaries + offset)
            offset += len(part)
            yield part

    n = write_npy(path, vocab.dtype, ids())
    write_npy(path.with_suffix(".offsets.npy"), np.dtype(np.int64), starts)
    return n - 1


def double_boundaries(
    parts: Iterable[tuple[np.ndarray, np.ndarray]],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields ids with each ``<S>`` but the first doubled, and the positions where sentences begin.

        <S> the cat <S> it rained <S>           <S> the cat <S> <S> it rained <S> <S>
         ^           ^             ^     ──▶     ^               ^                 ^

    In the TensorFlow code, the text has one ``<S>`` fewer at its end. Here every sentence ends with
    two ``<S>``, so that sentences can be put in any order. ``parts`` is the result of
    :meth:`Vocab.encode_sentences`.
    """
    first = True
    for ids, boundaries in parts:
        times = np.ones(len(ids), np.int64)
        times[boundaries] = 2
        if first and len(boundaries):
            times[boundaries[0]], first = 1, False
        yield np.repeat(ids, times), np.cumsum(times)[boundaries] - 1


def _counted(blocks: Iterable[bytes], counts: dict[str, int]) -> Iterator[bytes]:
    """Yields the blocks, then adds their numbers of bytes, lines, words and CRLFs to ``counts``."""
    n_bytes = lines = words = crlf = 0
    last = b"\n"
    for block in blocks:
        crlf += block.count(b"\r\n") + (last + block[:1] == b"\r\n")
        n_bytes += len(block)
        lines += block.count(b"\n")
        words += len(block.split()) - bool(last.strip() and block[:1].strip())
        last = block[-1:]
        yield block
    counts.update(bytes=n_bytes, lines=lines + (last != b"\n"), words=words, crlf=crlf)


def _utf8_checked(blocks: Iterable[bytes], split: str, found: dict[str, Any]) -> Iterator[bytes]:
    """Yields the blocks, and records the first byte that is not UTF-8 in ``found["not_utf8"]``."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    for block in blocks:
        if not found["not_utf8"]:
            at = read - len(decoder.getstate()[0])
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                found["not_utf8"] = f"{split} split, byte {at + error.start} is 0x{byte:02x}"
        read += len(block)
        yield block
