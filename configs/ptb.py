"""Penn Treebank, 24M parameters: the authors' later release, as far as its settings exist here.

    python -m txl_jax.main --config=configs/ptb.py --config.data.path=FOLDER --workdir=runs/ptb

FOLDER has ptb.train.txt, ptb.valid.txt and ptb.test.txt (or is the published archive; without
data.path it is downloaded). 24,040,400 parameters. No memory: 70 tokens of context are run again
with each segment. Segment lengths are drawn around 70, the rate in proportion.

Not there yet, so this is not the recipe: L2 of 1.2e-6 added to the gradient, twice the rate for
embeddings, and the last 50 epochs at half rate whose weights are averaged. Here are its first 125
epochs, counted as 1,371 updates each: with these lengths a pass takes 1,361 to 1,379 (20 seeds).

Score: the paper's 54.52 (*paper*) has no published recipe; this release's four recorded runs reach
55.26 to 55.60 at softmax temperature 1.08. Here *not run*. Evaluation: test, one stream, segments
of 10, context 130.

Hardware: one accelerator. Arithmetic gives 3.8e16 operations, minutes at 100 TFLOP/s; the 171,375
small updates will take hours (*not run*). ptb_small.py is for a laptop.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

smoke = runpy.run_path(str(pathlib.Path(__file__).parent / "shared/smoke.py"))["smoke"]


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "ptb",
            "model": {
                "n_layer": 16,
                "d_model": 380,
                "n_head": 10,
                "d_head": 38,
                "d_inner": 900,
                "attention": "shared_projection",
                "dropout": 0.2,
                "dropout_input": 0.6,
                "dropout_output": 0.5,
                "dropout_qkv": 0.2,
                "dropout_embedding": 0.2,
                "dropout_mask": "locked",
                "dropatt": 0.2,
            },
            "data": {"name": "ptb"},
            "loss": {"ar": 0.2, "tar": 0.1},
            "optimizer": {"learning_rate": 3e-4, "warmup_steps": 3000, "min_ratio": 1 / 3},
            "train": {
                "steps": 171_375,
                "batch_size": 10,
                "seg_len": 70,
                "mem_len": 0,
                "context_len": 70,
                "seg_len_std": 5.0,
                "log_every": 190,
                "eval_every": 1371,
            },
            "validate": {"batch_size": 10, "seg_len": 10, "mem_len": 0, "context_len": 130},
            "evaluate": {"batch_size": 1, "seg_len": 10, "mem_len": 0, "context_len": 130},
            "generate": {"mem_len": 130},
            "checkpoint": {"every": 1371},
        }
    )
    return smoke(config) if variant == "smoke" else config
