"""Every file that this program writes in a workdir, and the folders that it may write in.

A folder belongs to a run once its ``config.json`` is there. The modes that compare runs write in
folders without one and note it in ``.txl_jax``. Files of the user's own are never overwritten.
"""

import os

from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.files import json_object, naming

CONFIG, VOCAB = "config.json", "vocab.json"
MODEL = "model.safetensors"
"""The parameters of an exported model; they are loaded in preference to checkpoints."""
CHECKPOINTS = "checkpoints"
LOCK, PROBE, OUTPUTS = ".lock", ".writable", ".txl_jax"

FILES = (
    LOCK,
    OUTPUTS,
    PROBE,
    "ablation.csv",
    "ablation.json",
    "ablation.png",
    "ablation.svg",
    "attention.csv",
    "attention.json",
    "attention.npz",
    "attention.png",
    "attention.svg",
    "attention_heads.png",
    "attention_heads.svg",
    "attention_terms.png",
    "attention_terms.svg",
    CHECKPOINTS,
    CONFIG,
    "context.csv",
    "context.json",
    "context.png",
    "context.svg",
    "context_losses.npz",
    "evaluation.json",
    "evaluations.jsonl",
    "library.log",
    "loss.png",
    "metrics.jsonl",
    MODEL,
    "probe.csv",
    "probe.json",
    "probe.png",
    "probe.svg",
    "recl",
    "recl.csv",
    "recl.json",
    "recl.png",
    "recl.svg",
    "recl_gains.csv",
    "recl_loss.png",
    "recl_loss.svg",
    "report.html",
    "sample.txt",
    "samples.jsonl",
    "soft_targets.npz",
    "speed.json",
    "start.json",
    "tensorboard",
    VOCAB,
)
"""Names of all files and folders in a workdir; each file is also written as ``<name>.tmp``."""


def check_free(workdir: str) -> None:
    """Refuses to train in a folder that is neither a run's nor free of this program's file names.

    Raises:
      WorkdirError: an exported model is in it, or files that training would overwrite; names them.
    """
    if os.path.exists(os.path.join(workdir, MODEL)):
        raise WorkdirError(
            f"--workdir={workdir}: has an exported model ({MODEL}), and training would put a second"
            f" one beside it. Name another --workdir; --config.train.start_from={workdir} begins"
            " with its parameters"
        )
    if not os.path.exists(os.path.join(workdir, CONFIG)):
        _refuse(workdir, [name for name in _taken(workdir) if name != OUTPUTS])


def register_outputs(workdir: str, mode: str) -> None:
    """Notes that the files of a mode that compares runs are this program's; makes the folder.

    Args:
      workdir: where the mode writes; a run's own workdir needs no note.
      mode: ``ablation``, ``recl`` or ``report``; its files' names start with it.

    Raises:
      WorkdirError: files of these names are there and the folder has no such note.
      OSError: the note cannot be written.
    """
    os.makedirs(workdir, exist_ok=True)
    path, modes = os.path.join(workdir, OUTPUTS), []
    if os.path.exists(os.path.join(workdir, CONFIG)):
        return
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            modes = file.read().split()
    if mode in modes:
        return
    _refuse(workdir, [name for name in _taken(workdir) if name.startswith(mode)])
    with naming(path), open(path, "a", encoding="utf-8") as file:
        file.write(f"{mode}\n")


def is_exported(folder: str) -> bool:
    """Whether a folder holds an exported model, not a run with checkpoints.

    Raises:
      WorkdirError: it holds both, so that nobody knows which of them is meant.
    """
    if not os.path.exists(os.path.join(folder, MODEL)):
        return False
    checkpoints = os.path.join(folder, CHECKPOINTS)
    if os.path.isdir(checkpoints) and any(name.isdigit() for name in os.listdir(checkpoints)):
        raise WorkdirError(
            f"{folder}: has two models, {MODEL} and {CHECKPOINTS}/; move one of them to another"
            " folder"
        )
    return True


def _refuse(workdir: str, names: list[str]) -> None:
    if names:
        raise WorkdirError(
            f"--workdir={workdir}: is not the folder of a run, and these files in it would be"
            f" overwritten: {', '.join(names)}. Name another --workdir, or move them elsewhere"
        )


def _taken(workdir: str) -> list[str]:
    """Files of this program's names, but for those that a run killed at its start leaves."""
    there = sorted(os.listdir(workdir)) if os.path.isdir(workdir) else []
    ours = [name for name in there if name.removesuffix(".tmp") in FILES]
    return [name for name in ours if not _is_left_over(os.path.join(workdir, name), name)]


def _is_left_over(path: str, name: str) -> bool:
    if os.path.isdir(path):
        return all(inner.startswith(".") for inner in os.listdir(path))
    if name == f"{CONFIG}.tmp":
        return True
    if name in (PROBE, LOCK) and not os.path.getsize(path):
        return True
    return name == LOCK and _is_lock(path)


def _is_lock(path: str) -> bool:
    """Whether a file says which process trains, as txl_jax/checkpoint/lock.py writes it."""
    try:
        with open(path, "rb") as file:
            return "pid" in json_object(file.read(10_000))
    except ValueError:
        return False
