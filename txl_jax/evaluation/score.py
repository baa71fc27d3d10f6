"""Any text scored, line by line and token by token: ``--mode=score``.

    echo 'the company said' | python -m txl_jax.main --mode=score --workdir=runs/ptb_small

Every symbol of the text is a target; what stands before the first one is a line's end. Memory is
carried through the text, or every line starts with none. Attention is limited to a window of M
positions, so that neither segments nor the lines of one batch change a number.
"""

import dataclasses
import functools
import io
import json
import math
import os
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
from txl_jax.data.prompt_ids import line_end
from txl_jax.data.streams import read_segment
from txl_jax.data.symbols import readable
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation.errors import AnalysisError
from txl_jax.files import name_in_os_errors
from txl_jax.model.footprint import of_reading
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import check_memory
from txl_jax.units import UNIT_NAMES, format_value, in_unit


def run(trained: TrainedModel, workdir: str) -> str:
    """Scores the text that the config names and writes a JSON object for each line of it.

    ``line`` its number, ``text``, ``tokens`` how many, ``unknown`` how many of them are the
    symbol of unknown words (where there is one), ``nll`` nats of all, the mean in the vocabulary's
    unit, and ``symbols`` and ``token_nll`` of each. A summary is printed on stderr.

    Raises:
      ConfigError, DataError, AnalysisError: the text cannot be read or encoded, or is empty, or
        the results cannot be written.
    """
    c, vocab = trained.config.score, trained.vocab
    _check_json(c)
    name = "standard input" if c.path == "-" else c.path
    lines = io.StringIO(_text(c.path), newline="\n").readlines()  # no cuts at form feeds
    ids = encoded(vocab, lines, name)
    if not sum(map(len, ids)):
        raise AnalysisError(
            f"{name}: there is nothing in it to score; give a text there, or name another file with"
            " --config.score.path=FILE"
        )
    check_size(trained, len(lines))
    losses = nll_of_lines(trained.config.model, trained.params, ids, line_end(vocab), c)
    rows = zip(lines, ids, losses, strict=True)
    records = [record(vocab, n, *row, c) for n, row in enumerate(rows, 1)]
    print(summary(vocab, lines, ids, losses), file=sys.stderr, flush=True)
    _write(records, c.json)
    return ""


def check_size(trained: TrainedModel, lines: int) -> None:
    """Raises ConfigError where the segments of so many lines do not fit the device's memory."""
    exp, c = trained.config, trained.config.score
    rows = min(c.batch_size, lines) if c.memory == "line" else 1
    again = _context(exp.model, c)
    keys = tuple(f"score.{name}" for name in ("batch_size", "seg_len", "mem_len"))
    mem_len = 0 if exp.model.memory_free else c.mem_len
    check_memory("scoring", of_reading(exp.model, rows, again + c.seg_len, mem_len, keys), exp)


def encoded(vocab: Vocab, lines: Sequence[str], name: str) -> list[np.ndarray]:
    """The targets of each line, its end among them where the vocabulary has one.

    Raises:
      DataError: a symbol that the vocabulary does not have; names the line.
    """
    ids = []
    for n, line in enumerate(lines, 1):
        try:
            of_line = vocab.encode(line)
        except DataError as error:
            raise DataError(f"{name}, line {n}: {error}") from error
        # every sentence begins with the boundary that the one before it ended with
        ids.append(of_line[1:] if vocab.kind == "sentence" else of_line)
    return ids


def nll_of_lines(
    cfg: TransformerXLConfig,
    params: Any,
    lines: Sequence[np.ndarray],
    before: np.ndarray,
    c: ScoreConfig,
) -> list[np.ndarray]:
    """Nats of every token of every line.

    Args:
      cfg: the model's shape.
      params: its parameters.
      lines: token ids of each; may be empty.
      before: [1], what stands before the text, or with ``memory="line"`` before each line.
      c: memory, and lengths.
    """
    if c.memory == "line":
        return nll_of_texts(cfg, params, [np.concatenate([before, line]) for line in lines], c)
    (whole,) = nll_of_texts(cfg, params, [np.concatenate([before, *lines])], c)
    return np.split(whole, np.cumsum([len(line) for line in lines])[:-1])


