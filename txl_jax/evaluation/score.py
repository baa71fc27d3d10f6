"""Scores any text, line by line and token by token: ``--mode=score``.

    echo 'the company said' | python -m txl_jax.main --mode=score --workdir=runs/ptb_small

Every symbol of the text is a target. The token before the first symbol is a line end. Memory is
carried through the text, or is empty at the start of every line. Attention is limited to a window
of M positions, so results do not depend on the segment length or on other lines of a batch.
"""

import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir_files import check_file
from txl_jax.config import ConfigError, ScoreConfig, TransformerXLConfig
from txl_jax.data.batch import Batch, make_batch
from txl_jax.data.errors import DataError
from txl_jax.data.streams import read_segment
from txl_jax.data.symbols import readable
from txl_jax.data.vocab import Vocab, line_end
from txl_jax.evaluation.errors import AnalysisError
from txl_jax.files import name_in_os_errors
from txl_jax.model.footprint import of_reading
from txl_jax.model.inputs import check_ids
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import check_memory
from txl_jax.units import UNIT_NAMES, format_value, in_unit


def run(trained: TrainedModel, workdir: str) -> str:
    """Writes the :func:`line_record` of each line of the text, and a summary to standard error."""
    c, vocab = trained.config.score, trained.vocab
    check_file("score.json", c.json)
    exist = os.path.isfile(c.path) and os.path.isfile(c.json or "")
    if exist and os.path.samefile(c.path, c.json or ""):
        raise ConfigError(
            f"config key score.json = {c.json!r}: is the file of score.path; name another file"
        )
    name = "standard input" if c.path == "-" else c.path
    lines = io.StringIO(_text(c.path), newline="\n").readlines()  # no splits at form feeds
    ids = encode_lines(vocab, lines, name)
    if not sum(map(len, ids)):
        raise AnalysisError(
            f"{name}: has no text to score; name another file with --config.score.path=FILE, or"
            " give a text on standard input"
        )
    check_score_memory(trained, len(lines))
    losses = score_lines(trained.config.model, trained.params, ids, line_end(vocab), c)
    rows = zip(lines, ids, losses, strict=True)
    records = [line_record(vocab, n, *row, c) for n, row in enumerate(rows, 1)]
    print(summary(vocab, lines, ids, losses), file=sys.stderr, flush=True)
    _write(records, c.json)
    return ""


def check_score_memory(trained: TrainedModel, n_lines: int) -> None:
    """Raises ConfigError if scoring ``n_lines`` lines exceeds the memory of the device."""
    exp, c = trained.config, trained.config.score
    rows = min(c.batch_size, n_lines) if c.memory == "line" else 1
    length = _context_len(exp.model, c) + c.seg_len
    keys = ("score.batch_size", "score.seg_len", "score.mem_len")
    mem_len = 0 if exp.model.memory_free else c.mem_len
    check_memory("scoring", of_reading(exp.model, rows, length, mem_len, keys), exp)


def encode_lines(vocab: Vocab, lines: Sequence[str], name: str) -> list[np.ndarray]:
    """Encodes each line with its line end as targets. A DataError names the line."""
    ids = []
    for n, line in enumerate(lines, 1):
        try:
            ids.append(vocab.encode(line))
        except DataError as error:
            raise DataError(f"{name}, line {n}: {error}") from error
    # A sentence begins with the boundary that ended the previous sentence.
    return [x[1:] for x in ids] if vocab.kind == "sentence" else ids


def score_lines(
    cfg: TransformerXLConfig, params: Any, lines: Sequence[np.ndarray], before: Any, c: ScoreConfig
) -> list[np.ndarray]:
    """Returns the loss in nats of every token of every line. A line may be empty.

    ``before`` [1] is the token before the text, or before every line with ``memory="line"``.
    """
    if c.memory == "line":
        return score_texts(cfg, params, [np.concatenate([before, line]) for line in lines], c)
    (nll,) = score_texts(cfg, params, [np.concatenate([before, *lines])], c)
    return np.split(nll, np.cumsum([len(line) for line in lines])[:-1])


def score_texts(
    cfg: TransformerXLConfig, params: Any, texts: Sequence[np.ndarray], c: ScoreConfig
) -> list[np.ndarray]:
    """Returns the loss in nats of every token except the first, for independent texts.

    Raises ValueError if a text has an id that is not in the vocabulary.
    """
    for n, text in enumerate(texts):
        check_ids(f"text {n}", text, cfg.vocab_size or 0)
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))  # for less padding in a batch
    losses: dict[int, np.ndarray] = {}
    for first in range(0, len(order), c.batch_size):
        rows = order[first : first + c.batch_size]
        losses |= zip(rows, _score_batch(cfg, params, [texts[n] for n in rows], c), strict=True)
    return [losses[n] for n in range(len(texts))]


def _score_batch(cfg, params, texts: Sequence[np.ndarray], c: ScoreConfig) -> list[np.ndarray]:
    model, score = _program(cfg)
    context_len = _context_len(cfg, c)
    mems = model.init_mems(len(texts), 0 if cfg.memory_free else c.mem_len)
    ends = {n: len(text) - 1 for n, text in enumerate(texts)}
    parts = [np.zeros((len(texts), 0), np.float32)]
    for start in range(0, max(ends.values()), c.seg_len):
        read = lambda row, i, j: texts[row][i:j]
        segment = read_segment(read, ends, start, c.seg_len, c.seg_len, context_len)
        nll, mems = score(params, make_batch(segment, reset_memory=False), mems)
        parts.append(np.asarray(nll))
    return [nll[: ends[n]] for n, nll in enumerate(np.concatenate(parts, axis=1))]


