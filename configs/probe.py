"""Measures how far back memory reaches, on a random text with answers 3 to 64 tokens back.

    python -m txl_jax.main --config=configs/probe.py:memory --workdir=runs/probe
    python -m txl_jax.main --mode=probe --workdir=runs/probe

Each variant is a row, a key of ROWS below. ROW-smoke is a small version of ROW. The default is the
first row.

    memory      T = M = 16: 3 layers can reach T + 3 M = 64 tokens back
    no_memory   M = 0: the model reaches no further back than its segment, 16 tokens

T is the length of a segment and M that of the memory. Each model has 112,779 parameters.
txl_jax/data/sources/probe.py generates the text. An answer in it repeats a symbol that was shown
some tokens before; this number of tokens is its distance. The mode probe writes probe.png,
probe.csv and probe.json, with the accuracy at each distance and the reach. The reach has two
values: the largest distance at which a changed token changed the prediction ("seen"), and the
largest distance that the shapes allow ("possible").

Measured (two shared cores of an Intel Xeon, jax 0.10.2, 2026-11-22): the accuracy of 200 answers at
each distance; chance is 0.125. Training took 113 s for memory and 86 s for no_memory, and the mode
probe 24 s.

                            to 16    17 to 64    80     96     112    128    reach
    memory, M = 16          1.00     1.00        0.13   0.12   0.14   0.12   64 seen, 64 possible
    the same, M = 0         1.00     0.10-0.14   0.13   0.12   0.14   0.12   16 seen, 16 possible
    the same, M = 32        1.00     0.99-1.00   0.74   0.86   0.14   0.12   112 seen, 112 possible
    no_memory, M = 0        1.00     0.10-0.16   0.09   0.16   0.13   0.15   16 seen, 16 possible

At 65 tokens the accuracy of the model with M = 16 is that of chance (0.10). No gradient passes
through memory, so no layer is trained to keep an answer for later segments. Still, each layer
passes answers on to the next layer. The rows "the same" are for the model of the first row,
evaluated with memory 0 and 32.

The model computes in float32 on every device. In bfloat16, one of three runs of no_memory gave only
0.49 of the answers at distance 8 correctly (AMD EPYC, 2026-11-27). The other two, and a run in
float32, gave all of them correctly.
"""

from ml_collections import ConfigDict

from .shared.rows import row_of

ROWS = {"memory": 16, "no_memory": 0}
"""The memory length M in training, for each row."""

DISTANCES = (3, 4, 6, 8, 12, 16, 17, 20, 24, 32, 33, 40, 48, 56, 64, 65, 80, 96, 112, 113, 128)
"""Distances in tokens; they include the possible reach with each memory, and the distance after it.

The possible reach is 16 without memory, 64 with T = M = 16 and 3 layers, 112 with M = 32.
"""


def get_config(variant=""):
    row, small = row_of(variant, ROWS)
    memory = ROWS[row]
    score = {"batch_size": 32, "seg_len": 16, "mem_len": memory, "max_segments": 100}
    config = ConfigDict(
        {
            "name": f"probe-{row}",
            "model": {
                "dtype": "float32",  # bfloat16 can miss answers
                "n_layer": 3,
                "d_model": 64,
                "n_head": 4,
                "d_head": 16,
                "d_inner": 128,
                "init_std": 0.1,
                "proj_init_std": 0.1,
            },
            "data": {
                "name": "probe",
                "probe": {"shortest": 3, "longest": 64, "symbols": 8, "noise": 1},
            },
            "optimizer": {"learning_rate": 2e-3, "warmup_steps": 100},
            "train": {
                "steps": 4000,
                "batch_size": 32,
                "seg_len": 16,
                "mem_len": memory,
                "steps_per_dispatch": 50,
                "log_every": 200,
                "eval_every": 1000,
            },
            "validate": score,
            "evaluate": score,
            "generate": {"length": 0},
            "checkpoint": {"every": 1000},
            "probe": {"distances": DISTANCES, "mem_lens": (0, 16, 32) if memory else (0,)},
        }
    )
    if small:
        config.train.update({"steps": 20, "steps_per_dispatch": 5, "log_every": 5, "eval_every": 0})
        config.optimizer.warmup_steps = 5
        config.checkpoint.every = 20
        config.data.probe.tokens = 20_000
        config.validate.max_segments = config.evaluate.max_segments = 4
        config.probe.answers = 8
    return config
