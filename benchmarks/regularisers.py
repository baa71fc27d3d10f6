"""Measures how each kind of regularisation changes the loss of a small model on little text.

    python -m benchmarks.regularisers --data=FOLDER --out=DIR [--tokens=100000] [--seeds=3]

FOLDER has ptb.train.txt, ptb.valid.txt, ptb.test.txt; of the training text, only the first lines
are used. A token is a character, because a hundred thousand words are too few to learn from. Each
model differs from a plain model by one entry of CHANGES. Its validation loss for each seed is
compared with that of the plain model with the same seed. The model is much smaller than
that of the recipe for Penn Treebank, so the results show whether a regulariser has an effect, but
not its gain at 24M parameters. The test split is used only for the vocabulary; it is not scored.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import time
from typing import Any

from benchmarks.interleaved import machine
from txl_jax.checkpoint.workdir import with_vocab
from txl_jax.config import ExperimentConfig, override
from txl_jax.data.corpus import Corpus, corpus_from_config
from txl_jax.training.loop import train
from txl_jax.training.plan import build_plan, locked_workdirs
from txl_jax.training.preemption import PreemptionGuard

PLAIN: dict[str, Any] = {
    "model": {"n_layer": 2, "d_model": 96, "n_head": 4, "d_head": 24, "d_inner": 192},
    "optimizer": {"learning_rate": 2e-3, "warmup_steps": 50, "min_ratio": 0.1},
    "train": {"batch_size": 10, "seg_len": 70, "mem_len": 70, "log_every": 500},
    "validate": {"batch_size": 10, "seg_len": 70, "mem_len": 70},
    "checkpoint": {"every": 1_000_000},
}
DROPOUT = {"model.dropout": 0.2}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout, independent": DROPOUT,
    "dropout, locked": {**DROPOUT, "model.dropout_mask": "locked"},
    "dropout, independent, and R-Drop 0.5": {**DROPOUT, "loss.r_drop": 0.5},
    "input dropout 0.4": {"model.dropout_input": 0.4},
    "output dropout 0.4": {"model.dropout_output": 0.4},
    "dropout of q, k, v 0.2": {"model.dropout_qkv": 0.2},
    "dropout of attention 0.2": {"model.dropatt": 0.2},
    "dropout of embedding rows 0.05": {"model.dropout_embedding": 0.05},
    "mixture of 3 softmaxes": {"model.mixtures": 3},
    "mixture of 3 softmaxes, latents dropped 0.2": {
        "model.mixtures": 3,
        "model.dropout_latent": 0.2,
    },
    "past decode 0.001": {"model.past_decode": True, "loss.past_decode": 0.001},
    "AR 0.2": {"loss.ar": 0.2},
    "TAR 0.1": {"loss.tar": 0.1},
    "L2 1e-4 in the gradient": {"optimizer.l2": 1e-4},
    "weight decay 0.1": {"optimizer.weight_decay": 0.1},
    "embeddings at twice the rate": {"optimizer.embedding_ratio": 2.0},
    "drawn lengths": {"train.seg_len_std": 5.0},
    "streams begin anywhere": {"train.partial_shuffle": True},
    "context run again, no memory": {
        "train.mem_len": 0,
        "train.context_len": 70,
        "validate.mem_len": 0,
        "validate.context_len": 70,
    },
}
"""Changes of the plain model, by name. Every run also scores two averages of its weights."""
TAUGHT = "taught by the plain ones"
"""One more change: distillation from the plain models of all seeds, read from their workdirs."""


def beginning(data: pathlib.Path, folder: pathlib.Path, tokens: int) -> pathlib.Path:
    """Makes a folder with the first lines of the training text, about ``tokens`` characters.

    The other splits are copied. Returns the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept, count = [], 0
    for line in (data / "ptb.train.txt").read_text().splitlines(keepends=True):
        count += len(line)
        if count > tokens:
            break
        kept.append(line)
    (folder / "ptb.train.txt").write_text("".join(kept))
    for split in ("valid", "test"):  # the vocabulary is counted over all three
        (folder / f"ptb.{split}.txt").write_text((data / f"ptb.{split}.txt").read_text())
    return folder


