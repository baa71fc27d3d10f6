"""Four small models for each of two texts: the paper's tables 6 and 8 in small, for two CPU cores.

    python -m txl_jax.main --config=configs/siblings.py:stdlib_shaw --workdir=runs/stdlib_shaw
    python -m txl_jax.main --config=configs/siblings.py:ptb_ours --config.data.path=FOLDER

All models are trained with Adam on segments of 64 tokens, with a loss at all positions. The four
models of a text differ only in position encoding and memory:

    ptb_ours            stdlib_ours             relative positions, memory 64
    ptb_shaw            stdlib_shaw             Shaw et al.'s positions, memory 64
    ptb_no_recurrence   stdlib_no_recurrence    relative positions, no memory
    ptb_absolute        stdlib_absolute         sinusoids added at the input, no memory

`--mode=ablation` and `--mode=recl` compare the models; RESULTS.md has the results.
"""

from typing import Any

from ml_collections import ConfigDict

from .shared.rows import row_of
from .shared.smoke import smoke

TEXTS: dict[str, Any] = {
    "ptb": {
        "model": {"d_model": 160, "d_head": 40, "d_inner": 480, "dropout": 0.2, "pre_lnorm": True},
        "train": {"steps": 1500, "batch_size": 16, "log_every": 50},
        "validate": {"batch_size": 10},
        "evaluate": {"batch_size": 10},
    },
    "stdlib": {
        "model": {"d_model": 128, "d_head": 32, "d_inner": 512},
        "train": {"steps": 3000, "batch_size": 8, "log_every": 100},
        "validate": {"batch_size": 16, "max_segments": 40},
        "evaluate": {"batch_size": 16},
    },
}
SIBLINGS = {
    "ours": ("relative", 64),
    "shaw": ("shaw", 64),
    "no_recurrence": ("relative", 0),
    "absolute": ("absolute", 0),
}
ROWS = {f"{text}_{sibling}": (text, sibling) for text in TEXTS for sibling in SIBLINGS}


def get_config(variant=""):
    row, small = row_of(variant, ROWS)
    text, sibling = ROWS[row]
    attention, memory = SIBLINGS[sibling]
    config = ConfigDict(
        {
            "name": f"siblings-{row}",
            "data": {"name": text},
            "optimizer": {"learning_rate": 2e-3, "warmup_steps": 100},
            "ablation": {"lengths": (32, 64, 96, 128, 192, 256, 384)},
            "generate": {"length": 0},
            **TEXTS[text],
        }
    )
    config.model.update({"n_layer": 3, "n_head": 4, "attention": attention, "dtype": "auto"})
    if attention == "shaw":
        config.model.n_positions = 64 + memory
    every = config.train.steps // 3
    config.train.update({"seg_len": 64, "mem_len": memory, "eval_every": every})
    config.checkpoint = {"every": every}
    config.validate.update({"seg_len": 64, "mem_len": memory})
    if memory:
        config.evaluate.update({"seg_len": 64, "mem_len": memory})
    else:
        config.evaluate = {"batch_size": 16, "seg_len": 10, "mem_len": 0, "context_len": 54}
    return smoke(config) if small else config
