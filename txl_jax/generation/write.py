"""Continuations on the screen as they are made, and kept in the workdir."""

import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import ConfigError, GenerateConfig
from txl_jax.data.prompt_ids import encode_prompts
from txl_jax.files import atomic_write
from txl_jax.generation.decoder import printable, whole_characters
from txl_jax.generation.detokenise import detokenised
from txl_jax.generation.prompts import prompts_of
from txl_jax.generation.text import Continuation, continuations
from txl_jax.records import append
from txl_jax.units import UNIT_NAMES, format_value, in_unit

TEXT, RECORDS = "sample.txt", "samples.jsonl"


def write_continuations(
    trained: TrainedModel, workdir: str, stop: Callable[[], bool] = lambda: False
) -> None:
    """Continues the config's prompts; prints them, and keeps them in the workdir.

    A single continuation is printed as it is made, many one by one when their batch has ended.
    ``sample.txt`` has what was printed; ``samples.jsonl`` a line, with its settings, for every
    continuation ever made here. How fast it went stands on stderr.

    Raises:
      ConfigError, DataError: a prompt that cannot be read or encoded, or a file for JSON that
        cannot be written.
    """
    c = trained.config.generate
    prompts, quiet = prompts_of(c), c.json == "-"
    encode_prompts(trained.vocab, prompts)  # all, for its errors, before one is shown
    set_errors(sys.stdout, "replace")
    single = len(prompts) == 1 and c.samples == 1 and not quiet
    texts = []
    with _json_file(c.json) as file:
        for first in range(0, len(prompts), c.batch_size):
            batch = prompts[first : first + c.batch_size]
            rows = _continued(trained, batch, c, stop, print_text=single)
            if rows is None:
                return
            for n, row in enumerate(rows):
                text = row.prompt + _shown(row.text, c)
                if not single:
                    text = f"[{1 + first + n // c.samples}.{1 + row.sample}] {text}"
                    print(printable(text), file=sys.stderr if quiet else sys.stdout, flush=True)
                texts.append(text)
                record = {**row.to_json(), "step": trained.step, "settings": _settings(c)}
                append(os.path.join(workdir, RECORDS), record)
                if file:
                    plain = (file.encoding or "").lower() != "utf-8"
                    print(json.dumps(record, ensure_ascii=plain), file=file, flush=True)
    whole = "\n".join(texts) + "\n"
    atomic_write(os.path.join(workdir, TEXT), whole.encode("utf-8", "surrogateescape"))


def _continued(
    trained: TrainedModel,
    prompts: Sequence[str],
    c: GenerateConfig,
    stop: Callable[[], bool],
    print_text: bool,
) -> list[Continuation] | None:
    """Continuations of a batch, told of on stderr; ``None`` if ``stop()`` became true."""
    rows: list[Continuation] = []
    began = time.perf_counter()
    waiting = ""  # what is printed by whole lines
    if print_text:
        print(printable(whole_characters(prompts[0])), end="", flush=True)
    for step in continuations(trained, prompts, c):
        rows = [row for row, _ in step]
        if print_text:
            waiting += step[0][1]
            ready = waiting[: waiting.rfind("\n") + 1] if c.detokenise else waiting
            waiting = waiting[len(ready) :]
            print(_shown(ready, c), end="", flush=True)
        if stop():
            return None
    if print_text:
        print(_shown(waiting, c), flush=True)
    if rows:
        _tell(rows, time.perf_counter() - began)
    return rows


def _tell(rows: list[Continuation], seconds: float) -> None:
    """How many tokens, how fast, and what the model itself thinks of them."""
    tokens = sum(len(row.nll) for row in rows)
    if not tokens:
        return
    unit = rows[0].vocab.unit
    loss = math.fsum(math.fsum(row.nll) for row in rows) / tokens
    print(
        f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.1f} tokens/s (compilation"
        f" included); {format_value(in_unit(loss, unit), unit)} {UNIT_NAMES[unit]} under the model",
        file=sys.stderr,
        flush=True,
    )


def _shown(text: str, c: GenerateConfig) -> str:
    return detokenised(text) if c.detokenise else text


def _settings(c: GenerateConfig) -> dict[str, Any]:
    kept = ("mem_len", "length", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {key: getattr(c, key) for key in (*kept, "seed")}


def set_errors(stream: TextIO | None, errors: str) -> None:
    """Sets what a stream does with text that its encoding does not have."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=errors)


@contextlib.contextmanager
def _json_file(path: str | None) -> Iterator[TextIO | None]:
    """The file that JSON lines are added to: none, standard output, or opened here."""
    if path is None or path == "-":
        yield sys.stdout if path else None
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"config key generate.json = {path!r}: {error.strerror}") from error
