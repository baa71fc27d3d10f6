"""Lists every file that this program writes to a workdir, and checks that it can write there.

A folder belongs to a run once its ``config.json`` exists. The modes that compare runs also write to
folders without this file, and list their own names there in a file ``.txl_jax``. A user's own files
are never overwritten.
"""

import itertools
import os
import re
import secrets
import tempfile

from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.config import ANALYSES, ConfigError, DataConfig
from txl_jax.data.sources.source import SAMPLES
from txl_jax.data.sources.text_files import check_not_text
from txl_jax.files import append, atomic_write, write_failure_reason, written_as
from txl_jax.messages import argument, short_repr, shown_path
from txl_jax.paths import absolute, is_remote, make_folder, names, path

FORMAT = 2  # the version of checkpoints and exported models; other versions are not read

CONFIG, VOCAB = "config.json", "vocab.json"
MODEL = "model.safetensors"  # the parameters of an exported model
CHECKPOINTS = "checkpoints"
EXPORT = "export"  # the folder that the mode ``export`` writes
WRITTEN_IN = (CHECKPOINTS, "tensorboard", "wandb")  # the folders that training writes in
AUTOTUNED = "autotuned.json"  # XLA's choices of kernels on a GPU
LOCK, PROBE, OUTPUTS = ".lock", ".writable", ".txl_jax"
_SEED = re.compile(r"seed_\d+$")


# The results of each mode, written in its workdir at the end.
MODE_FILES: dict[str, tuple[str, ...]] = {
    "evaluate": ("evaluation.json", "evaluations.jsonl"),
    "generate": (*SAMPLES, "samples.jsonl"),
    **{mode: row.files for mode, row in ANALYSES.items()},
}

FILES = (
    *(LOCK, OUTPUTS, PROBE, CHECKPOINTS, CONFIG, EXPORT, MODEL, VOCAB),
    *("library.log", "loss.png", "metrics.jsonl", "soft_targets.npz", "start.json"),
    *(AUTOTUNED, "tensorboard", "wandb"),
    *itertools.chain.from_iterable(MODE_FILES.values()),
)
"""The names of all files and folders in a workdir, besides temporary files (``files.py``)."""


def check_free(workdir: str) -> None:
    """Raises WorkdirError if a folder has an exported model or files that a run would overwrite."""
    if path(workdir, MODEL).exists():
        raise WorkdirError(
            f"{argument('workdir', workdir)}: has an exported model ({MODEL}), and training would"
            " put a second one beside it. Name another workdir;"
            f" {argument('config.train.start_from', workdir)} starts from the parameters of the"
            " exported model"
        )
    if not path(workdir, CONFIG).exists():
        _refuse_overwriting(workdir, _our_names(workdir))


def register_outputs(workdir: str, mode: str) -> None:
    """Creates the workdir, and records in ``.txl_jax`` that a mode's files are written there.

    The workdir of a run needs no record. Errors are those of :func:`check_unused`.
    """
    if check_unused(workdir, mode):
        make_folder(workdir)
        append(os.path.join(workdir, OUTPUTS), f"{mode}\n".encode())


def check_unused(workdir: str, mode: str) -> bool:
    """Returns whether ``.txl_jax`` still has to list a mode that compares runs.

    Raises WorkdirError if a file of the mode cannot be written. Also raises it if such a file
    exists in a folder that has no run and does not list the mode: the file may be the user's own.
    """
    check_outputs(workdir, mode)
    record = path(workdir, OUTPUTS)
    known = record.read_bytes().decode("utf-8", "replace").split() if record.exists() else []
    if path(workdir, CONFIG).exists() or mode in known:
        return False
    _refuse_overwriting(workdir, [name for name in _our_names(workdir) if name.startswith(mode)])
    return True


def is_exported(folder: str) -> bool:
    """Whether a folder has an exported model; raises WorkdirError if it has checkpoints too."""
    if not path(folder, MODEL).exists():
        return False
    if any(name.isdigit() for name in names(os.path.join(folder, CHECKPOINTS))):
        both = f"{MODEL} and {CHECKPOINTS}/; move one of them to another folder"
        raise WorkdirError(f"{folder}: has two models, {both}")
    return True


def check_path(folder: str) -> None:
    """Raises WorkdirError if a path cannot hold checkpoints: tensorstore takes UTF-8 paths only.

    Given a path with a backslash, tensorstore would write to another folder.
    """
    whole = absolute(folder)
    if "\\" in whole or whole.encode(errors="ignore").decode() != whole:
        raise WorkdirError(
            f"{argument('workdir', short_repr(folder))}: its path has a backslash or is not UTF-8"
            " text, and checkpoints cannot be stored there; rename the folder, or name another one"
        )


