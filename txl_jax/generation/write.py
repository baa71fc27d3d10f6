"""Prints continuations during generation, and writes them into the workdir."""

import contextlib
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

import numpy as np

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import GenerateConfig
from txl_jax.data.vocab import Text, encode_prompts
from txl_jax.files import atomic_write
from txl_jax.generation.prompts import check_length, prompt_key, read_prompts
from txl_jax.generation.sampling import Sampling
from txl_jax.generation.text import Continuation, continuations, printable, prompt_text
from txl_jax.records import append_new, plain
from txl_jax.standard_streams import say
from txl_jax.units import UNIT_NAMES, format_value, in_unit

_REPLACEMENTS = [
    (re.compile(r" @([-,.–])@ "), r"\1"),
    (re.compile(r'" ?([^"\n]*?) ?"'), r'"\1"'),
    (re.compile(r" ([,.;:!?%)\]}…]|'(?:s|S|re|ve|ll|d|m|t)\b|n't\b)"), r"\1"),
    (re.compile(r"([(\[{$£€#]) "), r"\1"),
]
"""Patterns of WikiText's tokens, and the ordinary text for each."""


def write_continuations(
    trained: TrainedModel, workdir: str, stop: Callable[[], bool] = lambda: False
) -> None:
    """Continues the prompts of the config, prints the texts, and writes them into the workdir.

    A single continuation is printed during generation. Several continuations are printed after each
    batch. The speed is printed on standard error. ``sample.txt`` has the printed text. For every
    continuation, a line with its text and settings is added to ``samples.jsonl``, unless the file
    already has an equal line, for example after an interruption. A model of ids also writes
    ``sample.npy``, all ids [N], and ``sample.starts.npy``, the index of each text's first id [n].

    Raises ConfigError or DataError if a prompt cannot be read or encoded.
    """
    c = trained.config.generate
    check_length(c)
    prompts, quiet = read_prompts(c), c.json == "-"
    encode_prompts(trained.vocab, prompts, prompt_key(c))  # raises errors before the first output
    single = len(prompts) == 1 and c.samples == 1 and not quiet
    texts, ids = list[str](), list[list[int]]()
    settings = {key: getattr(c, key) for key in ("mem_len", "length", *Sampling._fields, "seed")}
    with _json_lines(c.json) as file:
        for first in range(0, len(prompts), c.batch_size):
            batch = prompts[first : first + c.batch_size]
            rows = _continue_batch(trained, batch, stop, print_text=single)
            if rows is None:
                return
            about = {"step": trained.step, "settings": settings}
            records = [plain({**row.to_json(), **about}) for row in rows]
            append_new(os.path.join(workdir, "samples.jsonl"), records)
            for n, (row, record) in enumerate(zip(rows, records, strict=True)):
                text = row.prompt + formatted(row.text, c)
                if not single:
                    text = f"[{1 + first + n // c.samples}.{1 + row.sample}] {text}"
                    _show(text, file=sys.stderr if quiet else sys.stdout)
                texts.append(text)
                ids.append(row.ids)
                if file:
                    ascii_only = (getattr(file, "encoding", None) or "").lower() != "utf-8"
                    print(json.dumps(record, ensure_ascii=ascii_only), file=file, flush=True)
    whole = "\n".join(texts) + "\n"
    atomic_write(os.path.join(workdir, "sample.txt"), whole.encode("utf-8", "surrogateescape"))
    if trained.vocab.kind == "id":
        starts = np.cumsum([0, *map(len, ids[:-1])])
        whole_ids = np.concatenate(ids).astype(np.int32)
        atomic_write(os.path.join(workdir, "sample.npy"), _npy(whole_ids))
        atomic_write(os.path.join(workdir, "sample.starts.npy"), _npy(starts))


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _continue_batch(
    trained: TrainedModel, prompts: Sequence[Text], stop: Callable[[], bool], print_text: bool
) -> list[Continuation] | None:
    """Generates the continuations of a batch. Returns ``None`` if ``stop()`` became true."""
    c = trained.config.generate
    rows: list[Continuation] = []
    start = time.perf_counter()
    pending = ""  # an unfinished line: only complete lines are detokenised
    if print_text:
        _show(prompt_text(trained.vocab, prompts[0]), end="")
    for step in continuations(trained, prompts, c):
        rows = [row for row, _ in step]
        if print_text:
            pending += step[0][1]
            ready = pending[: pending.rfind("\n") + 1] if c.detokenise else pending
            pending = pending[len(ready) :]
            _show(formatted(ready, c), end="")
        if stop():
            if print_text:
                _show("")  # the next message begins on its own line
            return None
    if print_text:
        _show(formatted(pending, c))
    tokens, seconds = sum(len(row.nll) for row in rows), time.perf_counter() - start
    if tokens:
        unit = trained.vocab.unit
        loss = in_unit(math.fsum(math.fsum(row.nll) for row in rows) / tokens, unit)
        speed = f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.1f} tokens/s"
        loss_text = f"{format_value(loss, unit)} {UNIT_NAMES[unit]} under the model"
        say(f"{speed} (compilation included); {loss_text}")
    return rows


def detokenise(text: str) -> str:
    """Restores the text before WikiText's tokenisation, line by line.

    ``10 @,@ 000`` becomes 10,000, and ``well @-@ known`` becomes well-known. Spaces around
    punctuation are removed. The function guesses which of two quotation marks is the opening one.
    """
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text


def formatted(text: str, c: GenerateConfig) -> str:
    """Detokenises a text if the settings say so."""
    return detokenise(text) if c.detokenise else text


def set_stream_errors(stream: TextIO | None, errors: str) -> None:
    """Sets how a stream handles characters that are not in its encoding."""
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError, ValueError):  # cannot be flushed, or is closed
            stream.reconfigure(errors=errors)


def _show(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Prints a text. ``?`` replaces each character that the stream's encoding does not have."""
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    shown = printable(text).encode(encoding, "replace").decode(encoding)
    print(shown, end=end, file=file, flush=True)


def _json_lines(path: str | None) -> contextlib.AbstractContextManager[TextIO | None]:
    """Opens the file for JSON lines. ``None`` means no file, and ``-`` means standard output."""
    if path is None or path == "-":
        return contextlib.nullcontext(sys.stdout if path else None)
    return open(path, "a", encoding="utf-8")
