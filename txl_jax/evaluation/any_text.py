"""Scores any text, line by line and token by token: ``--mode=score``.

    echo 'the company said' | python -m txl_jax.main --mode=score --workdir=runs/ptb_small

Every symbol of the text is a target. The token before the first symbol is a line end, or the last
token of ``data.document_separator`` if this key is set. Memory is carried through the text, or is
empty at the start of every line or document. Attention is limited to a window of M positions, so
results do not depend on the segment length or on other lines of a batch.
"""

import dataclasses
import functools
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from txl_jax.checkpoint.trained_model import TrainedModel, memory_shapes
from txl_jax.checkpoint.workdir_files import check_file
from txl_jax.config import ConfigError, ScoreConfig, TransformerXLConfig
from txl_jax.config.folders import data_folder
from txl_jax.data.batch import Batch, make_batch
from txl_jax.data.codecs import as_bytes
from txl_jax.data.errors import DataError
from txl_jax.data.pieces import ended_at, separator_ends
from txl_jax.data.rows import separate_rows
from txl_jax.data.sources.records import READERS
from txl_jax.data.sources.source import existing_path
from txl_jax.data.sources.tokens import SUFFIXES, read_documents
from txl_jax.data.streams import Streams
from txl_jax.data.symbols import readable
from txl_jax.data.vocab import Text, Vocab, encode_text, line_end, separator_ids
from txl_jax.evaluation.protocols import with_window
from txl_jax.file_kinds import LOOKED_AT, not_text, wide_encoding
from txl_jax.files import decode_text, name_in_os_errors
from txl_jax.messages import argument, fields_repr, shown_path
from txl_jax.model import self_check
from txl_jax.model.precision import rounding
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.compile_cache import compiled_rows
from txl_jax.parallel.device_memory import Checked, Work, check_arrays
from txl_jax.paths import path as opened_path
from txl_jax.progress import work_bar
from txl_jax.records import plain
from txl_jax.standard_streams import say
from txl_jax.units import UNIT_NAMES, Unit, format_value, in_unit

NO_IDS = np.zeros(0, np.int32)
_WORK = Work.sized_by("scoring", "score.batch_size", "score.seg_len", "score.mem_len")


def run(trained: TrainedModel, workdir: str) -> str:
    """Writes the :func:`line_record` of each line of the text, and a summary to standard error."""
    c = trained.config.score
    check_file("score.json", c.json, trained.config.data)
    exist = os.path.isfile(c.path) and os.path.isfile(c.json or "")
    if exist and os.path.samefile(c.path, c.json or ""):
        named = f"config key score.json = {shown_path(str(c.json))!r}"
        raise ConfigError(f"{named}: is also the file of score.path; name another file")
    if trained.vocab.kind == "id" and c.path.lower().endswith(SUFFIXES):
        path, symbols = existing_path(c.path, data_folder(), "score.path"), trained.vocab.symbols
        found = read_documents(path, trained.config.data, len(symbols), symbols)
        score = score_documents(trained, found)
    else:
        name = "standard input" if c.path == "-" else shown_path(c.path)
        if (end := os.path.splitext(name)[1].lower()) in READERS:
            fix = "write their texts into a text file"
            raise ConfigError(f"config key score.path = {name!r}: has records ({end}); {fix}")
        # Bytes can be the default. Only the explicit setting accepts files that are not text.
        asked = trained.config.data.vocab == "byte"
        text = read_text("score.path", c.path, trained.vocab.kind == "byte", asked)
        lines = io.StringIO(text, newline="\n").readlines()  # form feeds do not end lines
        other = f"{argument('config.score.path', 'FILE')}, or give a text on standard input"
        score = score_any_text(trained, lines, name, f"name another file with {other}")
    say(score)
    rows = [line_record(trained.vocab, n, line, c) for n, line in enumerate(score.lines, 1)]
    _write(plain(rows), c.json)
    return ""


@dataclasses.dataclass(frozen=True, eq=False)
class LineScore:
    """The loss of each token of a line.

    Attributes:
      text: the line, with its line end if it has one.
      ids: the tokens, integers [n]; n can be 0.
      nll: the negative log-likelihood of each token in nats, float32 [n].
      symbols: the tokens as they are shown, n texts.
    """

    text: str
    ids: np.ndarray
    nll: np.ndarray
    symbols: tuple[str, ...]

    __repr__ = fields_repr