def check_writable(workdir: str, folders: tuple[str, ...] = (), create: bool = False) -> None:
    """Raises WorkdirError if the workdir or one of ``folders`` in it cannot be written.

    A missing workdir is created only if ``create`` is true, so that a refused run leaves no folder.
    Otherwise its nearest existing parent is tested instead.
    """
    check_path(workdir)
    # os.path.lexists is false for a name in a bucket
    inner = [name for name in folders if os.path.lexists(os.path.join(workdir, name))]
    for name in ("", *inner):
        try:
            if create:
                make_folder(workdir)
            _try_writing(os.path.join(workdir if create else _nearest(workdir), name))
        except OSError as error:
            what = f"its folder {name} cannot" if name else "cannot"
            why = f"{what} be written ({write_failure_reason(error)})"
            fix = "name another workdir, or make the folder writable"
            raise WorkdirError(f"{argument('workdir', workdir)}: {why}; {fix}") from error


def check_outputs(workdir: str, *modes: str) -> None:
    """Raises WorkdirError if a file of these modes cannot be written; creates nothing."""
    check_writable(workdir)
    if is_remote(workdir):
        return  # in a bucket, an object can have a folder's name, and nothing is read-only
    for file in (os.path.join(workdir, name) for mode in modes for name in MODE_FILES[mode]):
        if os.path.isdir(file) or (os.path.exists(file) and not os.access(file, os.W_OK)):
            raise WorkdirError(
                f"{file}: is a folder or read-only, and results are written there; move it away"
            )


def check_file(key: str, file: str | None, data: DataConfig) -> None:
    """Raises ConfigError if the file that a setting names cannot be written; leaves no new file.

    Raises DataError if a later run would read the file as a part of the text of ``data``.
    """
    if file is None or file == "-":
        return
    exists = os.path.exists(file)
    if exists and not (os.path.isfile(file) or os.path.isdir(file)):
        return  # a device or a pipe
    try:
        with open(file, "ab"):
            pass
        if not exists:
            os.remove(file)
    except OSError as error:
        raise ConfigError(
            f"config key {key} = {shown_path(file)!r}: cannot be written ({error.strerror}); name a"
            " file in a folder that exists and can be written"
        ) from error
    check_not_text(key, file, data)


def no_run(workdir: str) -> WorkdirError:
    """Returns the error for a folder without a run; the error names a run in ``seed_N``, if any."""
    inner = (os.path.join(workdir, name) for name in sorted(names(workdir)) if _SEED.match(name))
    if seed := next((folder for folder in inner if path(folder, CONFIG).exists()), None):
        named = argument("workdir", shown_path(seed))
        return WorkdirError(f"{argument('workdir', workdir)}: has runs of seeds; name one: {named}")
    exists = is_remote(workdir) or os.path.exists(workdir)
    what = "there is no run in it" if exists else "there is no such folder"
    start = f"start one with {argument('config', 'NAME')}"
    return WorkdirError(f"{argument('workdir', workdir)}: {what}; {start}")


def _nearest(folder: str) -> str:
    """Returns a folder, or its nearest existing parent; an address in a bucket is unchanged."""
    while not is_remote(folder):
        try:
            os.lstat(folder)
            break
        except FileNotFoundError:
            folder = os.path.dirname(folder.rstrip(os.sep)) or os.curdir
        # Other errors, such as of a name that is too long, mean that the folder cannot be made.
    return folder


def _try_writing(folder: str) -> None:
    """Writes a file of one disk block (4096 bytes) in a folder, and removes it."""
    if is_remote(folder):
        probe = os.path.join(folder, f"{PROBE}-{secrets.token_hex(4)}")
        atomic_write(probe, bytes(4096))
        path(probe).unlink()
        return
    with tempfile.TemporaryFile(dir=folder) as file:
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
    at_start = [PROBE, OUTPUTS, CONFIG]
    lock = path(workdir, LOCK)
    if not lock.is_file() or (lock.read_bytes() + b'{"pid"').startswith(b'{"pid"'):
        at_start.append(LOCK)  # this program's own lock, or no lock
    ours = [name for name in sorted(names(workdir)) if written_as(name) in FILES]
    return [n for n in ours if written_as(n) not in at_start and not _is_empty(workdir, n)]


def _is_empty(workdir: str, name: str) -> bool:
    """Whether this is a folder without files, or with hidden ones only."""
    inner = names(os.path.join(workdir, name))
    return path(workdir, name).is_dir() and all(n.startswith(".") for n in inner)
