"""Measures the largest distance at which a model finds an answer (``--mode=probe``).

data/sources/probe.py draws the texts. A text is a series of episodes. An episode is a symbol, then
noise, then the same symbol again as the answer. To measure a distance, texts are drawn whose last
episode has this distance. The answer of this episode is the last target of a segment. The earlier
episodes fill the memory.

Each layer attends to states of the layer below, which depend on still earlier tokens. The reach is
therefore O(L x M), layers times memory (paper, section 3.2). Without a window, a query attends to M
positions before its *segment*. With L = 2 and M = T = 3, the last target has the reach T + LM = 9:

    segment       0 0 0 | 1 1 1 | 2 2 2 | target
    layer 2                 x x x   x x x           the query attends to memory and segment
    layer 1         x x x   x x x                   the oldest state attends to an earlier segment
    distance      9 8 7   6 5 4   3 2 1   0
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.analysis.results import AnalysisError, describe_model, new_figure, write_results
from txl_jax.checkpoint.trained_model import TrainedModel, memory_shapes
from txl_jax.config import ProbeTextConfig, TransformerXLConfig
from txl_jax.data.sources.probe import alphabet, draw, episodes
from txl_jax.model import self_check
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.parallel.device_memory import Checked, Work, check_arrays

BATCH_SIZE = 100
MAX_DISTANCES = 512
_WORK = Work.sized_by("the probe", "probe.mem_lens", "probe.answers", "probe.distances")


def run(trained: TrainedModel, workdir: str) -> str:
    """Writes the accuracy by distance and memory length as ``probe*``. Returns the last line."""
    check(trained)
    c, t = trained.config, trained.config.train
    found = []
    for mem_len in memory_lengths(trained):
        window = trained.model.cfg.same_length if mem_len else False  # a window needs a memory
        model = TransformerXL(dataclasses.replace(trained.model.cfg, same_length=window))
        measured = measured_reach(model, trained.params, t.seg_len, mem_len)
        possible = reach(model.cfg, t.seg_len, mem_len)
        rows = [score_distance(trained, model, mem_len, d) for d in c.probe.distances]
        found.append(({"mem_len": mem_len, "reach": possible, "measured": measured}, rows))
    result = {
        "model": describe_model(trained),
        "text": dataclasses.asdict(c.data.probe),
        "seg_len": t.seg_len,
        "n_layer": c.model.n_layer,
        "trained_mem_len": t.mem_len,
        "trained_reach": reach(c.model, t.seg_len, t.mem_len),
        "chance": 1 / c.data.probe.symbols,
        "scored": "the last target of a segment",
        "reaches": [reached for reached, _ in found],
        "rows": [row for _, rows in found for row in rows],
    }
    figure = lambda: figure_of(result, found)
    files = {"probe.json": result, "probe.csv": result["rows"], "probe": figure}
    parts = []  # per memory length, the distances before the first accuracy below 0.9
    for reached, rows in found:
        right = itertools.takewhile(lambda row: row["accuracy"] >= 0.9, rows)
        *_, farthest = ["none", *(f"to {row['distance']} tokens" for row in right)]
        parts.append(f"memory {reached['mem_len']}: {farthest} (reach {reached['reach']})")
    last = f"answers found 9 times in 10, {'; '.join(parts)}; chance {result['chance']:.3f}"
    return write_results(workdir, last, files)


def check(trained: TrainedModel) -> None:
    """Raises AnalysisError if the probe does not fit the text or the memory of the model."""
    c = trained.config
    if c.data.name != "probe":
        raise AnalysisError(
            f"probe: the model was trained on data.name={c.data.name!r}, whose vocabulary"
            " is not the probe's; train a model with the config probe"
        )
    missing = sorted(set(alphabet(c.data.probe)) - set(trained.vocab.symbols))
    if missing:
        raise AnalysisError(
            f"probe: the model's vocabulary lacks {' '.join(missing)}; use the data.probe"
            " settings of training"
        )
    if c.model.memory_free and any(c.probe.mem_lens):
        raise AnalysisError(
            f"config key probe.mem_lens = {c.probe.mem_lens}: attention"
            f" {c.model.attention!r} has no memory; give 0 alone"
        )
    check_probe_memory(trained)


def check_probe_memory(trained: TrainedModel) -> None:
    """Raises ConfigError if the probe's tokens and memory exceed the memory of the device."""
    c, mem_len = trained.config.probe, max(memory_lengths(trained))
    size = trained.config.train.seg_len + mem_len + c.distances[-1]
    tokens = jax.ShapeDtypeStruct((c.answers, size), jnp.int32)
    mems = memory_shapes(trained.config.model, min(BATCH_SIZE, c.answers), mem_len)
    check_arrays(_WORK, (tokens, mems))


