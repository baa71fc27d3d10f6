"""What a trained model is worth: its score with and without its past, beside simple models."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from txl_jax.config import ProtocolConfig
from txl_jax.data.corpus import Corpus
from txl_jax.evaluation.baselines import baselines
from txl_jax.evaluation.evaluate import describe, evaluator_of
from txl_jax.files import write_json
from txl_jax.training.sharding import make_mesh
from txl_jax.units import in_unit
from txl_jax.workdir import Trained


def without_past(protocol: ProtocolConfig) -> ProtocolConfig:
    """The same protocol with every segment scored from nothing: no memory, no context."""
    return dataclasses.replace(protocol, mem_len=0, context_len=0, same_length=False)


def report(
    trained: Trained, corpus: Corpus, workdir: str, stop: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """Scores ``evaluate.split`` with the protocol's memory or context, with none, and baselines.

    Prints a table, writes it as ``evaluation.json`` in the workdir, and returns it; ``None`` if
    ``stop()`` became true on the way.
    """
    protocol = trained.config.evaluate
    model = trained.config.model
    unit = corpus.vocab.unit
    mesh = make_mesh(trained.config.mesh, trained.config.train.batch_size)
    rows: list[dict[str, Any]] = []

    def add(name: str, loss: float, **more: Any) -> None:
        rows.append({"name": name, "loss": loss, unit: in_unit(loss, unit), **more})

    for name, chosen in protocols(protocol):
        score = evaluator_of(model, chosen, corpus, mesh).run(trained.params, stop)
        if score is None:
            return None
        add(
            name,
            score.loss,
            targets=score.targets,
            protocol=describe(chosen, model),
            seconds=round(score.seconds, 2),
        )
    rows += baselines(protocol.baselines, corpus, protocol.split)
    result = {
        "step": trained.step,
        "corpus": corpus.name,
        "source_hash": corpus.source_hash,
        "unit": unit,
        "results": rows,
    }
    write_json(os.path.join(workdir, "evaluation.json"), result)
    print(table(rows, unit, describe(protocol, model)), flush=True)
    return result


def table(rows: list[dict[str, Any]], unit: str, protocol: str) -> str:
    """The rows as text, the protocol above them."""
    width = max(len(r["name"]) for r in rows)
    lines = [f"  {r['name']:<{width}}  {r[unit]:9.4f} {unit}" for r in rows]
    return "\n".join([f"{protocol}:", *lines])


def protocols(protocol: ProtocolConfig) -> list[tuple[str, ProtocolConfig]]:
    """A protocol and, where it gives the model a past, the same without; each with its name."""
    kind, length = "memory", protocol.mem_len
    if protocol.context_len:
        kind, length = "context", protocol.context_len
    named = [(f"{kind} {length}", protocol)]
    return [*named, (f"no {kind}", without_past(protocol))] if length else named
