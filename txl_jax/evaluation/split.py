"""Scores a trained model under several protocols, its averaged parameters, and baselines."""

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.trained_model import TrainedModel, parameter_count
from txl_jax.config import ExperimentConfig, ProtocolConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.pieces import as_pieces
from txl_jax.evaluation import protocols
from txl_jax.evaluation.any_text import count_unknown
from txl_jax.evaluation.baselines import DESCRIPTIONS, score_baselines
from txl_jax.evaluation.evaluator import Evaluator, segment_bar, split_evaluator
from txl_jax.evaluation.results import Evaluation, SplitScore
from txl_jax.files import write_json
from txl_jax.model.precision import arithmetic_record
from txl_jax.parallel.mesh import idle_devices, scoring_mesh
from txl_jax.parallel.processes import is_process_zero, print_once
from txl_jax.paths import path
from txl_jax.records import append, plain, read_counted
from txl_jax.units import UNIT_NAMES, in_unit


def write_evaluation(result: Evaluation, workdir: str) -> None:
    """Prints a result, writes it to ``evaluation.json`` and adds it to ``evaluations.jsonl``.

    The result is not added if it differs from the last result in that file only in its seconds.
    This occurs when a command completes an interrupted run and scores the same model again.
    """
    if is_process_zero():
        print(result, flush=True)
        kept, record = os.path.join(workdir, "evaluations.jsonl"), plain(result.record)
        write_json(os.path.join(workdir, "evaluation.json"), record)
        before = read_counted(kept, is_evaluation)[0] if path(kept).exists() else []
        if list(map(_scores, before[-1:])) != [_scores(record)]:
            append(kept, record)


def is_evaluation(value: Any) -> bool:
    """Tells whether a JSON value is the record of an evaluation."""
    try:
        unit, rows = value["unit"], value["results"]
        known = unit in UNIT_NAMES and type(value["step"]) is int and bool(rows)
        return known and all(
            isinstance(row["name"], str)
            and isinstance(row.get("protocol", ""), str)
            and type(row.get("targets", 0)) is int
            and isinstance(row[unit], int | float | None)
            for row in rows
        )
    except (AttributeError, KeyError, TypeError):
        return False


