"""The help of the command: its usage, the settings of a mode, and shell completion."""

import argparse
import ast
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from txl_jax.command_line import program, split_overrides
from txl_jax.config import ANALYSES, ConfigError, describe_settings, format_settings, load_config
from txl_jax.config.loading import recipe_names
from txl_jax.messages import nearest_or_all, truncate

MODES = {
    "train": "trains a model, evaluates it and continues a prompt; goes on where a run stopped",
    "evaluate": "scores a split of a text, also with averaged weights and by simple baselines",
    "generate": "continues one prompt or many",
    "score": "scores each line and token of any text",
    "export": "writes programs that run the model with jax alone, without txl_jax",
    "interactive": "continues what you type, with a memory of the conversation",
    "compile": "compiles a run's programs, also for absent TPUs and GPUs; shows the memory of each",
    **{mode: row.about for mode, row in ANALYSES.items()},
    "settings": "lists settings whose names begin with a word, for example train.",
}
"""Every mode of the command, and what it does."""

_SECTIONS = {
    "train": ("model", "data", "loss", "optimizer", "average", "distil", "train", "validate"),
    "evaluate": ("evaluate", "data", "average", "mesh"),
    "interactive": ("generate",),
    "compile": ("model", "train", "mesh"),
    **{mode: (mode, *row.sections) for mode, row in ANALYSES.items()},
}
"""The sections of settings that a mode reads. Other modes read only the section of their name."""

_FLAGS = {
    "--config=NAME": "a recipe, or a Python file with get_config(); NAME:VARIANT for a variant",
    "--config.KEY=VALUE": "changes a setting",
    "--workdir=DIR": "the folder of the run (default: runs/NAME)",
    "--mode=MODE": "what to do (default: train)",
    "--step=STEP": "the checkpoint: best, latest or a number",
    "--topology=DEVICES": "with --mode=compile: the devices, such as v5e:4x4 or h200:1x1x8",
    "--completion=SHELL": "prints completions for bash, zsh, fish, tcsh or powershell",
    "--version": "prints the version",
    "--distributed": "joins the other processes of Slurm, Open MPI, a TPU pod or GKE",
    "--coordinator=HOST:PORT": "joins processes that were started by hand; process 0 listens there",
    "--num_processes=N": "with --coordinator: the number of processes",
    "--process_id=I": "with --coordinator: the number of this process, from 0",
    "--heartbeat_seconds=S": "seconds after which a silent process counts as dead (default: 60)",
}

_EXAMPLES = {
    "--config=quickstart": "a small model of Python's source in five minutes",
    "--config=my_text --config.data.path=FILE": "a model of your own text",
    "--workdir=runs/quickstart": "goes on with a run that was stopped",
    "--workdir=runs/quickstart --mode=generate --config.generate.prompt='The '": "samples",
    "--config=enwik8_24l --mode=compile --topology=v5e:2x4": "what a large run needs",
}


def help_text(words: Sequence[str]) -> str:
    """Returns the usage of the command or, if the words name a mode, of the mode with its settings.

    The settings have the values that ``--config=NAME`` and ``--config.KEY=VALUE`` give them.
    Raises ConfigError for an unknown mode, config, setting or value.
    """
    rest, overrides = split_overrides(words)
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--mode", "-mode", nargs="?")
    flags.add_argument("--config", "-config", nargs="?")
    found, rest = flags.parse_known_args(rest)
    mode = found.mode or next((word for word in rest if word in MODES), None)
    if mode is None:
        return _usage()
    check_mode(mode)
    about = f"{program()} --mode={mode}: {MODES[mode]}\n"
    if mode == "settings":
        return f"{about}\n  {program()} --mode=settings [BEGINNING OF A KEY]"
    exp = load_config(found.config or {}, overrides)
    prefixes = [f"{name}." for name in _SECTIONS.get(mode, (mode,))]
    settings = "\n".join(format_settings(exp, prefix) for prefix in prefixes)
    usage = f"usage: {program()} --mode={mode} {_needs(mode)} [--config.KEY=VALUE ...]\n"
    return f"{about}{usage}Settings, each given as --config.KEY=VALUE:\n\n{settings}"


def check_mode(mode: str) -> None:
    """Raises ConfigError for an unknown mode. The message has the nearest mode, or all modes."""
    if mode not in MODES:
        raise ConfigError(f"--mode={truncate(mode)}: no such mode; {nearest_or_all(mode, MODES)}")


def _needs(mode: str) -> str:
    """Returns the flags that name what a mode reads."""
    reads = ANALYSES[mode].reads if mode in ANALYSES else "model"
    if reads == "config" or mode in ("train", "compile"):
        return "--config=NAME [--workdir=DIR]"
    return "--workdir=DIR [--step=STEP]" if reads == "model" else "--workdir=DIR"


def _usage() -> str:
    name = program()
    examples = {f"{name} {words}": text for words, text in _EXAMPLES.items()}
    return "\n\n".join(
        [
            f"usage: {name} --config=NAME [--workdir=DIR] [--config.KEY=VALUE ...]\n"
            f"       {name} --workdir=DIR [--mode=MODE] [--config.KEY=VALUE ...]",
            "Trains, evaluates, analyses and samples Transformer-XL models.",
            f"modes:\n{_columns(MODES)}",
            "examples:\n" + "\n".join(f"  # {text}\n  {line}" for line, text in examples.items()),
            f"flags:\n{_columns(_FLAGS)}",
            f"settings: {name} --mode=settings; of one mode: {name} --mode=MODE --help\n"
            f"recipes: {', '.join(recipe_names())}",
        ]
    )


def _columns(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())


def completion(shell: str) -> str:
    """Returns a script with which a shell completes flags, modes, recipes, settings and files.

    For each completion the shell runs ``txl``, which then calls :func:`complete`. Raises
    ConfigError for a shell that argcomplete does not know.
    """
    import argcomplete

    shells = ("bash", "zsh", "tcsh", "fish", "powershell")
    if shell not in shells:
        raise ConfigError(f"--completion={shell}: must be one of {', '.join(shells)}")
    return argcomplete.shellcode(["txl"], shell=shell)


def complete() -> None:
    """Ends the process with completions if the shell has asked for them."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files = argcomplete.FilesCompleter()

    def add(flag: str, values: Iterable[Any], may_be_a_file: bool) -> None:
        found = lambda prefix, **_: [*map(str, values), *(files(prefix) if may_be_a_file else ())]
        parser.add_argument(flag).completer = found  # type: ignore[attr-defined]

    for flag in ("--help", "--version"):
        parser.add_argument(flag, action="store_true")
    values = {"--config": recipe_names(), "--mode": list(MODES)}
    for flag in (name.partition("=")[0] for name in _FLAGS):
        if flag not in ("--version", "--config.KEY"):
            add(flag, values.get(flag, []), flag in ("--config", "--workdir"))
    for setting in describe_settings():
        known = re.search(r"Literal(\[.*?\])", setting.type)
        choices = ast.literal_eval(known[1]) if known else []
        choices = [True, False] if setting.type == "bool" else choices
        add(f"--config.{setting.key}", choices, "str" in setting.type)
    argcomplete.autocomplete(parser, always_complete_options="long")