def nll_of_texts(
    cfg: TransformerXLConfig, params: Any, texts: Sequence[np.ndarray], c: ScoreConfig
) -> list[np.ndarray]:
    """Nats of every token of each text but its first; texts know nothing of one another."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))  # equals go together
    found: dict[int, np.ndarray] = {}
    for first in range(0, len(order), c.batch_size):
        rows = order[first : first + c.batch_size]
        found |= zip(rows, _nll_of_batch(cfg, params, [texts[n] for n in rows], c), strict=True)
    return [found[n] for n in range(len(texts))]


def _nll_of_batch(cfg, params, texts: Sequence[np.ndarray], c: ScoreConfig) -> list[np.ndarray]:
    model, score = _program(cfg)
    context = _context(cfg, c)
    mems = model.init_mems(len(texts), 0 if cfg.memory_free else c.mem_len)
    ends = {n: len(text) - 1 for n, text in enumerate(texts)}
    read = lambda row, i, j: texts[row][i:j]
    parts = []
    for start in range(0, max(ends.values()), c.seg_len):
        segment = read_segment(read, ends, start, c.seg_len, c.seg_len, context)
        nll, mems = score(params, make_batch(segment, reset_memory=False), mems)
        parts.append(np.asarray(nll))
    whole = np.concatenate(parts, axis=1) if parts else np.zeros((len(texts), 0), np.float32)
    return [whole[n, : ends[n]] for n in range(len(texts))]


@functools.lru_cache(maxsize=4)
def _program(cfg: TransformerXLConfig) -> tuple[TransformerXL, Callable]:
    if not cfg.memory_free:
        cfg = dataclasses.replace(cfg, same_length=cfg.same_length or "pytorch")
    model = TransformerXL(cfg)

    def score(params, batch: Batch, mems):
        about = batch.model_kwargs(with_lengths=True)
        return model.apply(
            {"params": params}, batch.inputs, batch.targets, mems, method="nll", **about
        )

    return model, jax.jit(score)


def _context(cfg: TransformerXLConfig, c: ScoreConfig) -> int:
    """Tokens that a model without memory runs again before each segment."""
    if not cfg.memory_free:
        return 0
    if cfg.attention != "absolute_per_layer":
        return c.mem_len
    room = (cfg.n_positions or 0) - c.seg_len
    if room < 0:
        raise ConfigError(
            f"config key score.seg_len = {c.seg_len}: this model's table of positions has"
            f" {cfg.n_positions}; use no more"
        )
    return min(c.mem_len, room)


def record(
    vocab: Vocab, n: int, text: str, ids: np.ndarray, nll: np.ndarray, c: ScoreConfig
) -> dict[str, Any]:
    """What is written of a line; bytes that are not UTF-8 are shown as ``\\xNN``."""
    raw = text.rstrip("\n").encode("utf-8", "surrogateescape")
    said: dict[str, Any] = {
        "line": n,
        "text": raw.decode("utf-8", "backslashreplace"),
        "tokens": len(ids),
        "nll": math.fsum(nll.tolist()),
    }
    if vocab.unknown is not None:
        said["unknown"] = unknown_among(vocab, ids)
    if len(ids):
        said[vocab.unit] = in_unit(said["nll"] / len(ids), vocab.unit)
    if c.tokens:
        said["symbols"] = [readable(vocab.kind, vocab.symbols[i]) for i in ids]
        said["token_nll"] = [round(float(x), 6) for x in nll]
    return said


def unknown_among(vocab: Vocab, ids: np.ndarray) -> int:
    """How many of some tokens are the symbol of unknown words."""
    if vocab.unknown is None:
        return 0
    return int(np.count_nonzero(ids == vocab.symbols.index(vocab.unknown)))


def summary(
    vocab: Vocab, lines: Sequence[str], ids: Sequence[np.ndarray], losses: Sequence[np.ndarray]
) -> str:
    """The whole text in a line, after a line for each way in which the tokens differ from it.

    Bits per byte are given only where the tokens determine the text's bytes.
    """
    total = math.fsum(math.fsum(nll.tolist()) for nll in losses)
    whole, text = np.concatenate(ids), "".join(lines)
    raw = text.encode("utf-8", "surrogateescape")
    notes = differences(vocab, whole, text)
    before = line_end(vocab) if vocab.kind == "sentence" else whole[:0]
    per_byte = f", {total / math.log(2) / len(raw):.4f} bits per byte of the text"
    if vocab.decode_bytes(np.concatenate([before, whole])) != raw:
        notes.append("no bits per byte, because the tokens do not determine the bytes of the text")
        per_byte = ""
    unknown = unknown_among(vocab, whole)
    share = f" ({unknown / len(whole):.1%} {vocab.unknown})" if unknown else ""
    mean = in_unit(total / len(whole), vocab.unit)
    return "\n".join(
        [f"note: {note}" for note in notes]
        + [
            f"{len(lines):,} lines, {len(whole):,} tokens{share}: {format_value(mean, vocab.unit)}"
            f" {UNIT_NAMES[vocab.unit]}{per_byte}"
        ]
    )


def differences(vocab: Vocab, ids: np.ndarray, text: str) -> list[str]:
    """What encoding changed in a text, a sentence each."""
    notes = []
    words_read = (text.lower() if vocab.lower_case else text).split()
    unknown = unknown_among(vocab, ids) - words_read.count(vocab.unknown or "")
    if unknown:
        words = "1 word is" if unknown == 1 else f"{unknown:,} words are"
        notes.append(f"{words} not in the vocabulary and scored as {vocab.unknown}")
    if vocab.lower_case and text != text.lower():
        notes.append("the vocabulary has no capital letters: the text is scored in lower case")
    if vocab.kind == "byte" and "\n" in text and len(vocab.encode("\n")) == 0:
        notes.append("the vocabulary has no newline: line ends are left out")
    return notes


def _text(path: str) -> str:
    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
        return data.decode("utf-8", "surrogateescape")
    except OSError as error:
        raise ConfigError(f"config key score.path = {path!r}: {error.strerror}") from error


def _check_json(c: ScoreConfig) -> None:
    """Raises ConfigError where results cannot be written, or would replace the text."""
    check_file("score.json", c.json)
    files = bool(c.json) and os.path.isfile(c.path) and os.path.isfile(c.json or "")
    if files and os.path.samefile(c.path, c.json or ""):
        raise ConfigError(
            f"config key score.json = {c.json!r}: is the text of score.path; name another file"
        )


def _write(records: Sequence[dict[str, Any]], path: str | None) -> None:
    if path is None or path == "-":
        plain = (sys.stdout.encoding or "").lower() != "utf-8"
        print(*(json.dumps(r, ensure_ascii=plain) for r in records), sep="\n", flush=True)
        return
    with name_in_os_errors(path), open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