def memory_lengths(trained: TrainedModel) -> tuple[int, ...]:
    """Returns the memory lengths of the config, or 0 and the memory length of training."""
    c = trained.config
    return c.probe.mem_lens or tuple(sorted({0, c.train.mem_len}))


def score_distance(
    trained: TrainedModel, model: TransformerXL, mem_len: int, distance: int
) -> dict[str, Any]:
    """Returns a model's accuracy and mean loss on answers at a distance.

    The accuracy is the share of answers to which the model gives the largest probability.
    """
    c, seg_len = trained.config, trained.config.train.seg_len
    rng = np.random.default_rng([c.probe.seed, distance])
    min_before = seg_len + max(memory_lengths(trained))
    texts = draw_texts(c.data.probe, rng, distance, c.probe.answers, seg_len, min_before)
    tokens = np.stack([trained.vocab.encode(text) for text in texts]).astype(np.int32)
    size = min(BATCH_SIZE, len(tokens))
    padded = np.concatenate([tokens, tokens[: -len(tokens) % size]])
    batches = [
        last_logits(model, trained.params, batch[:, :-1], seg_len, mem_len)
        for batch in np.split(padded, len(padded) // size)
    ]
    logits, answers = np.concatenate(batches)[: len(tokens)], tokens[:, -1]
    losses = -jax.nn.log_softmax(jnp.asarray(logits))[np.arange(len(answers)), answers]
    accuracy = float(np.mean(logits.argmax(axis=-1) == answers))
    scored = {"mem_len": mem_len, "distance": distance, "accuracy": accuracy}
    return scored | {"loss_nats": float(np.mean(np.asarray(losses))), "answers": len(answers)}


def draw_texts(
    c: ProbeTextConfig, rng: Any, distance: int, count: int, seg_len: int, min_before: int
) -> list[str]:
    """Draws ``count`` texts that end with an episode of this distance.

    A text has a multiple of T tokens, and one more as the last target. At least ``min_before``
    tokens of other episodes come first. The first episode is truncated.
    """
    size = -(-(min_before + distance + 1) // seg_len) * seg_len + 1
    n_before, texts = size - (distance + 2), []
    for _ in range(count):
        before = draw(c, rng, n_before + c.longest + 2)
        texts.append(before[len(before) - n_before :] + episodes(c, rng, np.array([distance])))
    return texts


def last_logits(
    model: TransformerXL, params: Any, tokens: np.ndarray, seg_len: int, mem_len: int
) -> np.ndarray:
    """Returns the logits [B,V] after ``tokens``, int32 [B,S], where S is a multiple of T."""
    self_check.check_on_one_device(model.cfg, len(tokens), seg_len, mem_len)
    mems = model.init_mems(len(tokens), mem_len)
    for start in range(0, tokens.shape[1], seg_len):
        logits, mems = _segment(model)(params, tokens[:, start : start + seg_len], mems)
    return np.asarray(logits)


@functools.lru_cache(maxsize=8)
def _segment(model: TransformerXL) -> Checked:
    def read(params: Any, tokens: jax.Array, mems: Any):
        logits, mems = model.apply({"params": params}, tokens, mems)
        return logits[:, -1], mems

    return Checked(jax.jit(read), _WORK)


def reach(c: TransformerXLConfig, seg_len: int, mem_len: int) -> int:
    """Returns the largest distance at which a token can change a segment's last prediction.

    Distances are counted back from the target, so the last input is at distance 1. The result is
    exact if the text is long enough.
    """
    if c.same_length:
        per_layer = mem_len - 1 if c.same_length == "pytorch" else mem_len
        return 1 + c.n_layer * min(per_layer, mem_len)
    first = seg_len - 1  # the oldest visible position, counted from the segment's start
    for _ in range(c.n_layer):
        first = first // seg_len * seg_len - mem_len  # memory reaches M before its segment
    return seg_len - first


def changes_prediction(
    model: TransformerXL, params: Any, seg_len: int, mem_len: int, distances: np.ndarray
) -> np.ndarray:
    """Tests whether a change of the token at each distance changes the last prediction: bool [R].

    ``distances`` are int [R], from 1, counted back from the target. In each of four random texts,
    one token is replaced, and all bits of the last logits are compared. True proves an influence.
    False can mean that rounding removes a small influence.
    """
    rng = np.random.default_rng(0)
    n_rows, vocab_size = len(distances), model.cfg.vocab_size
    assert vocab_size is not None
    length = -(-int(max(distances)) // seg_len) * seg_len + seg_len
    changed = np.zeros(n_rows, bool)
    for _ in range(4):
        text = np.tile(rng.integers(vocab_size, size=length, dtype=np.int32), (n_rows, 1))
        other = text.copy()
        index = np.arange(n_rows), length - np.asarray(distances)
        other[index] = (text[index] + rng.integers(1, vocab_size, size=n_rows)) % vocab_size
        before, after = (last_logits(model, params, x, seg_len, mem_len) for x in (text, other))
        changed |= (before != after).any(axis=-1)
    return changed


def measured_reach(model: TransformerXL, params: Any, seg_len: int, mem_len: int) -> int:
    """Returns the largest tested distance at which another token changes the last prediction.

    Distances up to T beyond :func:`reach` are tested, but not all of them if they are many.
    """
    limit = reach(model.cfg, seg_len, mem_len)
    count = min(MAX_DISTANCES, limit + seg_len)
    spread = np.linspace(1, limit + seg_len, count).round().astype(int)
    distances = np.union1d(spread, [limit, limit + 1])
    changed = changes_prediction(model, params, seg_len, mem_len, distances)
    return int(max(distances[changed], default=0))


def figure_of(result: dict[str, Any], found: list[tuple[dict[str, Any], list[dict[str, Any]]]]):
    """Plots accuracy over distance for each memory length. Dotted lines show possible reaches."""
    figure, text, trained = new_figure(9, 6), result["text"], result["trained_mem_len"]
    axes = figure.add_subplot(xlabel="distance from the answer to the repeated symbol (tokens)")
    for i, (entry, rows) in enumerate(found):
        mem_len = entry["mem_len"]
        label = f"memory {mem_len}" + ("" if mem_len == trained else f" (trained with {trained})")
        label += f": reach {entry['reach']}, measured {entry['measured']}"
        values = [row["distance"] for row in rows], [row["accuracy"] for row in rows]
        axes.plot(*values, marker="o", color=f"C{i}", label=label)
        axes.axvline(entry["reach"], color=f"C{i}", ls=":", lw=1)
    axes.axhline(result["chance"], color="0.3", lw=1, label=f"chance, 1/{text['symbols']}")
    axes.set(ylim=(0, 1.05), ylabel=f"accuracy of {result['rows'][0]['answers']} answers")
    axes.set_xscale("log", base=2)
    ticks = sorted({row["distance"] for row in result["rows"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    figure.legend(loc="outside lower center", ncols=2)
    axes.set_title(
        f"Long-range probe of {result['model']}\non its own text: answers of {text['symbols']}"
        f" symbols, {text['shortest']} to {text['longest']} tokens back"
    )
    return figure
