"""What a trained model is worth: its score with and without its past, beside simple models."""

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import DynamicConfig, ProtocolConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.sentences import AnyStreams, Sentences, flat_tokens, ordered_streams
from txl_jax.data.sources.progress import DELAY
from txl_jax.evaluation.baselines import TOLD, baselines
from txl_jax.evaluation.evaluate import (
    describe,
    describe_targets,
    evaluator_of,
    past,
)
from txl_jax.files import write_json
from txl_jax.parallel.processes import is_process_zero
from txl_jax.parallel.shardings import make_mesh
from txl_jax.records import append, plain
from txl_jax.units import in_unit


def without_past(protocol: ProtocolConfig) -> ProtocolConfig:
    """The same protocol with every segment scored from nothing: no memory, context or learning."""
    static = without_learning(protocol)
    return dataclasses.replace(static, mem_len=0, context_len=0, warm_start=0, same_length=False)


def without_learning(protocol: ProtocolConfig) -> ProtocolConfig:
    """The same protocol with parameters that stay as they were trained."""
    return dataclasses.replace(protocol, dynamic=DynamicConfig())


def report(
    trained: TrainedModel, corpus: Corpus, workdir: str, stop: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """Scores ``evaluate.split`` with the protocol's memory or context, with none, and baselines.

    With dynamic evaluation the same protocol without it is scored too, and where means of the
    parameters were kept, each of the others under the first protocol. Progress is shown on
    stderr, a bar for each. Prints a table, then writes it as ``evaluation.json`` in the workdir,
    adds it to ``evaluations.jsonl`` as a line, and returns it; ``None`` if ``stop()`` became true
    on the way. Of many processes all score, and the first alone prints, writes and has the
    baselines in what is returned.
    """
    split = getattr(corpus, trained.config.evaluate.split)
    protocol = as_scored(trained.config.evaluate, split)
    model = trained.config.model
    foreign = of_vocab(corpus, protocol.split)
    if foreign and corpus.vocab.lower_case and is_process_zero():
        note = "the model's vocabulary has no capital letters: the text is read in lower case"
        print(f"note: {note}", file=sys.stderr, flush=True)
    told = lambda chosen: describe(chosen, model) + foreign
    unit = corpus.vocab.unit
    mesh = make_mesh(trained.config.mesh, model, trained.config.train.batch_size)
    rows: list[dict[str, Any]] = []

    def add(name: str, loss: float, **more: Any) -> None:
        rows.append({"name": name, "loss": loss, unit: in_unit(loss, unit), **more})

    for name, chosen, weights in _asked(trained, protocol):
        params = trained.params
        if weights != trained.weights:
            params = load(workdir, str(trained.step), weights).params
        with segment_bar(f"{chosen.split} split, {name}") as progress:
            score = evaluator_of(model, chosen, corpus, mesh).run(params, stop, progress)
        if score is None:
            return None
        add(
            name,
            score.loss,
            targets=score.targets,
            protocol=told(chosen),
            seconds=round(score.seconds, 2),
            **conversions(score.loss * score.targets, corpus, chosen),
        )
    if is_process_zero():  # the others have nothing to write
        places, of = scored_places(protocol, split), describe_targets(protocol) + foreign
        for row in baselines(protocol.baselines, corpus, protocol.split, places):
            rows.append({**row, "protocol": f"{of}, {TOLD[row['name']]}"})
    result = {
        "step": trained.step,
        "weights": trained.weights,
        "corpus": corpus.name,
        "source_hash": corpus.source_hash,
        "label": corpus.info["label"],
        "unit": unit,
        "results": rows,
    }
    if is_process_zero():
        print(table(rows, unit, told(protocol)), flush=True)
        write_json(os.path.join(workdir, "evaluation.json"), result)
        append(os.path.join(workdir, "evaluations.jsonl"), plain(result))
    return result


def _asked(
    trained: TrainedModel, protocol: ProtocolConfig
) -> list[tuple[str, ProtocolConfig, str]]:
    """Name, protocol and weights of each score: the simpler protocols, then the other weights."""
    asked = [(name, c, trained.weights) for name, c in protocols(protocol)]
    if not trained.others:
        return asked
    first, protocol, _ = asked[0]
    told = [(f"{name}, {weights} weights", c, weights) for name, c, weights in asked]
    return [*told, *((f"{first}, {name} weights", protocol, name) for name in trained.others)]


def as_scored(protocol: ProtocolConfig, split: np.ndarray | Sentences) -> ProtocolConfig:
    """The protocol without a limit ``max_segments`` that the split does not reach."""
    if protocol.max_segments < _cut(protocol, split).n_segments:
        return protocol
    return dataclasses.replace(protocol, max_segments=0)


def scored_places(protocol: ProtocolConfig, split: np.ndarray | Sentences) -> np.ndarray | None:
    """Which tokens of a split are targets, rising: int [N]; ``None``: all but the first.

    Places count from the first token of :func:`~txl_jax.data.sentences.flat_tokens`.
    """
    if not protocol.max_segments:
        return None
    whole = split.tokens if isinstance(split, Sentences) else split
    numbers: Any = np.arange(len(whole), dtype=np.int32)
    first = 0
    if isinstance(split, Sentences):
        first, numbers = int(split.offsets[0]), Sentences(numbers, split.offsets)
    streams = _cut(protocol, numbers)
    segments = map(streams.segment, range(min(protocol.max_segments, streams.n_segments)))
    found = [segment.targets[segment.weights > 0] for segment in segments]
    return np.sort(np.concatenate(found)) - first


def _cut(protocol: ProtocolConfig, split: np.ndarray | Sentences) -> AnyStreams:
    return ordered_streams(split, protocol.batch_size, protocol.seg_len)


def of_vocab(corpus: Corpus, split: str) -> str:
    """What to say of a split that is encoded with another text's vocabulary; else nothing.

    With a symbol for unknown words a loss falls where more words are unknown, so their share
    stands beside it.
    """
    if not corpus.info["foreign_vocab"]:
        return ""
    said = ", encoded with the model's vocabulary"
    unknown = corpus.vocab.unknown
    if unknown is None:
        return said
    tokens = flat_tokens(getattr(corpus, split))
    share = np.count_nonzero(tokens == corpus.vocab.symbols.index(unknown)) / len(tokens)
    return f"{said} ({share:.1%} {unknown})"


def conversions(nats: float, corpus: Corpus, protocol: ProtocolConfig) -> dict[str, float]:
    """``bits_per_byte`` and ``word_ppl`` of subwords, characters or bytes, all of them scored.

    Word-level perplexity counts words between white space and a token for each line's end, as
    word-level benchmarks do, so that models of characters and of words compare on one text. The
    first symbol is no target and costs nothing. Nothing is converted where some text was not
    scored, where bytes are left out of the vocabulary (enwik8's 204 symbols), and from words to
    bytes: ``<unk>`` and white space hide what the bytes were.

    Args:
      nats: of all targets together.
      corpus: with the scored split.
      protocol: that it was scored under.
    """
    vocab, info, split = corpus.vocab, corpus.info, protocol.split
    if vocab.kind in ("word", "sentence") or protocol.max_segments:
        return {}
    n_bytes = info["bytes"][split]
    if vocab.kind not in ("char", "subword") and info["tokens"][split] != n_bytes:
        return {}
    first = vocab.decode_bytes(getattr(corpus, split)[:1])
    words = info["words"][split] + info["lines"][split]
    return {
        "bits_per_byte": nats / math.log(2) / (n_bytes - len(first)),
        "word_ppl": in_unit(nats / words, "ppl"),
    }


def table(rows: list[dict[str, Any]], unit: str, protocol: str) -> str:
    """The rows as text, the protocol above them."""
    width = max(len(r["name"]) for r in rows)
    more = {"bits_per_byte": "bits per byte", "word_ppl": "perplexity of a whole word"}
    lines = []
    for r in rows:
        converted = [f"{r[key]:.4g} {what}" for key, what in more.items() if key in r]
        told = f"  ({', '.join(converted)})" if converted else ""
        lines.append(f"  {r['name']:<{width}}  {r[unit]:9.4f} {unit}{told}")
    return "\n".join([f"{protocol}:", *lines])


def protocols(protocol: ProtocolConfig) -> list[tuple[str, ProtocolConfig]]:
    """A protocol and the simpler ones it is held against, each with its name.

    Those are the same without dynamic evaluation, and without a past; where it has them.
    """
    kinds = {"context": protocol.context_len, "memory": protocol.mem_len}
    kind = " and ".join(name for name, length in kinds.items() if length)
    named = [(past(protocol), without_learning(protocol))]
    if protocol.dynamic.rule != "none":
        named.insert(0, (f"{past(protocol)}, dynamic {protocol.dynamic.rule}", protocol))
    return [*named, (f"no {kind}", without_past(protocol))] if kind else named


@contextlib.contextmanager
def segment_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for ``progress`` of :meth:`Evaluator.run`, shown as that of a download is."""
    from tqdm import tqdm

    seconds = 0.2 if sys.stderr.isatty() else 30.0
    with tqdm(
        desc=what,
        unit="segment",
        disable=not is_process_zero(),
        delay=DELAY,
        mininterval=seconds,
        maxinterval=max(seconds, 10.0),
    ) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
