"""Reports the RECL of groups of models as in the paper's table 8, and their gains as heat maps.

The losses of each model are computed on the same targets at the same lengths (context.py). Losses
that another program or ``--mode=context`` recorded are given as ``NAME=FILE.npz``
(:meth:`txl_jax.analysis.recl.Losses.save`).
"""

import dataclasses
import hashlib
import itertools
import json
import re
from typing import Any

import numpy as np

from txl_jax.analysis import context, results
from txl_jax.analysis.recl import Gains, Losses, gains
from txl_jax.analysis.results import AnalysisError, new_figure, show_share
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.workdir import read_experiment, read_vocab
from txl_jax.checkpoint.workdir_files import CONFIG, check_unused, register_outputs
from txl_jax.config import ContextConfig, DataConfig, ExperimentConfig
from txl_jax.data.corpus import corpus_from_config
from txl_jax.data.pieces import running_text
from txl_jax.data.vocab import Vocab
from txl_jax.evaluation.evaluator import segment_bar
from txl_jax.evaluation.split import corpus_record
from txl_jax.model.precision import arithmetic_record
from txl_jax.paths import path


@dataclasses.dataclass(frozen=True)
class Member:
    """A model of a group, with its name and the path of a workdir or of a file with losses."""

    group: str
    name: str
    path: str

    @property
    def recorded(self) -> bool:
        """Tells whether the losses of this model come from a file."""
        return self.path.endswith(".npz")

    @property
    def label(self) -> str:
        """The label ``GROUP:NAME``, or only the name if the model has no group."""
        return f"{self.group}:{self.name}" if self.group else self.name

    def __str__(self) -> str:
        return f"{self.label} ({self.path})"


def run(exp: ExperimentConfig, workdir: str) -> str:
    """Measures all models, prints the table, and writes ``recl*``. Returns the last line to print.

    Raises AnalysisError if models are missing or malformed, or cannot be compared.
    """
    c = dataclasses.replace(exp.context, lengths=context_lengths(exp))
    members = parse_models(exp.recl.models)
    check_unused(workdir, "recl")
    losses, measured, about = _collect_losses(members, c, exp, workdir)
    groups: dict[str, list[Losses]] = {}
    for member in members:
        groups.setdefault(member.group, []).append(losses[member])
    group_gains = {
        group: {r: gains(models, r) for r in exp.recl.shares} for group, models in groups.items()
    }
    models = [
        {
            **dataclasses.asdict(m),
            **measured.get(m, {"step": None}),
            "loss": losses[m].mean().tolist(),
            "shares": _shares(losses[m], group_gains[m.group], exp.recl.threshold),
        }
        for m in members
    ]
    protocol = {"kind": c.kind, "stride": c.stride, "targets": losses[members[0]].nll.shape[1]}
    result = {
        **about,
        "split": c.split,
        **protocol,
        "first_target": c.lengths[-1],
        "lengths": list(c.lengths),
        "threshold": exp.recl.threshold,
        "models": models,
    }
    print(table(result), flush=True)
    last = f"RECL of {len(members)} models from contexts up to {c.lengths[-1]:,} tokens"
    subtitle = f"{_text(result)}, {c.kind}, stride {c.stride}"
    columns = ("r", "recl", "at_least", "loss_rises")
    files = {
        "recl.json": result,
        "recl.csv": [
            {"group": m["group"], "model": m["name"], **{k: s[k] for k in columns}, **protocol}
            for m in models
            for s in m["shares"]
        ],
        "recl_gains.csv": _gain_rows(group_gains),
        "recl": lambda: _heat_maps(group_gains, subtitle),
        "recl_loss": lambda: _curves(groups, subtitle, c),
    }
    return results.write_results(workdir, last, files)


def context_lengths(exp: ExperimentConfig) -> tuple[int, ...]:
    """Returns the context lengths, or raises AnalysisError if there are fewer than two."""
    c, stride = exp.recl, exp.context.stride
    lengths = tuple(range(c.first, c.longest + 1, c.delta))
    if len(lengths) < 2:
        raise AnalysisError(
            f"recl.first={c.first}, recl.delta={c.delta} and recl.longest={c.longest} give"
            f" {len(lengths)} context lengths, but two or more are needed"
        )
    if exp.context.kind == "window" and stride > c.delta:
        raise AnalysisError(
            f"context.stride={stride}: must be at most recl.delta={c.delta}, since a target sees up"
            " to stride - 1 tokens more than its context length"
        )
    return lengths