@functools.lru_cache(maxsize=4)
def _program(cfg: TransformerXLConfig) -> tuple[TransformerXL, Callable]:
    if not cfg.memory_free:
        cfg = dataclasses.replace(cfg, same_length=cfg.same_length or "pytorch")
    model = TransformerXL(cfg)

    def score(params, batch: Batch, mems):
        kwargs = batch.model_kwargs(with_lengths=True)
        variables = {"params": params}
        return model.apply(variables, batch.inputs, batch.targets, mems, method="nll", **kwargs)

    return model, jax.jit(score)


def _context_len(cfg: TransformerXLConfig, c: ScoreConfig) -> int:
    """Returns the number of tokens that a model without memory reads again before each segment."""
    if not cfg.memory_free:
        return 0
    if cfg.attention != "absolute_per_layer":
        return c.mem_len
    n_positions = cfg.n_positions or 0
    if c.seg_len > n_positions:
        raise ConfigError(
            f"config key score.seg_len = {c.seg_len}: this model has only {cfg.n_positions}"
            " positions; use a shorter segment"
        )
    return min(c.mem_len, n_positions - c.seg_len)


def line_record(
    vocab: Vocab, n: int, text: str, ids: np.ndarray, nll: np.ndarray, c: ScoreConfig
) -> dict[str, Any]:
    """Returns the JSON object of a line: token counts, loss in nats, mean loss, and token losses.

    Bytes that are not UTF-8 become ``\\xNN``.
    """
    raw = text.rstrip("\n").encode("utf-8", "surrogateescape")
    row: dict[str, Any] = {"line": n, "text": raw.decode("utf-8", "backslashreplace")}
    row |= {"tokens": len(ids), "nll": math.fsum(nll.tolist())}
    if vocab.unknown is not None:
        row["unknown"] = count_unknown(vocab, ids)
    if len(ids):
        row[vocab.unit] = in_unit(row["nll"] / len(ids), vocab.unit)
    if c.tokens:
        row["symbols"] = [readable(vocab.kind, vocab.symbols[i]) for i in ids]
        row["token_nll"] = [round(float(x), 6) for x in nll]
    return row


def count_unknown(vocab: Vocab, ids: np.ndarray) -> int:
    """Counts the tokens that are the symbol for unknown words."""
    if vocab.unknown is None:
        return 0
    return int(np.count_nonzero(ids == vocab.symbols.index(vocab.unknown)))


def summary(
    vocab: Vocab, lines: Sequence[str], ids: Sequence[np.ndarray], losses: Sequence[np.ndarray]
) -> str:
    """Returns notes about differences between tokens and text, then the size and the mean loss."""
    total = math.fsum(math.fsum(nll.tolist()) for nll in losses)
    tokens, text, unit = np.concatenate(ids), "".join(lines), vocab.unit
    unknown, raw, notes = count_unknown(vocab, tokens), text.encode("utf-8", "surrogateescape"), []
    words = (text.lower() if vocab.lower_case else text).split()
    if new := unknown - words.count(vocab.unknown or ""):
        count = "1 word is" if new == 1 else f"{new:,} words are"
        notes.append(f"{count} not in the vocabulary and scored as {vocab.unknown}")
    if vocab.lower_case and text != text.lower():
        notes.append("the vocabulary has no capital letters: the text is scored in lower case")
    if vocab.kind == "byte" and "\n" in text and len(vocab.encode("\n")) == 0:
        notes.append("the vocabulary has no newline: line ends are left out")
    before = line_end(vocab) if vocab.kind == "sentence" else tokens[:0]
    per_byte = f", {total / math.log(2) / len(raw):.4f} bits per byte of the text"
    if vocab.decode_bytes(np.concatenate([before, tokens])) != raw:
        notes.append("no bits per byte, because the tokens do not determine the bytes of the text")
        per_byte = ""
    elif unit == "bpb":  # the same number
        per_byte = ""
    share = f" ({unknown / len(tokens):.1%} {vocab.unknown})" if unknown else ""
    mean = f"{format_value(in_unit(total / len(tokens), unit), unit)} {UNIT_NAMES[unit]}{per_byte}"
    size = f"{len(lines):,} lines, {len(tokens):,} tokens{share}"
    return "\n".join([*(f"note: {note}" for note in notes), f"{size}: {mean}"])


def _text(path: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
        return data.decode("utf-8", "surrogateescape")
    except OSError as error:
        raise ConfigError(f"config key score.path = {path!r}: {error.strerror}") from error


def _write(records: Sequence[dict[str, Any]], path: str | None) -> None:
    if path is None or path == "-":
        ascii_only = (sys.stdout.encoding or "").lower() != "utf-8"
        print(*(json.dumps(r, ensure_ascii=ascii_only) for r in records), sep="\n", flush=True)
        return
    with name_in_os_errors(path), open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
