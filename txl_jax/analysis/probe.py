"""``--mode=probe``: how far back a model finds an answer, and how far it could.

The text is that of data/sources/probe.py. At each distance episodes are drawn whose answer is the
last target of a segment, after other episodes that fill the memory. What the shapes allow is
analysis/reach.py's.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.analysis.pictures import described, new_figure, save
from txl_jax.analysis.reach import last_logits, measured_reach, reach
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir_files import check_outputs, print_on_error
from txl_jax.config import ProbeTextConfig
from txl_jax.data.sources.probe import alphabet, draw, episodes
from txl_jax.evaluation.errors import AnalysisError
from txl_jax.files import write_csv, write_json
from txl_jax.model.footprint import Need, of_reading
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import check_memory

ROWS_AT_A_TIME = 100


def run(trained: TrainedModel, workdir: str) -> str:
    """Accuracy at each distance and memory length, as ``probe.json``, ``.csv`` and pictures.

    Raises:
      AnalysisError: the model was not trained on the probe's text, or cannot have that memory.
    """
    check(trained)
    check_size(trained)
    check_outputs(workdir, "probe")
    c, t = trained.config, trained.config.train
    rows, reaches = [], []
    for mem_len in memory_lengths(trained):
        model = with_memory(trained.model, mem_len)
        reaches.append(
            {
                "mem_len": mem_len,
                "reach": reach(model.cfg, t.seg_len, mem_len),
                "measured": measured_reach(model, trained.params, t.seg_len, mem_len),
            }
        )
        rows += [scored(trained, model, mem_len, d) for d in c.probe.distances]
    result = {
        "model": described(trained),
        "text": dataclasses.asdict(c.data.probe),
        "seg_len": t.seg_len,
        "n_layer": c.model.n_layer,
        "trained_mem_len": t.mem_len,
        "trained_reach": reach(c.model, t.seg_len, t.mem_len),
        "chance": 1 / c.data.probe.symbols,
        "scored": "the last target of a segment",
        "reaches": reaches,
        "rows": rows,
    }
    last = _last_line(result)
    with print_on_error(last):
        write_json(os.path.join(workdir, "probe.json"), result)
        write_csv(os.path.join(workdir, "probe.csv"), rows)
        save(picture(result), workdir, "probe")
    return last


def check(trained: TrainedModel) -> None:
    """Raises AnalysisError where the model cannot be asked."""
    c = trained.config
    if c.data.name != "probe":
        raise AnalysisError(
            f"--mode=probe: the model was trained on data.name={c.data.name!r}, whose vocabulary"
            " is not the probe's; train one with --config=configs/probe.py"
        )
    lacking = sorted(set(alphabet(c.data.probe)) - set(trained.vocab.symbols))
    if lacking:
        raise AnalysisError(
            f"--mode=probe: the model's vocabulary is not that of data.probe, it lacks"
            f" {' '.join(lacking)}; leave data.probe as it was in training"
        )
    for mem_len in c.probe.mem_lens:
        if mem_len and c.model.memory_free:
            raise AnalysisError(
                f"config key probe.mem_lens = {c.probe.mem_lens}: attention"
                f" {c.model.attention!r} has no memory; only 0 can be asked"
            )


def check_size(trained: TrainedModel) -> None:
    """Raises ConfigError where the texts, or the memory of their rows, do not fit the memory."""
    exp, c, t = trained.config, trained.config.probe, trained.config.train
    mem_len, rows = max(memory_lengths(trained)), min(ROWS_AT_A_TIME, c.answers)
    size = t.seg_len + mem_len + c.distances[-1]
    keys = ("probe.mem_lens", "probe.answers", "probe.distances")
    texts = Need("the texts that are asked", 5 * c.answers * size, keys)  # and their int32 tokens
    needs = of_reading(exp.model, rows, t.seg_len, mem_len, keys)
    check_memory("the probe", [*needs, texts], exp)


def memory_lengths(trained: TrainedModel) -> tuple[int, ...]:
    """The memory lengths that are asked for: those of the config, else 0 and that of training."""
    c = trained.config
    return c.probe.mem_lens or tuple(sorted({0, c.train.mem_len}))


def with_memory(model: TransformerXL, mem_len: int) -> TransformerXL:
    """The model; with M = 0 without its window, which would leave nothing to see."""
    window = model.cfg.same_length if mem_len else False
    return TransformerXL(dataclasses.replace(model.cfg, same_length=window))


def scored(
    trained: TrainedModel, model: TransformerXL, mem_len: int, distance: int
) -> dict[str, Any]:
    """Accuracy (the likeliest of all symbols is the answer) and mean loss at one distance."""
    c = trained.config
    rng = np.random.default_rng([c.probe.seed, distance])
    before = c.train.seg_len + max(memory_lengths(trained))
    texts = asked(c.data.probe, rng, distance, c.probe.answers, c.train.seg_len, before)
    tokens = np.stack([trained.vocab.encode(text) for text in texts]).astype(np.int32)
    pad = -len(tokens) % min(ROWS_AT_A_TIME, len(tokens))
    padded = np.concatenate([tokens, tokens[:pad]])
    parts = [
        last_logits(model, trained.params, part[:, :-1], c.train.seg_len, mem_len)
        for part in np.split(padded, len(padded) // min(ROWS_AT_A_TIME, len(tokens)))
    ]
    logits, answers = np.concatenate(parts)[: len(tokens)], tokens[:, -1]
    losses = -jax.nn.log_softmax(jnp.asarray(logits))[np.arange(len(answers)), answers]
    return {
        "mem_len": mem_len,
        "distance": distance,
        "accuracy": float(np.mean(logits.argmax(axis=-1) == answers)),
        "loss_nats": float(np.mean(np.asarray(losses))),
        "answers": len(answers),
    }


def asked(
    c: ProbeTextConfig,
    rng: np.random.Generator,
    distance: int,
    answers: int,
    seg_len: int,
    before: int,
) -> list[str]:
    """Texts that end with an episode of that distance, all of a multiple of T tokens and one.

    So the answer is the last target of a segment. At least ``before`` tokens of other episodes,
    with the distances of training, stand before it, the first of them cut.
    """
    size = -(-(before + distance + 1) // seg_len) * seg_len + 1
    filled = size - (distance + 2)
    texts = []
    for _ in range(answers):
        other = draw(c, rng, filled + c.longest + 2)
        texts.append(other[len(other) - filled :] + episodes(c, rng, np.array([distance])))
    return texts


def picture(result: dict[str, Any]) -> Any:
    """Accuracy over distance, a line for each memory length; below it, how far they reach."""
    figure = new_figure(9, 6.5)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    _accuracies(top, result)
    _reaches(below, result)
    _lengths(top, below, result)
    figure.suptitle(
        f"Long-range probe of {result['model']}\non its own text: {_of(result['text'])}"
    )
    return figure


def _accuracies(axes, result: dict[str, Any]) -> None:
    for number, one in enumerate(result["reaches"]):
        rows = [row for row in result["rows"] if row["mem_len"] == one["mem_len"]]
        distances, values = zip(*[(row["distance"], row["accuracy"]) for row in rows], strict=True)
        axes.plot(  # those drawn later have smaller marks: where lines meet all are seen
            distances,
            values,
            marker="o",
            markersize=max(9 - 2.5 * number, 3),
            label=_name(one["mem_len"], result),
        )
    chance = result["chance"]
    axes.axhline(chance, color="0.3", lw=1, label=f"chance, 1/{result['text']['symbols']}")
    axes.set(ylim=(0, 1.05), ylabel=f"accuracy of {rows[0]['answers']} answers")
    axes.legend(loc="center left")


def _reaches(axes, result: dict[str, Any]) -> None:
    """A bar to where changing a token was seen to change the prediction, a mark where it can."""
    names = [f"memory {one['mem_len']}" for one in result["reaches"]]
    colors = [f"C{number}" for number in range(len(names))]
    axes.barh(
        names, [one["measured"] for one in result["reaches"]], color=colors, height=0.6, alpha=0.5
    )
    axes.set_ylim(-0.6, len(names) - 0.4)
    ends = [one["reach"] for one in result["reaches"]]
    axes.plot(ends, names, ls="", marker="|", markersize=16, mew=2, color="k", clip_on=False)
    for name, one in zip(names, result["reaches"], strict=True):
        text = f" {one['measured']} seen, {one['reach']} possible"
        axes.annotate(
            text,
            (one["reach"], name),
            xytext=(6, 0),
            va="center",
            textcoords="offset points",
            fontsize=8,
        )
    axes.invert_yaxis()
    axes.set_title("reach: a changed token changes the prediction", fontsize=9, loc="left")
    axes.set_xlabel("distance from the answer back to what it repeats (tokens)")


def _lengths(top, below, result: dict[str, Any]) -> None:
    """The scale, and upright lines at T, T+M and the reach of the training memory."""
    t, m, n_layer = (result[key] for key in ("seg_len", "trained_mem_len", "n_layer"))
    lines = {f"T = {t}": t}
    if m:
        lines[f"T + M = {t + m}"] = t + m
        lines[f"{n_layer} layers: {result['trained_reach']}"] = result["trained_reach"]
    for text, at in lines.items():
        for axes in (top, below):
            axes.axvline(at, color="0.5", ls=":", lw=1)
        top.annotate(text, (at, 1.01), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    distances = [row["distance"] for row in result["rows"]]
    last = max(*distances, *(one["reach"] for one in result["reaches"]))
    below.set_xscale("log", base=2)
    below.set_xlim(min(distances) * 0.9, last * 2.2)
    ticks = [2**n for n in range(1, last.bit_length()) if 2**n >= min(distances)]
    below.set_xticks(ticks, [str(tick) for tick in ticks])


def _name(mem_len: int, result: dict[str, Any]) -> str:
    trained = result["trained_mem_len"]
    return f"memory {mem_len}" + ("" if mem_len == trained else f" (trained with {trained})")


def _of(text: dict[str, Any]) -> str:
    return (
        f"answers of {text['symbols']} symbols, {text['shortest']} to {text['longest']} tokens back"
    )


def _last_line(result: dict[str, Any]) -> str:
    """The longest distance, without one missed before it, that is answered, for each memory."""
    parts = []
    for one in result["reaches"]:
        rows = [row for row in result["rows"] if row["mem_len"] == one["mem_len"]]
        missed = [row["accuracy"] < 0.9 for row in rows]
        upto = rows[missed.index(True) - 1 if True in missed else -1]["distance"]
        found = "none" if missed[0] else f"to {upto} tokens"
        parts.append(f"memory {one['mem_len']}: {found} (reach {one['reach']})")
    return f"answers found 9 times in 10, {'; '.join(parts)}; chance {result['chance']:.3f}"
