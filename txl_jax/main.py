"""The command: ``python -m txl_jax.main --config=configs/quickstart.py --workdir=DIR``.

Flags, process set-up and dispatch to a mode; no logic. Any setting of the config is a flag:
``--config.train.steps=100``.
"""

import os
import shlex
import sys

from absl import app, flags

from txl_jax.config import ConfigError, load_config

_CONFIG = flags.DEFINE_string("config", None, "File with get_config(), and :variant if it has any.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run (default: runs/<config>).")
_MODE = flags.DEFINE_enum(
    "mode", "train", ["train", "evaluate", "generate"], "What to do with the run."
)
_STEP = flags.DEFINE_string("step", "best", "Checkpoint: best, latest or a number.")

_overrides: dict[str, str] = {}


def parse_flags(argv: list[str]) -> list[str]:
    """absl's flags, with every ``--config.KEY=VALUE`` taken out first for the config."""
    rest, arguments = [], iter(argv)
    for argument in arguments:
        if not argument.startswith("--config."):
            rest.append(argument)
            continue
        key, equals, value = argument.removeprefix("--config.").partition("=")
        _overrides[key] = value if equals else next(arguments, "")
    try:
        return flags.FLAGS(rest)
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def main(argv: list[str]) -> int:
    """Runs a mode; the exit code of the process."""
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}; settings are --config.KEY=VALUE")
        return run()
    except _known_errors() as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130


def run() -> int:
    """Loads what the flags name, checks it, and does what the mode says."""
    if _CONFIG.value is None and (_MODE.value == "train" or _WORKDIR.value is None):
        raise ConfigError("--config=FILE is needed, for example --config=configs/quickstart.py")
    exp = load_config(_CONFIG.value, _overrides) if _CONFIG.value else None
    workdir = os.path.abspath(_WORKDIR.value or os.path.join("runs", _name(_CONFIG.value or "")))

    from txl_jax import modes  # the rest of the program: only once the config is good

    if exp is not None and _MODE.value == "train":
        return modes.train(exp, workdir, command=_resume_command())
    return modes.with_trained(_MODE.value, exp, _overrides, workdir, _STEP.value)


def _known_errors() -> tuple[type[Exception], ...]:
    """Errors whose text is all that a user needs."""
    from txl_jax.data.errors import DataError

    errors: list[type[Exception]] = [ConfigError, DataError, OSError]
    if "txl_jax.modes" in sys.modules:
        errors += sys.modules["txl_jax.modes"].KNOWN_ERRORS
    return tuple(errors)


def _name(config: str) -> str:
    file, _, variant = config.partition(":")
    stem = os.path.splitext(os.path.basename(file))[0]
    return f"{stem}-{variant}" if variant else stem


def _resume_command() -> str:
    return shlex.join(["python", "-m", "txl_jax.main", *sys.argv[1:]])


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