def trained(changes: dict[str, Any], corpus: Corpus, exp: ExperimentConfig, workdir: str) -> Any:
    """Trains all seeds; returns for each kind of weights their validation losses in nats.

    The kinds are the last weights (``raw``) and two averages over training (``swa``, ``ema``).
    """
    plan = build_plan(with_vocab(override(exp, changes), corpus), corpus, workdir)
    with locked_workdirs(plan):
        train(plan, PreemptionGuard())
    losses: dict[str, list[float]] = {}
    for run in plan.runs:
        lines = (pathlib.Path(run.workdir) / "metrics.jsonl").read_text().splitlines()
        last = [r for r in map(json.loads, lines) if r["kind"] == "valid"][-1]
        for name in ("raw", "swa", "ema"):
            losses.setdefault(name, []).append(last[f"loss_{name}"])
    return losses


def against(new: list[float], old: list[float]) -> dict[str, Any]:
    """Returns the change from old to new losses per seed, its mean and its standard deviation.

    The losses are in nats, and the change is in bits per character.
    """
    change = [(a - b) / math.log(2) for a, b in zip(new, old, strict=True)]
    spread = statistics.stdev(change) if len(change) > 1 else None
    return {"bpc": change, "mean": statistics.mean(change), "spread": spread}


def main(argv: list[str] | None = None) -> None:
    """Trains each change that has no row yet; writes and prints the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=float, default=10.0, help="over the training text")
    parser.add_argument("--only", help="some of the changes, by name, with ';' between them")
    flags = parser.parse_args(argv)

    text = beginning(flags.data, flags.out / "text", flags.tokens)
    t = PLAIN["train"]
    steps = int(flags.passes * flags.tokens / (t["batch_size"] * t["seg_len"]))
    exp = ExperimentConfig.from_dict(
        {**PLAIN, "data": {"name": "ptb", "path": str(text), "vocab": "char"}, "mesh": {"data": 1}}
    )
    kept = {"average.swa_start": steps * 3 // 4, "average.ema_decay": 0.98}
    size = {"train.steps": steps, "train.num_seeds": flags.seeds}
    exp = override(exp, {**kept, **size})
    corpus = corpus_from_config(exp.data)

    path = flags.out / "regularisers.json"
    result: dict[str, Any] = {"machine": machine(), "tokens": corpus.info["tokens"], "steps": steps}
    result |= {"settings": PLAIN | kept, "rows": {}}
    if path.exists():
        result["rows"] = json.loads(path.read_text())["rows"]
    folder_of = lambda name: flags.out / "runs" / name.replace(" ", "_").replace(",", "")
    seeds = [str(folder_of("plain") / f"seed_{exp.seed + i}") for i in range(flags.seeds)]
    taught = {"train.text_on_device": True, "distil.teachers": tuple(seeds)}
    every = CHANGES | {TAUGHT: taught}
    chosen = ["plain", *flags.only.split(";")] if flags.only else list(every)
    for name in chosen:
        if name in result["rows"]:
            continue
        if name == TAUGHT and not all(map(os.path.isdir, seeds)):
            trained({}, corpus, exp, str(folder_of("plain")))
        start = time.perf_counter()
        losses = trained(every[name], corpus, exp, str(folder_of(name)))
        changes = {k: v for k, v in every[name].items() if k != "distil.teachers"}
        row = {"changes": changes, "losses": losses, "seconds": time.perf_counter() - start}
        plain = losses["raw"] if name == "plain" else result["rows"]["plain"]["losses"]["raw"]
        row["against_plain"] = against(losses["raw"], plain)
        for mean in ("swa", "ema"):
            row[f"{mean}_against_raw"] = against(losses[mean], losses["raw"])
        result["rows"][name] = row
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(line(name, row), flush=True)


def line(name: str, row: dict[str, Any]) -> str:
    """Returns a row as a line of text: bits per character of each seed, then the changes."""
    bpc = " ".join(f"{loss / math.log(2):.4f}" for loss in row["losses"]["raw"])
    parts = [f"{name}: {bpc}"]
    for key in ("against_plain", "swa_against_raw", "ema_against_raw"):
        about = row[key]
        spread = "" if about["spread"] is None else f" (+- {about['spread']:.4f})"
        parts.append(f"{key} {about['mean']:+.4f}{spread}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
