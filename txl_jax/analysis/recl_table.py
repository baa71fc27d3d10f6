"""The RECL of groups of models, as the paper's table 8 has it, and their gains as heat maps.

Every model is asked for its losses on the same targets at the same lengths (context.py), one model
at a time; they are kept as ``recl/NAME.npz`` in the workdir and used again as long as the model's
parameters, the text and the settings are the same. Recorded losses of any other program join as
``NAME=FILE.npz`` (:meth:`txl_jax.analysis.recl.Losses.save` says how).
"""

import dataclasses
import hashlib
import json
import os
import re
from typing import Any

import jax
import numpy as np

from txl_jax.analysis import pictures, recl_pictures
from txl_jax.analysis.context import (
    check,
    how_measured,
    measure,
    targets_hash,
    targets_of,
)
from txl_jax.analysis.recl import Gains, Losses, LossesError, gains
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.workdir import read_experiment, read_json, read_record, read_vocab
from txl_jax.checkpoint.workdir_files import CONFIG, check_outputs, register_outputs
from txl_jax.config import ContextConfig, DataConfig, ExperimentConfig
from txl_jax.data.corpus import corpus_from_config
from txl_jax.evaluation.errors import AnalysisError
from txl_jax.evaluation.evaluate import under_protocol
from txl_jax.evaluation.report import segment_bar
from txl_jax.files import write_csv, write_json


@dataclasses.dataclass(frozen=True)
class Member:
    """A model of a group: its name there, and a workdir or a file of recorded losses."""

    group: str
    name: str
    path: str

    @property
    def recorded(self) -> bool:
        """Whether its losses come from a file."""
        return self.path.endswith(".npz")

    @property
    def label(self) -> str:
        """``GROUP:NAME``, or the name alone where there are no groups."""
        return f"{self.group}:{self.name}" if self.group else self.name

    def file(self, name: str) -> str:
        """The path of a file of its workdir."""
        return os.path.join(self.path, name)


def run(exp: ExperimentConfig, workdir: str) -> str:
    """Measures every model, prints the table and writes ``recl*`` in the workdir; the last line.

    Raises:
      AnalysisError: no models, a malformed one, or models that do not compare.
      WorkdirError, CheckpointError: a model that cannot be loaded.
    """
    c = dataclasses.replace(exp.context, lengths=lengths_of(exp))
    members = members_of(exp.recl.models)
    check_outputs(workdir, "recl")
    register_outputs(workdir, "recl")
    data = None if exp.data == DataConfig() else exp.data
    _check_alike([m for m in members if not m.recorded])
    measured = {m: _recorded(m, c) for m in members if m.recorded}
    _check_targets(members, measured, c, data)
    steps: dict[Member, int] = {}
    text: dict[str, Any] = {}
    for member in members:
        if not member.recorded:
            measured[member], steps[member], text = _measured(member, c, data, workdir)
    groups: dict[str, list[Losses]] = {}
    for member in members:
        groups.setdefault(member.group, []).append(measured[member])
    found = {
        group: {r: gains(losses, r) for r in exp.recl.shares} for group, losses in groups.items()
    }
    result = summary(exp, c, members, measured, found, steps, text)
    print(table(result), flush=True)
    write_json(os.path.join(workdir, "recl.json"), result)
    write_csv(os.path.join(workdir, "recl.csv"), _rows(result))
    write_csv(os.path.join(workdir, "recl_gains.csv"), _gain_rows(found))
    told = f"{result['targets']:,} targets of {_text(result)}, {how_measured(c)}"
    pictures.save(recl_pictures.heat_maps(found, told), workdir, "recl")
    pictures.save(recl_pictures.curves(groups, told, c), workdir, "recl_loss")
    return f"RECL of {len(members)} models from contexts up to {c.lengths[-1]:,} tokens"


def lengths_of(exp: ExperimentConfig) -> tuple[int, ...]:
    """Context lengths first, first + delta, … up to longest.

    Raises:
      AnalysisError: only one, or windows so far apart that a longer context may be the same one.
    """
    c, asked = exp.recl, exp.context
    lengths = tuple(range(c.first, c.longest + 1, c.delta))
    if len(lengths) < 2:
        raise AnalysisError(
            f"recl.first={c.first}, recl.delta={c.delta} and recl.longest={c.longest} give"
            f" {len(lengths)} context lengths, and two or more are needed"
        )
    if asked.kind == "window" and asked.stride > c.delta:
        raise AnalysisError(
            f"context.stride={asked.stride}: a target sees up to stride - 1 tokens more than c, so"
            f" lengths that are recl.delta={c.delta} apart need a stride of at most {c.delta}"
        )
    return lengths


