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
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from txl_jax.config import ConfigError, ScoreConfig, TransformerXLConfig
from txl_jax.data.batch import Batch, batch_of
from txl_jax.data.errors import DataError
from txl_jax.data.streams import segment_of
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation.errors import AnalysisError
from txl_jax.files import naming
from txl_jax.generation.text import line_end
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.units import UNIT_NAMES, in_unit, number
from txl_jax.workdir import Trained


def run(trained: Trained, workdir: str) -> str:
    """Scores the text that the config names and writes a JSON object for each line of it.

    ``line`` its number, ``text``, ``tokens`` how many, ``nll`` nats of all, the mean in the
    vocabulary's unit, and ``symbols`` and ``token_nll`` of each. The sum stands on stderr.

    Raises:
      ConfigError, DataError, AnalysisError: the text cannot be read or encoded, or is empty.
    """
    c, vocab = trained.config.score, trained.vocab
    name = "standard input" if c.path == "-" else c.path
    lines = io.StringIO(_text(c.path), newline="\n").readlines()  # no cuts at form feeds
    ids = encoded(vocab, lines, name)
    if not sum(map(len, ids)):
        raise AnalysisError(
            f"{name}: there is nothing in it to score; give a text there, or name another file with"
            " --config.score.path=FILE"
        )
    losses = nll_of_lines(trained.config.model, trained.params, ids, line_end(vocab), c)
    rows = zip(lines, ids, losses, strict=True)
    records = [record(vocab, n, *row, c) for n, row in enumerate(rows, 1)]
    _write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), c.json)
    print(summary(vocab, lines, losses), file=sys.stderr, flush=True)
    return ""


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
        segment = segment_of(read, ends, start, c.seg_len, c.seg_len, context)
        nll, mems = score(params, batch_of(segment, forget=False), mems)
        parts.append(np.asarray(nll))
    whole = np.concatenate(parts, axis=1) if parts else np.zeros((len(texts), 0), np.float32)
    return [whole[n, : ends[n]] for n in range(len(texts))]


@functools.lru_cache(maxsize=4)
def _program(cfg: TransformerXLConfig) -> tuple[TransformerXL, Callable]:
    if not cfg.memory_free:
        cfg = dataclasses.replace(cfg, same_length=cfg.same_length or "pytorch")
    model = TransformerXL(cfg)

    def score(params, batch: Batch, mems):
        about = batch.about_inputs(with_lengths=True)
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
    """What is written of a line."""
    said: dict[str, Any] = {
        "line": n,
        "text": text.rstrip("\n"),
        "tokens": len(ids),
        "nll": math.fsum(nll.tolist()),
    }
    if len(ids):
        said[vocab.unit] = in_unit(said["nll"] / len(ids), vocab.unit)
    if c.tokens:
        said["symbols"] = [vocab.symbols[i] for i in ids]
        said["token_nll"] = [round(float(x), 6) for x in nll]
    return said


def summary(vocab: Vocab, lines: Sequence[str], losses: Sequence[np.ndarray]) -> str:
    """The whole text in a line."""
    total = math.fsum(math.fsum(nll.tolist()) for nll in losses)
    tokens = sum(map(len, losses))
    mean = in_unit(total / tokens, vocab.unit)
    n_bytes = len("".join(lines).encode("utf-8", "surrogateescape"))
    return (
        f"{len(lines):,} lines, {tokens:,} tokens: {number(mean, vocab.unit)}"
        f" {UNIT_NAMES[vocab.unit]}, {total / math.log(2) / n_bytes:.4f} bits per byte of the text"
    )


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


def _write(out: str, path: str | None) -> None:
    if path is None:
        sys.stdout.write(out)
        sys.stdout.flush()
        return
    with naming(path), open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(out)