def _scores(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a result without the seconds of its rows."""
    rows = [{**row, "seconds": None} for row in result["results"]]
    return {**result, "results": rows}


def score_split(
    trained: TrainedModel,
    corpus: Corpus,
    stop: Callable[[], bool] = lambda: False,
    evaluators: Mapping[ProtocolConfig, Evaluator] | None = None,
) -> Evaluation | None:
    """Scores ``evaluate.split`` under several protocols, with other weights, and with baselines.

    ``evaluators`` is the result of :func:`split_evaluators`, or ``None`` to call it here. The other
    weights are read from the workdir ``trained.source``. The result is ``None`` if ``stop()``
    became true.
    """
    config, found = trained.config, list[SplitScore]()
    evaluators = evaluators or split_evaluators(config, corpus)
    protocol, first = next(iter(evaluators.items()))
    split = getattr(corpus, config.evaluate.split)
    resets = ", memory reset at each document" if as_pieces(split).kind == "documents" else ""
    note, unit = vocab_note(corpus, protocol.split), corpus.vocab.unit
    if note and corpus.vocab.lower_case:
        text = "the model's vocabulary has no capital letters: the text is read in lower case"
        print_once(f"note: {text}", sys.stderr)
    mesh: Any = first.model.mesh
    key = "evaluate.batch_size"
    print_once(idle_devices(mesh, config.mesh, protocol.batch_size, key=key), sys.stderr)
    scores = [(name, c, trained.weights) for name, c in protocols.compared_protocols(protocol)]
    if trained.others:
        scores += [(scores[0][0], protocol, weights) for weights in trained.others]
        scores = [(f"{name}, {weights} weights", c, weights) for name, c, weights in scores]
    for name, chosen, weights in scores:
        same = weights == trained.weights
        params = (trained if same else load(trained.source, str(trained.step), weights)).params
        with segment_bar(f"{chosen.split} split, {name}") as progress:
            score = evaluators[chosen].run(params, stop, progress)
        if score is None:
            return None
        # Memory is emptied where a document begins, so settings of the first memory do nothing.
        told = dataclasses.replace(chosen, first_memory="empty", warm_start=0) if resets else chosen
        description = protocols.describe(told, config.model, mesh) + resets + note
        nats, value = score.loss * score.targets, in_unit(score.loss, unit)
        more: dict[str, Any] = conversions(nats, corpus, chosen)
        if resets and not chosen.max_segments:
            more |= {"documents": len(split), "document_loss": nats / len(split)}
        more["seconds"] = round(score.seconds, 2)
        found.append(SplitScore(name, description, score.loss, unit, value, score.targets, **more))
    if is_process_zero():
        targets = protocols.describe_targets(protocol) + note
        indices = protocols.target_indices(protocol, split)
        for row in score_baselines(protocol.baselines, corpus, protocol.split, indices):
            description = f"{targets}, {DESCRIPTIONS[row['name']]}"
            row |= {"value": row.pop(unit), "unit": unit, "protocol": description}
            found.append(SplitScore(**row))
    about = {"step": trained.step, "weights": trained.weights, **corpus_record(corpus)}
    about["parameters"] = parameter_count(trained.params)
    about |= arithmetic_record(config.model, mesh)
    return Evaluation(**vars(found[0]), results=tuple(found), about=about)


def split_evaluators(
    config: ExperimentConfig, corpus: Corpus, mesh: Mesh | None = None
) -> dict[ProtocolConfig, Evaluator]:
    """Builds an evaluator of ``evaluate.split`` for each compared protocol, the config's first.

    The keys are the protocols. ``mesh`` has the devices, or is ``None`` to build a mesh here.
    """
    split = getattr(corpus, config.evaluate.split)
    protocol = protocols.drop_unused_limit(config.evaluate, split)
    mesh = mesh or scoring_mesh(config.mesh, config.model, protocol.batch_size)
    compared = [chosen for _, chosen in protocols.compared_protocols(protocol)]
    return {one: split_evaluator(config.model, one, corpus, mesh) for one in compared}


def corpus_record(corpus: Corpus) -> dict[str, Any]:
    """Describes the text and the unit of its losses, for the JSON of a result."""
    about = {"corpus": corpus.name, "source_hash": corpus.source_hash}
    return {**about, "label": corpus.info["label"], "unit": corpus.vocab.unit}


def vocab_note(corpus: Corpus, split: str) -> str:
    """Returns a note for the protocol if the vocabulary of another text encodes the split.

    The note has the share of unknown words, because more unknown words make the loss lower.
    """
    vocab = corpus.vocab
    if not corpus.info["foreign_vocab"]:
        return ""
    note = ", encoded with the model's vocabulary"
    if vocab.unknown is None:
        return note
    tokens = as_pieces(getattr(corpus, split)).ids
    return f"{note} ({count_unknown(vocab, tokens) / len(tokens):.1%} {vocab.unknown})"


def conversions(nats: float, corpus: Corpus, protocol: ProtocolConfig) -> dict[str, float]:
    """Converts the total loss of a split in nats to ``bits_per_byte`` and ``word_ppl``.

    For ``word_ppl``, words are separated by white space, and each line end counts as a word. The
    first symbol is not a target and has no loss. The result is empty if a part of the text was not
    scored, or if the vocabulary lacks bytes of the text (enwik8 with 204 symbols). It is also empty
    for word vocabularies, tokenizers and ids, whose tokens do not always determine the bytes.
    """
    vocab, info, split = corpus.vocab, corpus.info, protocol.split
    if vocab.kind in ("word", "sentence", "tokenizer", "id") or protocol.max_segments:
        return {}
    n_bytes = info["bytes"][split]
    if vocab.kind not in ("char", "subword") and info["tokens"][split] != n_bytes:
        return {}
    pieces = as_pieces(getattr(corpus, split))
    first = vocab.decode_bytes(pieces.ids[[0] if pieces.shared else pieces.starts])
    words = info["words"][split] + info["lines"][split]
    return {
        "bits_per_byte": nats / math.log(2) / (n_bytes - len(first)),
        "word_ppl": in_unit(nats / words, "ppl"),
    }