def members_of(models: tuple[str, ...]) -> list[Member]:
    """The models that the config names, in its order.

    Raises:
      AnalysisError: none, text in another form, a name that stands twice in its group, or a
        path that does not exist.
    """
    form = "recl.models must be NAME=WORKDIR or NAME=FILE.npz, GROUP:NAME=… for several groups"
    if not models:
        raise AnalysisError(f"recl.models is empty: {form}, with commas between")
    members: list[Member] = []
    for text in models:
        match = re.fullmatch(r"(?:([\w.+-]+):)?([\w.+-]+)=(.+)", text)
        if not match:
            raise AnalysisError(f"recl.models has {text!r}: {form}")
        member = Member(match[1] or "", match[2], match[3])
        if any(member.label == other.label for other in members):
            raise AnalysisError(f"recl.models has two models of the name {member.label}")
        if not os.path.exists(member.path if member.recorded else member.file(CONFIG)):
            what = "there is no such file" if member.recorded else f"there is no {CONFIG} in it"
            raise AnalysisError(f"recl.models has {text!r}: {what}")
        members.append(member)
    return members


def _check_alike(members: list[Member]) -> None:
    """Raises AnalysisError where vocabularies or trained texts differ; nothing is loaded."""

    def of(member: Member) -> tuple[Any, Any]:
        vocab, record = read_vocab(member.path), read_record(member.path)
        symbols = vocab.kind, sorted(vocab.symbols)
        return symbols, record.get("corpus", {}).get("source_hash")

    for member in members[1:]:
        (symbols, text), (first_symbols, first_text) = of(member), of(members[0])
        pair = f"{member.label} ({member.path}) and {members[0].label} ({members[0].path})"
        if symbols != first_symbols:
            raise AnalysisError(
                f"{pair} have other vocabularies ({len(symbols[1]):,} and"
                f" {len(first_symbols[1]):,} symbols): their losses do not compare"
            )
        if text != first_text:
            raise AnalysisError(
                f"{pair} were trained on other text (hashes {text} and {first_text}); train them"
                " on the same"
            )


def _check_targets(
    members: list[Member],
    recorded: dict[Member, Losses],
    c: ContextConfig,
    data: DataConfig | None,
) -> None:
    """Raises AnalysisError where a model cannot have these lengths, or has other targets."""
    first: tuple[str, int, str] | None = None
    for member in members:
        if member.recorded:
            found = recorded[member].nll.shape[1], recorded[member].targets
        else:
            found = _targets(member, c, data)
        this = f"{member.label} ({member.path})", *found
        first = first or this
        if this[1] != first[1]:
            raise AnalysisError(
                f"{this[0]} has losses of {this[1]:,} targets and {first[0]} of {first[1]:,}: they"
                " must be of the same; see context.max_tokens, context.split and recl.longest"
            )
        if this[2] and first[2] and this[2] != first[2]:
            raise AnalysisError(
                f"{this[0]} and {first[0]} do not predict the same text: the symbols of their"
                " targets differ; name one text for all with --config.data.name and data.path"
            )
        first = first if first[2] else this


def _targets(member: Member, c: ContextConfig, data: DataConfig | None) -> tuple[int, str]:
    """How many targets a model will have, and their hash; its parameters are not read."""
    exp, vocab = read_experiment(member.path), read_vocab(member.path)
    corpus = corpus_from_config(data or exp.data, vocab)
    tokens = getattr(corpus, c.split)
    try:
        check(exp.model, tokens, c)
    except AnalysisError as error:
        raise AnalysisError(f"{member.label} ({member.path}): {error}") from error
    targets = tokens[targets_of(tokens, c)]
    return len(targets), targets_hash(vocab, targets)


def _recorded(member: Member, c: ContextConfig) -> Losses:
    """The losses of a file, under the member's name, at the lengths that are asked for."""
    losses = Losses.load(member.path)
    missing = [n for n in c.lengths if n not in losses.contexts]
    if missing:
        raise LossesError(
            f"{member.path}: has no losses at contexts {missing}; it has {list(losses.contexts)}."
            " Set recl.first, recl.delta and recl.longest to what all models have"
        )
    rows = [losses.contexts.index(n) for n in c.lengths]
    return Losses(member.name, c.lengths, losses.nll[rows], losses.targets)


def _measured(
    member: Member, c: ContextConfig, data: DataConfig | None, workdir: str
) -> tuple[Losses, int, dict[str, Any]]:
    """A model's losses, from the workdir's ``recl`` folder if they are there; its step and text."""
    trained = load(member.path)
    corpus = corpus_from_config(data or trained.config.data, trained.vocab)
    path = os.path.join(workdir, "recl", "-".join(filter(None, (member.group, member.name))))
    model = under_protocol(trained.config.model, trained.config.evaluate)
    key = {
        "step": trained.step,
        "parameters": _hash_of(trained.params),
        "model": dataclasses.asdict(dataclasses.replace(model, kernel="auto")),
        "source_hash": corpus.source_hash,
        "symbols": hashlib.sha256(json.dumps(trained.vocab.symbols).encode()).hexdigest(),
        "split": c.split,
        "kind": c.kind,
        "stride": c.stride,
        "max_tokens": c.max_tokens,
        "streams": c.batch_size if c.kind == "memory" else None,  # they decide what a target saw
        "lengths": c.lengths,
    }
    key = json.loads(json.dumps(key))
    if os.path.exists(path + ".json") and read_json(path + ".json") == key:
        losses = dataclasses.replace(Losses.load(path + ".npz"), name=member.name)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with segment_bar(f"{member.label}, contexts up to {c.lengths[-1]}") as progress:
            losses = measure(trained, corpus, c, member.name, progress)
        losses.save(path + ".npz")
        write_json(path + ".json", key)
    text = {
        "corpus": corpus.name,
        "label": corpus.info["label"],
        "source_hash": corpus.source_hash,
        "unit": corpus.vocab.unit,
    }
    return losses, trained.step, text


