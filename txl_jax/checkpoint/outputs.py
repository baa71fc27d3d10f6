"""Results of the modes: where they go is checked before the work, and they are printed first.

A mode calls :func:`check_outputs` (and :func:`check_file` for a file that a setting names) before
anything that takes long, and writes its files within :func:`printed_if_lost`.
"""

import contextlib
import os
from collections.abc import Iterator

from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.workdir import check_writable
from txl_jax.config import ConfigError


def _drawn(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{kind}" for name in names for kind in ("png", "svg"))


FILES: dict[str, tuple[str, ...]] = {
    "evaluate": ("evaluation.json", "evaluations.jsonl"),
    "generate": ("sample.txt", "samples.jsonl"),
    "context": ("context_losses.npz", "context.json", "context.csv", *_drawn("context")),
    "recl": ("recl.json", "recl.csv", "recl_gains.csv", *_drawn("recl", "recl_loss")),
    "attention": (
        *("attention.json", "attention.csv", "attention.npz"),
        *_drawn("attention", "attention_heads", "attention_terms"),
    ),
    "ablation": ("ablation.json", "ablation.csv", *_drawn("ablation")),
    "speed": ("speed.json",),
    "probe": ("probe.json", "probe.csv", *_drawn("probe")),
    "report": ("report.html",),
}
"""What a mode writes in its workdir when its work is done."""


def check_outputs(workdir: str, *modes: str) -> None:
    """Makes the workdir; raises WorkdirError where a file of these modes cannot be written."""
    check_writable(workdir)
    for path in (os.path.join(workdir, name) for mode in modes for name in FILES[mode]):
        if os.path.isdir(path):
            raise WorkdirError(
                f"{path}: is a folder, and results are written in a file of this name"
            )
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise WorkdirError(f"{path}: is read-only, and results are written there; move it away")


def check_file(key: str, path: str | None) -> None:
    """Raises ConfigError where the file that a setting names cannot be written.

    Nothing is changed: a file that is there keeps its content, and none is left behind.

    Args:
      key: of the setting.
      path: ``None`` and ``-`` are no files.
    """
    if path is None or path == "-":
        return
    there = os.path.exists(path)
    if there and not os.path.isfile(path) and not os.path.isdir(path):
        return  # a device or a pipe
    try:
        with open(path, "ab"):
            pass
        if not there:
            os.remove(path)
    except OSError as error:
        raise ConfigError(
            f"config key {key} = {path!r}: cannot be written ({error.strerror}); name a file in a"
            " folder that exists and can be written"
        ) from error


@contextlib.contextmanager
def printed_if_lost(result: str) -> Iterator[None]:
    """Prints a result whose files cannot be written in here, so that the work is not lost."""
    try:
        yield
    except BaseException:
        print(result, flush=True)
        raise
