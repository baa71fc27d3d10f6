"""Returns the command that started this process, as the user typed it, and similar commands.

The scripts of ``launch/`` set two variables: ``TXL_LAUNCHED_BY`` is the shell text before the
user's flags, such as ``launch/local.sh``, and ``TXL_ADDED`` has the flags that the script adds.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

from txl_jax.interrupts import is_script
from txl_jax.messages import shown_path


def typed_command() -> str:
    """Returns the whole command as shell text. The same command resumes an interrupted run."""
    return _joined(_typed_flags())


def command_with(flags: Mapping[str, str]) -> str:
    """Returns the command with other values of some flags, such as ``--config.train.steps``.

    The settings of a sweep are left out.
    """
    kept, words = [], iter(_typed_flags())
    for word in words:
        name, equals, _ = word.partition("=")
        name = "--" + name.lstrip("-")
        if name not in flags and not name.startswith("--config.sweep."):
            kept.append(word)
        elif not equals:
            next(words, "")  # the value of "--workdir DIR"
    return _joined([*kept, *(f"{name}={value}" for name, value in flags.items())])


def split_overrides(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separates ``--config.KEY=VALUE`` and ``--config.KEY VALUE`` from the other words."""
    rest, overrides, left = [], {}, iter(words)
    for word in left:
        if word.startswith("--config."):
            key, equals, value = word.removeprefix("--config.").partition("=")
            overrides[key] = value if equals else next(left, "")
        else:
            rest.append(word)
    return rest, overrides


def command_for(mode: str, workdir: str) -> str:
    """Returns the command that runs a mode with the model of a workdir."""
    return _joined([f"--workdir={shown_path(workdir)}", f"--mode={mode}"])


def _joined(flags: list[str]) -> str:
    return f"{program()} {shlex.join(flags)}".rstrip()


def _typed_flags() -> list[str]:
    added = shlex.split(os.environ.get("TXL_ADDED", ""))
    return [word for word in sys.argv[1:] if word not in added]


def program() -> str:
    """Returns the shell text before the flags: a launch script, txl, or the Python command."""
    if script := os.environ.get("TXL_LAUNCHED_BY"):
        return script
    if is_script():
        name = os.path.basename(sys.argv[0])
        return name if shutil.which(name) == sys.argv[0] else shlex.quote(sys.argv[0])
    words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return shlex.join(words) if "-m" in words else "python -m txl_jax.main"