def parse_models(models: tuple[str, ...]) -> list[Member]:
    """Parses ``recl.models`` in the given order. Raises AnalysisError for malformed entries."""
    form = "give NAME=WORKDIR or NAME=FILE.npz, and GROUP:NAME=… for several groups"
    if not models:
        raise AnalysisError(f"recl.models is empty; {form}, separated by commas")
    members: list[Member] = []
    for text in models:
        match = re.fullmatch(r"(?:([\w.+-]+):)?([\w.+-]+)=(.+)", text)
        if not match:
            raise AnalysisError(f"recl.models has {text!r}; {form}")
        member = Member(match[1] or "", match[2], match[3])
        if any(member.label == other.label for other in members):
            raise AnalysisError(f"recl.models has two models with the name {member.label}")
        if not path(member.path if member.recorded else f"{member.path}/{CONFIG}").exists():
            what = "there is no such file" if member.recorded else f"the folder has no {CONFIG}"
            raise AnalysisError(f"recl.models has {text!r}: {what}")
        members.append(member)
    return members


def _collect_losses(
    members: list[Member], c: ContextConfig, exp: ExperimentConfig, workdir: str
) -> tuple[dict[Member, Losses], dict[Member, dict[str, Any]], dict[str, Any]]:
    """Checks the models. Returns their losses, steps and arithmetic, and the corpus's record."""
    data = None if exp.data == DataConfig() else exp.data
    own = [m for m in members if not m.recorded]
    vocabs = {m: read_vocab(m.path) for m in own}
    kinds = {m: f"kind {v.kind}, sha256 {_hash(sorted(v.symbols))}" for m, v in vocabs.items()}
    _check_equal(kinds, "have different vocabularies, so they cannot be compared")
    losses = {m: _read_recorded(m, c) for m in members if m.recorded}
    targets = {m: (found.nll.shape[1], found.targets) for m, found in losses.items()}
    targets |= {m: _targets(m, vocabs[m], c, data) for m in own}
    counts = {m: f"{count:,} targets" for m, (count, _) in targets.items()}
    _check_equal(
        counts, "have different targets; check context.max_tokens, context.split and recl.longest"
    )
    hashes = {m: symbols for m, (_, symbols) in targets.items()}
    fix = "choose the same text for all models with data.name and data.path"
    _check_equal(hashes, f"do not predict the same text: their targets' symbols differ; {fix}")
    register_outputs(workdir, "recl")
    measured, text = dict[Member, dict[str, Any]](), dict[str, Any]()
    for m in own:
        trained = load(m.path)
        corpus = corpus_from_config(data or trained.config.data, trained.vocab)
        with segment_bar(f"{m.label}, contexts up to {c.lengths[-1]}") as progress:
            losses[m] = context.measure(trained, corpus, c, m.name, progress)
        arithmetic = arithmetic_record(trained.config.model, None)
        measured[m], text = {"step": trained.step, **arithmetic}, corpus_record(corpus)
    return losses, measured, text


def _check_equal(values: dict[Member, str], problem: str) -> None:
    """Raises AnalysisError if two models have different values. Empty values are ignored."""
    known = [(member, value) for member, value in values.items() if value]
    for (first, expected), (member, value) in itertools.pairwise(known):
        if value != expected:
            raise AnalysisError(f"{member} and {first} {problem} ({value} and {expected})")


def _hash(symbols: list[str]) -> str:
    return hashlib.sha256(json.dumps(symbols).encode()).hexdigest()


def _targets(
    member: Member, vocab: Vocab, c: ContextConfig, data: DataConfig | None
) -> tuple[int, str]:
    """Returns the number of a model's targets and their hash, without loading parameters."""
    exp = read_experiment(member.path)
    tokens = running_text(getattr(corpus_from_config(data or exp.data, vocab), c.split))
    try:
        context.check(exp.model, tokens, c)
    except AnalysisError as error:
        raise AnalysisError(f"{member}: {error}") from error
    targets = tokens[context.target_slice(tokens, c)]
    return len(targets), context.targets_hash(vocab, targets)


def _read_recorded(member: Member, c: ContextConfig) -> Losses:
    """Reads the losses at the given lengths from a file, and gives them the member's name."""
    losses = Losses.load(member.path)
    missing = [n for n in c.lengths if n not in losses.contexts]
    if missing:
        raise AnalysisError(
            f"{member.path}: has no losses at contexts {missing}, only at {list(losses.contexts)};"
            " set recl.first, recl.delta and recl.longest to lengths that all models have"
        )
    rows = [losses.contexts.index(n) for n in c.lengths]
    return Losses(member.name, c.lengths, losses.nll[rows], losses.targets)


def _shares(
    losses: Losses, group: dict[float, list[Gains]], threshold: float
) -> list[dict[str, Any]]:
    """Returns the RECL and the gains of one model for each share r."""
    perplexity, shares = np.exp(losses.mean()), []
    for r, models in group.items():
        own = next(model for model in models if model.name == losses.name)
        recl = own.recl(threshold)
        until = perplexity[: losses.contexts.index(recl) + 1]
        share = {"r": r, "recl": recl, "at_least": recl == losses.contexts[-1]}
        share |= {"loss_rises": bool(until[-1] >= until.min() * (1 + threshold))}
        share |= {"gain_in_perplexity": own.absolute.tolist()}
        shares.append(share | {"relative_gain": own.relative.tolist()})
    return shares


