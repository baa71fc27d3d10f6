"""Four small siblings on real text, for tables 6 and 8 in small on two CPU cores.

    python -m txl_jax.main --config=configs/siblings.py:stdlib_shaw --workdir=runs/stdlib_shaw
    python -m txl_jax.main --config=configs/siblings.py:ptb_ours --config.data.path=FOLDER

The shapes of ptb_small.py and quickstart.py, half as many updates of 64 tokens of backpropagation,
all positions in the loss, the same for all four of a text:

    ptb_ours            stdlib_ours             relative positions, memory 64
    ptb_shaw            stdlib_shaw             Shaw et al.'s positions, memory 64
    ptb_no_recurrence   stdlib_no_recurrence    relative positions, no memory
    ptb_absolute        stdlib_absolute         sinusoids added at the input, no memory

`--mode=ablation` and `--mode=recl` compare them; what that gave: RESULTS.md.
"""

from . import ptb_small, quickstart
from .shared.rows import row_of

CORPORA = {"ptb": (ptb_small, 1500), "stdlib": (quickstart, 3000)}
SIBLINGS = {
    "ours": ("relative", 64),
    "shaw": ("shaw", 64),
    "no_recurrence": ("relative", 0),
    "absolute": ("absolute", 0),
}
ROWS = {f"{corpus}_{sibling}": (corpus, sibling) for corpus in CORPORA for sibling in SIBLINGS}


def get_config(variant=""):
    row, small = row_of(variant, ROWS)
    corpus, sibling = ROWS[row]
    base, steps = CORPORA[corpus]
    config = base.get_config("smoke" if small else "")
    attention, memory = SIBLINGS[sibling]
    config.name = f"siblings-{row}"
    config.model.attention = attention
    if attention == "shaw":
        config.model.n_positions = 64 + memory
    if not small:
        config.train.update({"steps": steps, "eval_every": steps // 3})
        config.checkpoint.every = steps // 3
    config.train.mem_len = memory
    config.validate.update({"seg_len": 64, "mem_len": memory})
    if memory:
        config.evaluate.update({"seg_len": 64, "mem_len": memory, "baselines": ()})
    else:
        config.evaluate = {"batch_size": 16, "seg_len": 10, "mem_len": 0, "context_len": 54}
    config.ablation = {"lengths": (32, 64, 96, 128, 192, 256, 384)}
    config.generate.length = 0
    return config