@dataclasses.dataclass(frozen=True, eq=False)
class TextScore:
    """The losses of a text. ``str()`` gives the summary that ``--mode=score`` prints.

    Attributes:
      lines: the :class:`LineScore` of each line.
      nll: the sum of all losses in nats.
      tokens, unknown: the number of tokens, and the number of unknown words among them.
      unknown_symbol: the symbol of unknown words, or ``None`` if the vocabulary has none.
      unit: ``bpb`` or ``bpc`` (bits per byte or character) or ``ppl`` (perplexity).
      value: the mean loss of a token in this unit.
      bits_per_byte: the loss in bits for each byte of the text, or ``None`` if the tokens do not
        determine the bytes.
      notes: sentences about differences between the tokens and the text, and about arithmetic that
        is not float32.
    """

    lines: tuple[LineScore, ...]
    nll: float
    tokens: int
    unknown: int
    unit: Unit
    value: float
    bits_per_byte: float | None
    notes: tuple[str, ...]
    unknown_symbol: str | None = None

    def __str__(self) -> str:
        share = f" ({self.unknown / self.tokens:.1%} {self.unknown_symbol})" * bool(self.unknown)
        mean = f"{format_value(self.value, self.unit)} {UNIT_NAMES[self.unit]}"
        if self.bits_per_byte is not None and self.unit != "bpb":
            mean += f", {self.bits_per_byte:.4f} bits per byte of the text"
        size = f"{len(self.lines):,} lines, {self.tokens:,} tokens{share}"
        return "\n".join([*(f"note: {note}" for note in self.notes), f"{size}: {mean}"])

    def __repr__(self) -> str:
        size = f"{len(self.lines):,} lines, {self.tokens:,} tokens"
        return f"TextScore({size}, {self.unit} {format_value(self.value, self.unit)})"


def score_any_text(
    trained: TrainedModel, lines: Sequence[Text], name: str, advice: str = "give another text"
) -> TextScore:
    """Scores lines, which are texts or ids, with the settings ``score`` of the model.

    Raises DataError, which names ``name``, if the vocabulary lacks a symbol or an id, or if there
    is no token, and ConfigError if the device has too little memory.
    """
    vocab, exp = trained.vocab, trained.config
    ids = encode_lines(vocab, lines, name)
    if not sum(map(len, ids)):
        raise DataError(f"{name}: has no token to score; {advice}")
    separator = separator_ids(vocab, exp.data.document_separator)
    before = separator[-1:] if len(separator) else line_end(vocab)
    losses = score_lines(exp.model, trained.params, ids, before, exp.score, separator)
    return text_score(vocab, lines, ids, losses, rounding(exp.model, None))


def score_documents(trained: TrainedModel, documents: Sequence[np.ndarray]) -> "TextScore":
    """Scores each document of ids independently. Each document is one line of the result.

    The first token of a document is only an input, so the line does not contain this token.
    """
    exp, vocab = trained.config, trained.vocab
    if max(map(len, documents)) < 2:
        raise DataError("score.path: no document has two tokens or more; name a longer array")
    losses = score_texts(exp.model, trained.params, documents, exp.score)
    targets = [document[1:] for document in documents]
    return text_score(vocab, targets, targets, losses, rounding(exp.model, None))


def encode_lines(vocab: Vocab, lines: Sequence[Text], name: str) -> list[np.ndarray]:
    """Encodes each line with its line end, or checks its ids. A DataError names the line."""
    ids = []
    for n, line in enumerate(lines, 1):
        found = encode_text(vocab, line, f"{name}, line {n}")
        # The ids of a sentence begin with the boundary that ended the previous sentence. This
        # boundary is not a target of the sentence.
        ids.append(found[1:] if isinstance(line, str) and vocab.kind == "sentence" else found)
    return ids