LOSS_RISES = (
    "  *: the model's loss is higher with this context than with a shorter one. RECL takes the"
    " smaller of two\n     losses at each token, so losses that vary with the length count as gains"
)


def table(result: dict[str, Any]) -> str:
    """Formats the paper's table 8, with a row for each model of a group and a column for each r."""
    width = max(len("Model"), *(len(m["name"]) for m in result["models"]))
    columns = [f"{'r = ' + str(s['r']) + ' ':>18}" for s in result["models"][0]["shares"]]
    lines = [
        f"relative effective context length in tokens ({_text(result)}; {result['kind']}, stride"
        f" {result['stride']}; gains of at least {result['threshold']:.2g} count):",
        f"  {'Model':<{width}}" + "".join(columns).rstrip(),
    ]
    for group, models in itertools.groupby(result["models"], lambda m: m["group"]):
        lines += [f"  -- {group}"] if group else []
        for m in models:
            cells = [
                f"{'at least ' * s['at_least']}{s['recl']:,}{'*' if s['loss_rises'] else ' '}"
                for s in m["shares"]
            ]
            row = f"  {m['name']:<{width}}" + "".join(f"{cell:>18}" for cell in cells)
            lines.append(row.rstrip())
    return "\n".join([*lines, LOSS_RISES] if "*" in "".join(lines) else lines)


def _gain_rows(group_gains: dict[str, dict[float, list[Gains]]]) -> list[dict[str, Any]]:
    return [
        {
            **{"group": group, "model": m.name, "r": r, "c": m.contexts[i], "c_new": m.contexts[j]},
            "gain_in_perplexity": m.absolute[i, j],
            "relative_gain": m.relative[i, j],
        }
        for group, shares in group_gains.items()
        for r, models in shares.items()
        for m in models
        for i, j in itertools.combinations(range(len(m.contexts)), 2)
    ]


def _text(result: dict[str, Any]) -> str:
    label = result.get("label", "recorded losses")
    return f"{result['targets']:,} targets of {label}, {result['split']} split"


def _heat_maps(group_gains: dict[str, dict[float, list[Gains]]], subtitle: str):
    """Draws a heat map of each model's gains when the context grows from length c to c' > c.

    Rows are models. A column has one share r of hard tokens and one colour scale.
    """
    counts = [len(next(iter(shares.values()))) for shares in group_gains.values()]
    n_shares = len(next(iter(group_gains.values())))
    heights = [2.4 * count + 1.7 for count in counts]
    figure = new_figure(1 + 3.3 * n_shares, sum(heights))
    panels = figure.subfigures(len(group_gains), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, (group, shares), count in zip(panels, group_gains.items(), counts, strict=True):
        title = ": ".join(filter(None, ("Gain from longer contexts", group)))
        panel.suptitle(f"{title}\n{subtitle}", fontsize=10)
        grid = panel.subplots(count, n_shares, squeeze=False, sharex=True, sharey=True)
        for column, (r, models) in zip(grid.T, shares.items(), strict=True):
            largest = max(np.triu(model.absolute, 1).max() for model in models)
            for axes, model in zip(column, models, strict=True):
                image = _heat_map(axes, model, largest or 1.0)
                axes.set_title(f"{model.name}, r = {r}", fontsize=9)
            column[-1].set_xlabel("longer context c' (tokens)", fontsize=8)
            size = {"fraction": 0.1 / count, "pad": 0.04 / count, "aspect": 25}
            label = "exp f(c,c) - exp f(c,c') (perplexity per token)"
            panel.colorbar(image, ax=list(column), location="bottom", label=label, **size)
        for axes in grid[:, 0]:
            axes.set_ylabel("context c (tokens)", fontsize=8)
    return figure


def _heat_map(axes, model: Gains, largest: float):
    n = len(model.contexts)
    ticks = range(0, n, -(-n // 10))
    labels = [model.contexts[i] for i in ticks]
    axes.set_xticks(ticks, labels, rotation=90, fontsize=7)
    axes.set_yticks(ticks, labels, fontsize=7)
    values = np.ma.masked_where(np.tri(n, dtype=bool), model.absolute)
    return axes.imshow(values, vmin=0, vmax=largest, aspect="auto")


def _curves(groups: dict[str, list[Losses]], subtitle: str, c: ContextConfig):
    """Plots perplexity over context length, with a panel for each group."""
    figure = new_figure(6 * len(groups) + 2, 5)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (group, models) in zip(panels, groups.items(), strict=True):
        for losses in models:
            axes.plot(losses.contexts, np.exp(losses.mean()), marker="o", label=losses.name)
        context.set_length_axis(axes, c)
        show_share(axes)
        axes.set(ylabel="perplexity per token", title=group)
        axes.legend()
    figure.suptitle(f"Perplexity by context length\n{subtitle}", fontsize=10)
    return figure
