"""Writes the files of a tiny model of another program, and runs the command that converts it."""

import json
import subprocess
import sys

import foreign_states
import numpy as np
import tiny_runs
from places import ROOT
from safetensors.numpy import save_file

from txl_jax import convert

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_head": 8, "d_inner": 24}
CUT = {"cutoffs": [3, 7], "div_val": 2}
ARGS = {**SHAPE, **CUT, "n_token": 16, "same_length": True, "tgt_len": 8, "mem_len": 12}
SYMBOLS = ["<eos>", *sorted(set(tiny_runs.text().split()))]


def prepare(folder, state=foreign_states.pytorch, config=convert.config_from_pytorch, args=ARGS):
    """Writes the state, arguments, vocabulary and text of a tiny model to a folder."""
    assert len(SYMBOLS) == 16
    tensors = {name: np.array(array) for name, array in state(config(args)).items()}
    save_file(tensors, str(folder / "state.safetensors"))
    (folder / "args.json").write_text(json.dumps(args))
    (folder / "vocab.txt").write_text("".join(symbol + "\n" for symbol in SYMBOLS))
    (folder / "text.txt").write_text(tiny_runs.text())
    return folder


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "txl_jax.convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
