"""The command: ``python -m txl_jax.main --config=quickstart --workdir=DIR``, or ``txl --config=…``.

This module parses the flags, sets up the process and starts the mode. Every setting of the config
has a flag, for example ``--config.train.steps=100``.
"""

import os
import sys
import traceback

from absl import app, flags

from txl_jax import __version__, interrupts, paths, usage
from txl_jax.command_line import split_overrides
from txl_jax.config import (
    ANALYSES,
    ConfigError,
    describe_settings,
    format_settings,
    load_config,
    override,
)
from txl_jax.config.folders import expanded, workdir_path
from txl_jax.config.nested import SYNONYMS
from txl_jax.library_errors import log_library_errors
from txl_jax.messages import (
    UserError,
    arguments_as_flags,
    describe_os_error,
    error_text,
    one_line,
    short_repr,
    truncate,
)
from txl_jax.standard_streams import drop_unwritten_output, run_command, say

_ABOUT = "usage.py says what it does"
_CONFIG = flags.DEFINE_string("config", None, _ABOUT)
_WORKDIR = flags.DEFINE_string("workdir", None, _ABOUT)
_MODE = flags.DEFINE_string("mode", "train", _ABOUT)
_TOPOLOGY = flags.DEFINE_string("topology", None, _ABOUT)
_STEP = flags.DEFINE_string("step", "best", _ABOUT)
_COMPLETION = flags.DEFINE_string("completion", None, _ABOUT)
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, _ABOUT)
_COORDINATOR = flags.DEFINE_string("coordinator", None, _ABOUT)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, _ABOUT, 1, 1 << 20)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, _ABOUT)
_HEARTBEAT = flags.DEFINE_integer("heartbeat_seconds", 60, _ABOUT, 1, 24 * 3600)

_PRINTING_MODES = ("generate", "score", "interactive", "compile", "settings")
"""The modes whose result is on standard output, though some of them write files too."""
_HELP = {"-h", "-help", "--help", "--helpfull", "--helpshort"}

_overrides: dict[str, str] = {}


def parse_flags(argv: list[str]) -> list[str]:
    """Parses absl's flags, after taking out every ``--config.KEY=VALUE`` for the config."""
    try:
        told = _about_itself(argv[1:])
    except ConfigError as error:
        say(f"error: {error_text(error)}")
        sys.exit(2)
    if told is not None:
        print(told)
        sys.exit(0)
    rest, overrides = split_overrides(argv)
    _overrides.update(overrides)
    try:
        return flags.FLAGS(rest)
    except flags.Error as error:
        say(f"error: {one_line(error)}{_meant(error)}")
        sys.exit(2)


def _meant(error: Exception) -> str:
    """Returns the end of a message: the right flag, if a setting was given without ``config.``."""
    name = getattr(error, "flagname", "")
    keys = [setting.key for setting in describe_settings()]
    same = [key for key in keys if name in (key, key.rpartition(".")[2])]
    usual = [key for key in same if key.startswith(("train.", "data."))]
    key = SYNONYMS.get(name) or (same[0] if len(same) == 1 else next(iter(usual), ""))
    return f"; the setting is --config.{key}=VALUE" if key else ""


def _about_itself(words: list[str]) -> str | None:
    """Returns the help or the version that the words ask for, or the usage if no word is given."""
    if words[:1] in ([], ["help"]) or _HELP & set(words):
        return usage.help_text([word for word in words if word not in _HELP])
    return f"txl_jax {__version__}" if "--version" in words else None


@arguments_as_flags()
def main(argv: list[str]) -> int:
    """Runs a mode and returns the exit code of the process."""
    try:
        usage.check_mode(_MODE.value)
        extra = argv[2:] if _MODE.value == "settings" else argv[1:]
        if extra:
            fix = "settings are --config.KEY=VALUE"
            fix = f"a mode is --mode={extra[0]}" if extra[0] in usage.MODES else fix
            raise ConfigError(f"unexpected argument {short_repr(extra[0])}; {fix}")
        if _MODE.value == "settings":
            print(format_settings(load_config(_CONFIG.value or {}, _overrides), *argv[1:]))
            return 0
        return run()
    except (UserError, OSError) as error:
        action = f"--mode={_MODE.value}"
        text = describe_os_error(error, action) if isinstance(error, OSError) else error
        say(f"error: {error_text(text)}")
        return _exit_code(2)
    except KeyboardInterrupt:
        return _exit_code(interrupts.report_interrupt())
    except Exception as error:
        if fault := paths.store_fault(error):
            say(f"error: {one_line(fault)}")
            return _exit_code(2)
        if _many_processes():
            traceback.print_exc()
            _exit_code(1)
        raise


