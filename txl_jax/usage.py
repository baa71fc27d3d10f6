"""What the command says about itself: its usage, the settings of a mode, shell completion."""

import argparse
import importlib.util
from collections.abc import Iterable, Sequence

from txl_jax.command_line import program
from txl_jax.config import ANALYSES, ConfigError, describe_settings, format_settings
from txl_jax.config.loading import recipe_names

MODES = {
    "train": "trains a model, evaluates it and continues a prompt; goes on where a run stopped",
    "evaluate": "scores a split of a text under a protocol, with other weights and baselines",
    "generate": "continues one prompt or many",
    "score": "scores each line and token of any text",
    "export": "writes programs that run the model with jax alone, without txl_jax",
    "interactive": "continues what you type, with a memory of the conversation",
    "compile": "compiles a run's programs, also for TPUs and GPUs that are absent; what they need",
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
"""The sections of settings that a mode reads, where they are not those of its own name."""

_FLAGS = {
    "--config=NAME": "a recipe, or a Python file with get_config(); NAME:VARIANT for a variant",
    "--config.KEY=VALUE": "changes a setting",
    "--workdir=DIR": "the folder of the run (default: runs/NAME)",
    "--mode=MODE": "what to do (default: train)",
    "--step=STEP": "the checkpoint: best, latest or a number",
    "--topology=DEVICES": "with --mode=compile: the devices, as v5e:4x4 or h200:1x1x8",
    "--completion=SHELL": "prints completions for bash, zsh, fish, tcsh or powershell",
    "--version": "prints the version",
    "--distributed": "one of many processes; docs/launch.md has this flag and three more",
}

_EXAMPLES = {
    "--config=quickstart": "a small model of Python's source in five minutes",
    "--config=my_text --config.data.path=FILE": "a model of your own text",
    "--workdir=runs/quickstart": "goes on with a run that was stopped",
    "--workdir=runs/quickstart --mode=generate --config.generate.prompt='The '": "samples",
    "--config=enwik8_24l --mode=compile --topology=v5e:2x4": "what a large run needs",
}


def help_text(mode: str | None = None) -> str:
    """Returns the usage of the command, or of one mode with its settings and their defaults."""
    if mode not in MODES:
        return _usage()
    about = f"{program()} --mode={mode}: {MODES[mode]}\n"
    if mode == "settings":
        return f"{about}\n  {program()} --mode=settings [BEGINNING OF A KEY]"
    prefixes = [f"{name}." for name in _SECTIONS.get(mode, (mode,))]
    settings = "\n".join(format_settings(None, prefix) for prefix in prefixes)
    return f"{about}Settings, each given as --config.KEY=VALUE:\n\n{settings}"


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


def mode_of(words: Iterable[str]) -> str | None:
    """Returns the mode that the words of a command line name, or ``None``."""
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.lstrip("-") == "mode":
            return value
        if before.lstrip("-") == "mode" and before.startswith("-"):
            return word
        before = word
    return None


def completion(shell: str) -> str:
    """Returns a script with which a shell completes flags, modes, recipes and settings.

    Raises ConfigError if the package shtab is missing, or does not know the shell.
    """
    if importlib.util.find_spec("shtab") is None:
        raise ConfigError("--completion needs the package shtab: pip install shtab")
    import shtab

    if shell not in shtab.SUPPORTED_SHELLS:
        known = ", ".join(shtab.SUPPORTED_SHELLS)
        raise ConfigError(f"--completion={shell}: must be one of {known}")
    parser = argparse.ArgumentParser("txl", add_help=False, allow_abbrev=False)

    def add(flag: str, about: str, choices: Sequence[str] | None = None) -> None:
        parser.add_argument(flag, help=about.replace("%", "%%"), choices=choices)

    add("--config", "recipe or file", recipe_names())
    add("--mode", "what to do", list(MODES))
    for flag, about in _FLAGS.items():
        if (name := flag.partition("=")[0]) not in ("--config", "--mode", "--config.KEY"):
            add(name, about)
    for setting in describe_settings():
        choices = ["True", "False"] if setting.type == "bool" else None
        add(f"--config.{setting.key}", setting.doc.partition("\n")[0], choices)
    return shtab.complete(parser, shell)