def _hash_of(params: Any) -> str:
    """Sha256 of all parameters and their names."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def summary(
    exp: ExperimentConfig,
    c: ContextConfig,
    members: list[Member],
    measured: dict[Member, Losses],
    found: dict[str, dict[float, list[Gains]]],
    steps: dict[Member, int],
    text: dict[str, Any],
) -> dict[str, Any]:
    """What ``recl.json`` holds: the protocol, and of each model losses, gains and RECL."""
    threshold = exp.recl.threshold
    models = []
    for member in members:
        losses = measured[member]
        by_share = []
        for r, of_group in found[member.group].items():
            of_model = next(g for g in of_group if g.name == member.name)
            recl = of_model.recl(threshold)
            by_share.append(
                {
                    "r": r,
                    "recl": recl,
                    "at_least": recl == c.lengths[-1],
                    "loss_rises": _loss_rises(losses, recl, threshold),
                    "gain_in_perplexity": of_model.absolute.tolist(),
                    "relative_gain": of_model.relative.tolist(),
                }
            )
        models.append(
            {
                "group": member.group,
                "name": member.name,
                "path": member.path,
                "step": steps.get(member),
                "loss": losses.mean().tolist(),
                "shares": by_share,
            }
        )
    return {
        **text,
        "split": c.split,
        "kind": c.kind,
        "stride": c.stride,
        "targets": next(iter(measured.values())).nll.shape[1],
        "first_target": c.lengths[-1],
        "lengths": list(c.lengths),
        "threshold": threshold,
        "models": models,
    }


def _loss_rises(losses: Losses, recl: int, threshold: float) -> bool:
    """Whether perplexity at the RECL is above that of a shorter context by the threshold."""
    perplexity = np.exp(losses.mean()[: losses.contexts.index(recl) + 1])
    return bool(perplexity[-1] >= perplexity.min() * (1 + threshold))


RISES = (
    "  *: the model loses more with this context than with a shorter one. RECL takes the better of"
    " two losses\n     at each token, so losses that fluctuate from length to length count as gain"
)


def table(result: dict[str, Any]) -> str:
    """The paper's table 8 of these models: a row for each, a column for each r, group by group."""
    width = max(len("Model"), *(len(m["name"]) for m in result["models"]))
    shares = [s["r"] for s in result["models"][0]["shares"]]
    lines = [
        f"relative effective context length in tokens ({result['targets']:,} targets of"
        f" {_text(result)}; {result['kind']}, stride {result['stride']};"
        f" gains of at least {result['threshold']:.2g} count):",
        f"  {'Model':<{width}}" + "".join(f"{f'r = {r} ':>18}" for r in shares).rstrip(),
    ]
    group = None
    for m in result["models"]:
        if m["group"] != group:
            group = m["group"]
            lines += [f"  -- {group}"] if group else []
        cells = [f"{_cell(s):>18}" for s in m["shares"]]
        lines.append(f"  {m['name']:<{width}}" + "".join(cells).rstrip())
    return "\n".join([*lines, RISES] if "*" in "".join(lines) else lines)


def _cell(share: dict[str, Any]) -> str:
    at_least, mark = "at least " * share["at_least"], "*" if share["loss_rises"] else " "
    return f"{at_least}{share['recl']:,}{mark}"


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "group": m["group"],
            "model": m["name"],
            "r": s["r"],
            "recl": s["recl"],
            "at_least": s["at_least"],
            "loss_rises": s["loss_rises"],
            "kind": result["kind"],
            "stride": result["stride"],
            "targets": result["targets"],
        }
        for m in result["models"]
        for s in m["shares"]
    ]


def _gain_rows(found: dict[str, dict[float, list[Gains]]]) -> list[dict[str, Any]]:
    return [
        {
            "group": group,
            "model": of_model.name,
            "r": r,
            "c": c,
            "c_new": c_new,
            "gain_in_perplexity": of_model.absolute[i, j],
            "relative_gain": of_model.relative[i, j],
        }
        for group, shares in found.items()
        for r, of_group in shares.items()
        for of_model in of_group
        for i, c in enumerate(of_model.contexts)
        for j, c_new in enumerate(of_model.contexts)
        if j > i
    ]


def _text(result: dict[str, Any]) -> str:
    return f"{result.get('label', 'recorded losses')}, {result['split']} split"