def score_lines(
    cfg: TransformerXLConfig,
    params: Any,
    lines: Sequence[np.ndarray],
    before: Any,
    c: ScoreConfig,
    separator: np.ndarray = NO_IDS,
) -> list[np.ndarray]:
    """Returns the loss in nats of every token of every line. A line can be empty.

    ``before`` [1] is the token before the text, or before every line with ``memory="line"``. The
    memory is also emptied at the last token of each ``separator`` [k], if k is not 0.
    """
    whole = [[line] for line in lines] if c.memory == "line" else [lines]
    texts = [np.concatenate([before, *parts]) for parts in whole]
    # Separators are searched without ``before``, which can end a separator but cannot begin one.
    documents = [ended_at(text, separator_ends(text[1:], separator) + 1) for text in texts]
    nll = np.concatenate(score_texts(cfg, params, list(itertools.chain(*documents)), c))
    return np.split(nll, np.cumsum([len(line) for line in lines])[:-1])


def score_texts(
    cfg: TransformerXLConfig, params: Any, texts: Sequence[np.ndarray], c: ScoreConfig
) -> list[np.ndarray]:
    """Returns the loss in nats of every token except the first, for independent texts."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))  # similar lengths: less padding
    losses: dict[int, np.ndarray] = {}
    with work_bar("scoring", sum(len(text) - 1 for text in texts), "token") as shown:
        for first in range(0, len(order), c.batch_size):
            rows = order[first : first + c.batch_size]
            batch = [texts[n] for n in rows]
            losses |= zip(rows, _score_batch(cfg, params, batch, c, shown.update), strict=True)
    return [losses[n] for n in range(len(texts))]


def _score_batch(
    cfg, params, texts: Sequence[np.ndarray], c: ScoreConfig, add_done: Callable[[int], object]
) -> list[np.ndarray]:
    model, score = _program(cfg)
    rows = compiled_rows(len(texts))
    check_arrays(_WORK, memory_shapes(cfg, rows, c.mem_len))
    mems = model.init_mems(rows, 0 if cfg.memory_free else c.mem_len)
    streams = Streams(separate_rows(texts, rows), c.seg_len, _context_len(cfg, c))
    if not streams.n_segments:  # no text has a target
        return [np.zeros(0, np.float32) for _ in texts]
    inputs = make_batch(streams.segment(0), reset_memory=False)
    sizes = rows, inputs.inputs.shape[1], mems.mem_len
    self_check.check_on_one_device(model.cfg, *sizes, episodes=inputs.reset.ndim == 2)
    parts = []
    for segment in streams:
        nll, mems = score(params, make_batch(segment, reset_memory=False), mems)
        parts.append(np.asarray(nll))
        add_done(int(segment.weights.sum()))
    losses = np.concatenate(parts, axis=1)
    return [losses[n, : len(text) - 1] for n, text in enumerate(texts)]


@functools.lru_cache(maxsize=4)
def _program(cfg: TransformerXLConfig) -> tuple[TransformerXL, Checked]:
    model = TransformerXL(with_window(cfg))

    def score(params, batch: Batch, mems):
        kwargs = batch.model_kwargs(with_lengths=True)
        variables = {"params": params}
        return model.apply(variables, batch.inputs, batch.targets, mems, method="nll", **kwargs)

    return model, Checked(jax.jit(score, donate_argnums=(2,)), _WORK)


def _context_len(cfg: TransformerXLConfig, c: ScoreConfig) -> int:
    """Returns the number of tokens that a model without memory reads again before each segment."""
    if not cfg.memory_free:
        return 0
    if (limit := cfg.segment_limit) is None:
        return c.mem_len
    if c.seg_len > limit:
        why = f"this model has only {limit} positions; use a shorter segment"
        raise ConfigError(f"config key score.seg_len = {c.seg_len}: {why}")
    return min(c.mem_len, limit - c.seg_len)


def line_record(vocab: Vocab, n: int, line: LineScore, c: ScoreConfig) -> dict[str, Any]:
    """Returns the JSON object of a line: token counts, loss in nats, mean loss, and token losses.

    The line end is among the tokens of the line, but not in its text. Bytes that are not UTF-8
    become ``\\xNN``.
    """
    raw = line.text.removesuffix("\n").removesuffix("\r").encode("utf-8", "surrogateescape")
    row: dict[str, Any] = {"line": n, "text": raw.decode("utf-8", "backslashreplace")}
    row |= {"tokens": len(line.ids), "nll": math.fsum(line.nll.tolist())}
    if vocab.unknown is not None:
        row["unknown"] = count_unknown(vocab, line.ids)
    if len(line.ids):
        row[vocab.unit] = in_unit(row["nll"] / len(line.ids), vocab.unit)
    if c.tokens:
        row["symbols"] = list(line.symbols)
        row["token_nll"] = [round(float(x), 6) for x in line.nll]
    return row


def count_unknown(vocab: Vocab, ids: np.ndarray) -> int:
    """Counts the tokens that are the symbol for unknown words."""
    unknown = -1 if vocab.unknown is None else vocab.symbols.index(vocab.unknown)
    return int(np.count_nonzero(ids == unknown))


def text_score(
    vocab: Vocab,
    lines: Sequence[Text],
    ids: Sequence[np.ndarray],
    losses: Sequence[np.ndarray],
    computed_in: str = "",
) -> TextScore:
    """Sums the losses of a text, and notes the differences between its tokens and the text.

    ``computed_in`` is the model's arithmetic if it is not float32.
    """
    total = math.fsum(math.fsum(nll.tolist()) for nll in losses)
    texts = [line if isinstance(line, str) else vocab.decode(line) for line in lines]
    tokens, text, unit = np.concatenate(ids), "".join(texts), vocab.unit
    unknown, notes, lower = count_unknown(vocab, tokens), list[str](), vocab.lower_case
    words = [word for line in texts for word in (line.lower() if lower else line).split()]
    if new := unknown - words.count(vocab.unknown or ""):
        count = "1 word is" if new == 1 else f"{new:,} words are"
        notes.append(f"{count} not in the vocabulary and scored as {vocab.unknown}")
    if lower and text != text.lower():
        notes.append("the vocabulary has no capital letters: the text is scored in lower case")
    if vocab.kind == "byte" and "\n" in text and len(vocab.encode("\n")) == 0:
        notes.append("the vocabulary has no newline: line ends are left out")
    before = line_end(vocab) if vocab.kind == "sentence" else tokens[:0]
    per_byte: float | None = None
    if vocab.kind != "id":  # ids do not represent bytes
        bytes_of = lambda x: as_bytes(x) if isinstance(x, str) else vocab.decode_bytes(x)
        raw = b"".join(map(bytes_of, lines))
        if vocab.decode_bytes(np.concatenate([before, tokens])) == raw:
            per_byte = total / math.log(2) / len(raw)
        else:
            notes.append("no bits per byte: the tokens do not determine the bytes of the text")
    readable_symbols = lambda row: tuple(readable(vocab.kind, vocab.symbols[i]) for i in row)
    notes += [f"computed in {computed_in}"] if computed_in else []
    rows = zip(texts, ids, losses, strict=True)
    scored = tuple(LineScore(text, row, nll, readable_symbols(row)) for text, row, nll in rows)
    value, size = in_unit(total / len(tokens), unit), (len(tokens), unknown)
    return TextScore(scored, total, *size, unit, value, per_byte, tuple(notes), vocab.unknown)


def read_text(key: str, path: str, any_bytes: bool = False, binary: bool = False) -> str:
    """Returns the text of a file or, for ``-``, of standard input; a ConfigError names the key.

    ``any_bytes`` allows bytes that are not UTF-8. ``binary`` allows files that are not text.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else opened_path(path).read_bytes()
        text = decode_text(data, "surrogateescape" if any_bytes else "strict")
        start = b"" if binary else data[:LOOKED_AT]
        if kind := not_text(start) or wide_encoding(start):
            raise ValueError(f"is {kind}, not text in UTF-8; name a text file")
        return text
    except (OSError, ValueError) as error:
        advice = "; name a text file that can be read"
        reason = f"{error.strerror}{advice}" if isinstance(error, OSError) else error
        raise ConfigError(f"config key {key} = {shown_path(path)!r}: {reason}") from error


def _write(records: Sequence[dict[str, Any]], path: str | None) -> None:
    if path is None or path == "-":
        ascii_only = (sys.stdout.encoding or "").lower() != "utf-8"
        print(*(json.dumps(r, ensure_ascii=ascii_only) for r in records), sep="\n", flush=True)
        return
    with name_in_os_errors(path), open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
