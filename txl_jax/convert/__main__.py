"""Converts models of other programs into workdirs, and writes models for other programs.

docs/converting.md has examples. Flags such as ``--config.evaluate.seg_len=64`` change settings
other than those of the model.
"""

import argparse
import shlex
import sys
from typing import get_args

from absl import logging

from txl_jax import interrupts
from txl_jax.checkpoint.loading import load
from txl_jax.checkpoint.saving import export
from txl_jax.checkpoint.workdir import read_json
from txl_jax.command_line import split_overrides
from txl_jax.config.folders import expanded, expanded_text
from txl_jax.convert.conversion import Format, Request, to_workdir
from txl_jax.convert.writing import Target, save_as
from txl_jax.library_errors import log_library_errors
from txl_jax.messages import UserError, arguments_as_flags, describe_os_error, error_text
from txl_jax.paths import absolute
from txl_jax.standard_streams import drop_unwritten_output, run_command


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parses the flags and the overrides of settings. Exits with status 2 if flags conflict."""
    p = argparse.ArgumentParser("python -m txl_jax.convert", allow_abbrev=False)
    files = "state file, TF checkpoint prefix, or folder; with --to: a trained model"
    p.add_argument("source", nargs="?", help=files)
    p.add_argument("out", nargs="?", help="with --to: the new folder to write")
    p.add_argument("--workdir", help="with SOURCE: the new folder to write")
    p.add_argument("--format", choices=get_args(Format), help="the program that wrote the source")
    p.add_argument("--args", help="JSON file with the constructor's arguments")
    p.add_argument("--vocab", help="vocabulary file: one symbol per line, or JSON")
    p.add_argument("--corpus", help="name of a corpus with this vocabulary")
    p.add_argument("--path", help="path of the corpus")
    targets = ("safetensors", *get_args(Target))
    p.add_argument("--to", choices=targets, help="the program for which OUT is written, or any")
    p.add_argument("--step", help="with --to: best, latest or a number")
    rest, overrides = split_overrides(argv)
    flags = p.parse_intermixed_args(rest)
    for name, value in vars(flags).items():
        if value == "":
            p.error(f"{_flag(name)}: a value is missing")
    if flags.to:
        given = {name for name, value in vars(flags).items() if value} - {"to", "step"}
        if given != {"source", "out"} or overrides:
            p.error(
                "--to needs a SOURCE and a new folder OUT, and allows no other flag than --step"
            )
        flags.step = flags.step or "best"
        return flags, overrides
    if flags.step or flags.out:
        p.error("--step and OUT need --to, the program for which the model is written")
    if not flags.source or not flags.workdir:
        p.error("SOURCE or --workdir is missing; name a model and a new folder")
    if flags.vocab and flags.corpus:
        p.error("--vocab and --corpus both name a vocabulary; give one of them")
    if flags.path and not flags.corpus:
        p.error("--path needs a --corpus")
    return flags, overrides


@arguments_as_flags()
def main(argv: list[str]) -> int:
    """Converts or exports a model. Returns the exit code."""
    flags, overrides = parse(argv)
    drop_unwritten_output()  # the results are files
    interrupts.restore_keyboard_interrupt()
    logging.set_verbosity(logging.ERROR)
    try:
        for name in ("source", "out", "workdir", "args", "vocab", "path"):
            if value := getattr(flags, name):
                remote = name in ("out", "workdir", "path") or flags.to
                expand = expanded_text if remote else expanded
                setattr(flags, name, str(expand(value, _flag(name))))
        if flags.to == "safetensors":
            step = export(flags.source, flags.out, flags.step)
            print(f"step {step} is in {flags.out}")
        elif flags.to:
            trained = load(flags.source, flags.step)
            save_as(trained, flags.out, flags.to)
            print(f"step {trained.step} is in {flags.out}, for {flags.to}")
        else:
            _convert(flags, overrides)
        return 0
    except (UserError, OSError) as error:
        doing = f"conversion of {flags.source}"
        text = describe_os_error(error, doing) if isinstance(error, OSError) else error
        print(f"error: {error_text(text)}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return interrupts.report_interrupt()


def _flag(name: str) -> str:
    return name.upper() if name in ("source", "out") else f"--{name}"


def _convert(flags: argparse.Namespace, overrides: dict[str, str]) -> None:
    workdir = absolute(flags.workdir)
    log_library_errors(workdir)
    args = read_json(flags.args) if flags.args else None
    data = {"name": flags.corpus, "path": flags.path} if flags.corpus else None
    source = {"source": flags.source, "format": flags.format, "args": args, "vocab": flags.vocab}
    model = to_workdir(Request(workdir=workdir, data=data, overrides=overrides, **source))
    shape = f"{model.n_layer} layers, d_model {model.d_model}, {model.vocab_size} symbols"
    print(f"{flags.workdir}: {model.attention} attention, {shape}; to score the model:")
    words = ["python", "-m", "txl_jax.main", "--mode=evaluate", f"--workdir={flags.workdir}"]
    print(f"  {shlex.join(words)}")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
