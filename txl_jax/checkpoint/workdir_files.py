"""Lists every file that this program writes to a workdir, and checks that it may write there.

A folder belongs to a run once its ``config.json`` exists. The modes that compare runs write to
folders without this file and add a record ``.txl_jax``. A user's own files are never overwritten.
"""

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator

from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.config import ConfigError
from txl_jax.data.sources.source import SAMPLES
from txl_jax.files import (
    name_in_os_errors,
    parse_json_object,
    write_failure_reason,
    written_as,
)
from txl_jax.messages import argument, short_repr, shown_path
from txl_jax.standard_streams import stdout

FORMAT = 2  # the version of checkpoints and exported models; this program reads no other one

CONFIG, VOCAB = "config.json", "vocab.json"
MODEL = "model.safetensors"  # the parameters of an exported model
CHECKPOINTS = "checkpoints"
WRITTEN_IN = (CHECKPOINTS, "tensorboard", "wandb")  # the folders that training writes in
LOCK, PROBE, OUTPUTS = ".lock", ".writable", ".txl_jax"


def _figures(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{ending}" for name in names for ending in ("png", "svg"))


# The results of each mode, written in its workdir at the end.
MODE_FILES: dict[str, tuple[str, ...]] = {
    "evaluate": ("evaluation.json", "evaluations.jsonl"),
    "generate": (*SAMPLES, "samples.jsonl"),
    "context": ("context_losses.npz", "context.json", "context.csv", *_figures("context")),
    "recl": ("recl.json", "recl.csv", "recl_gains.csv", *_figures("recl", "recl_loss")),
    "attention": (
        *("attention.json", "attention.csv", "attention.npz"),
        *_figures("attention", "attention_heads", "attention_terms"),
    ),
    "ablation": ("ablation.json", "ablation.csv", *_figures("ablation")),
    "speed": ("speed.json",),
    "probe": ("probe.json", "probe.csv", *_figures("probe")),
    "report": ("report.html",),
}

FILES = (
    *(LOCK, OUTPUTS, PROBE, CHECKPOINTS, CONFIG, MODEL, VOCAB),
    *("library.log", "loss.png", "metrics.jsonl", "soft_targets.npz", "start.json"),
    *("recl", "tensorboard", "wandb"),
    *itertools.chain.from_iterable(MODE_FILES.values()),
)
"""The names of all files and folders in a workdir, besides temporary files (``files.py``)."""


def check_free(workdir: str) -> None:
    """Raises WorkdirError if a folder has an exported model or files that a run would overwrite."""
    if os.path.exists(os.path.join(workdir, MODEL)):
        raise WorkdirError(
            f"{argument('workdir', workdir)}: has an exported model ({MODEL}), and training would"
            " put a second one beside it. Name another workdir;"
            f" {argument('config.train.start_from', workdir)} begins with its parameters"
        )
    if not os.path.exists(os.path.join(workdir, CONFIG)):
        _refuse_overwriting(workdir, [name for name in _our_names(workdir) if name != OUTPUTS])


def register_outputs(workdir: str, mode: str) -> None:
    """Calls :func:`check_outputs`, and records that this program writes a mode's files there.

    ``mode`` is ``ablation``, ``recl`` or ``report``, and the names of its files start with it. The
    workdir of a run needs no record. Raises WorkdirError if such files exist without a record.
    """
    check_outputs(workdir, mode)
    if os.path.exists(os.path.join(workdir, CONFIG)):
        return
    path = os.path.join(workdir, OUTPUTS)
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            if mode in file.read().split():
                return
    _refuse_overwriting(workdir, [name for name in _our_names(workdir) if name.startswith(mode)])
    with name_in_os_errors(path), open(path, "a", encoding="utf-8") as file:
        file.write(f"{mode}\n")


def is_exported(folder: str) -> bool:
    """Whether a folder has an exported model; raises WorkdirError if it has checkpoints too."""
    if not os.path.exists(os.path.join(folder, MODEL)):
        return False
    checkpoints = os.path.join(folder, CHECKPOINTS)
    if os.path.isdir(checkpoints) and any(name.isdigit() for name in os.listdir(checkpoints)):
        both = f"{MODEL} and {CHECKPOINTS}/; move one of them to another folder"
        raise WorkdirError(f"{folder}: has two models, {both}")
    return True


def check_path(folder: str) -> None:
    """Raises WorkdirError if a path cannot hold checkpoints: tensorstore takes UTF-8 paths only.

    It also writes to another folder if there is a backslash in a path.
    """
    path, fault = os.path.abspath(folder), None
    if "\\" in path:
        fault = "has a backslash"
    try:
        path.encode()
    except UnicodeEncodeError as error:
        fault = f"is not UTF-8 text (byte {os.fsencode(path[error.start])[0]:#04x})"
    if fault:
        raise WorkdirError(
            f"{argument('workdir', short_repr(folder))}: its path {fault}, and checkpoints cannot"
            " be stored there; rename the folder, or name another one"
        )


def check_writable(workdir: str, folders: tuple[str, ...] = ()) -> None:
    """Creates the workdir; raises WorkdirError if it or one of ``folders`` cannot be written."""
    check_path(workdir)
    rules = {"": ("cannot", "name a folder that can")}
    for name in folders:
        if os.path.lexists(os.path.join(workdir, name)):
            rules[name] = f"its folder {name} cannot", "make it writable, or name another workdir"
    for name, (what, fix) in rules.items():
        try:
            os.makedirs(workdir, exist_ok=True)
            _try_writing(os.path.join(workdir, name))
        except OSError as error:
            message = f"{what} be written ({write_failure_reason(error)}); {fix}"
            raise WorkdirError(f"{argument('workdir', workdir)}: {message}") from error


def check_outputs(workdir: str, *modes: str) -> None:
    """Creates the workdir; raises WorkdirError if a file of these modes cannot be written."""
    check_writable(workdir)
    for path in (os.path.join(workdir, name) for mode in modes for name in MODE_FILES[mode]):
        if os.path.isdir(path):
            raise WorkdirError(
                f"{path}: is a folder, and results are written in a file of this name"
            )
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise WorkdirError(f"{path}: is read-only, and results are written there; move it away")


def check_file(key: str, path: str | None) -> None:
    """Raises ConfigError if the file that a setting names cannot be written; leaves no new file."""
    if path is None or path == "-":
        return
    exists = os.path.exists(path)
    if exists and not (os.path.isfile(path) or os.path.isdir(path)):
        return  # a device or a pipe
    try:
        with open(path, "ab"):
            pass
        if not exists:
            os.remove(path)
    except OSError as error:
        raise ConfigError(
            f"config key {key} = {shown_path(path)!r}: cannot be written ({error.strerror}); name a"
            " file in a folder that exists and can be written"
        ) from error


@contextlib.contextmanager
def print_on_error(result: str) -> Iterator[None]:
    """Prints a result if the block that writes its files fails, so that the result is not lost."""
    try:
        yield
    except BaseException:
        print(result, file=stdout(), flush=True)
        raise


def _try_writing(folder: str) -> None:
    """Creates a folder with a file of one disk block (4096 bytes), and removes both."""
    with (
        tempfile.TemporaryDirectory(prefix=f"{PROBE}-", dir=folder) as made,
        open(os.path.join(made, PROBE), "wb") as file,
    ):
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())


def _refuse_overwriting(workdir: str, names: list[str]) -> None:
    if names:
        raise WorkdirError(
            f"{argument('workdir', workdir)}: is not the folder of a run, and these files in it"
            f" would be overwritten: {', '.join(names)}. Name another workdir, or move them"
            " elsewhere"
        )


def _our_names(workdir: str) -> list[str]:
    """Lists files with this program's names, except those of a run that was killed at its start."""
    names = sorted(os.listdir(workdir)) if os.path.isdir(workdir) else []
    ours = [name for name in names if written_as(name) in FILES]
    return [name for name in ours if not _is_left_over(os.path.join(workdir, name), name)]


def _is_left_over(path: str, name: str) -> bool:
    if os.path.isdir(path):
        return all(inner.startswith(".") for inner in os.listdir(path))
    if name == LOCK and os.path.getsize(path):  # lock.py writes the process that trains
        with contextlib.suppress(ValueError), open(path, "rb") as file:
            return "pid" in parse_json_object(file.read(10_000))
    return written_as(name) == CONFIG or (name in (PROBE, LOCK) and not os.path.getsize(path))