def run() -> int:
    """Loads the experiment that the flags name, and runs the mode."""
    if _COMPLETION.value is not None:
        print(usage.completion(_COMPLETION.value))
        return 0
    mode, config = _MODE.value, _CONFIG.value
    reads = ANALYSES[mode].reads if mode in ANALYSES else None
    if config and config.startswith("~"):
        config = str(expanded(config, "--config"))
    _check_flags(mode, config, reads)
    exp, workdir = load_config(config, _overrides) if config else None, _workdir(config, mode)

    from txl_jax import modes  # slow imports, so only after the config is checked
    from txl_jax.parallel import accelerators, compile_cache, device_memory, processes
    from txl_jax.planning.compile_ahead import compile_ahead
    from txl_jax.training.run import stored_experiment

    modes.set_up_output()
    device_memory.use_most_memory()
    if exp is None and mode in ("train", "compile"):
        key = "train.start_from"
        begun = workdir_path(_overrides[key], f"config key {key}") if _overrides.get(key) else None
        exp = override(stored_experiment(workdir, begun), _overrides)
    if mode not in _PRINTING_MODES:
        drop_unwritten_output()
    if exp is not None and mode == "compile":
        if _TOPOLOGY.value is None:
            accelerators.start_devices()
        return compile_ahead(exp, _TOPOLOGY.value, workdir)
    processes.initialise(
        _DISTRIBUTED.value,
        _COORDINATOR.value,
        _NUM_PROCESSES.value,
        _PROCESS_ID.value,
        heartbeat_seconds=_HEARTBEAT.value,
        takes_notice=mode == "train",
    )
    compile_cache.keep_compiled_programs()
    if mode != "report":  # a report needs no device, and works while a run holds the TPU
        accelerators.start_devices()
    log_library_errors(workdir)
    interrupts.restore_keyboard_interrupt()
    if exp is not None and mode == "train":
        return modes.train(exp, workdir)
    if exp is not None and mode == "sweep":
        return modes.sweep(exp, workdir)
    if config and mode == "ablation":
        return modes.ablate(config, _overrides, workdir)
    if reads == "runs":
        return modes.compare(mode, exp, _overrides, workdir)
    return modes.use_model(mode, exp, _overrides, workdir, _STEP.value)


def _check_flags(mode: str, config: str | None, reads: str | None) -> None:
    """Raises ConfigError if a flag has no value, or if the mode needs or does not allow a flag."""
    for flag in (_CONFIG, _WORKDIR, _TOPOLOGY, _STEP, _COORDINATOR):
        if flag.value is not None and not flag.value.strip():
            raise ConfigError(
                f"--{flag.name}=: a value is missing; give one, or leave the flag out"
            )
    new_run = mode in ("train", "compile") and _WORKDIR.value is None
    if config is None and (reads == "config" or new_run):
        raise ConfigError("--config=NAME or FILE is needed, for example --config=quickstart")
    if config is None and _WORKDIR.value is None:
        what = "a run, for example --workdir=runs/quickstart"
        if reads == "runs":
            what = "a run, or a new one for the files of this mode"
        raise ConfigError(f"--mode={mode} needs --workdir=DIR, the folder of {what}")
    if _TOPOLOGY.value is not None and mode != "compile":
        why = "only --mode=compile reads this flag; leave the flag out, or give that mode"
        raise ConfigError(f"--topology={truncate(_TOPOLOGY.value)}: {why}")


def _workdir(config: str | None, mode: str) -> str:
    """Returns the folder of the run: the given one, or one with the name of the config."""
    file, _, variant = (config or "").partition(":")
    name = "-".join(filter(None, (os.path.splitext(os.path.basename(file))[0], variant)))
    folder = os.path.join("runs", name + "-sweep" * (mode == "sweep"))
    return workdir_path(_WORKDIR.value or folder, "--workdir")


def _many_processes() -> bool:
    processes = sys.modules.get("txl_jax.parallel.processes")
    return processes is not None and processes.many()


def _exit_code(code: int) -> int:
    """Returns the exit code. If there are several processes, ends this one without waiting."""
    if _many_processes():
        sys.modules["txl_jax.parallel.processes"].abort(code)
    return code


def console() -> None:
    """Runs the command ``txl``; this function is its entry point."""
    usage.complete()
    run_command(lambda: app.run(main, flags_parser=parse_flags))


if __name__ == "__main__":
    console()
