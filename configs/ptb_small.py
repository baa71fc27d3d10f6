"""Penn Treebank on a laptop: a small word-level model in about ten minutes on two CPU cores.

    python -m txl_jax.main --config=configs/ptb_small.py --config.data.path=FOLDER

FOLDER contains ptb.train.txt, ptb.valid.txt and ptb.test.txt. data.path can also name the published
archive; without data.path the archive is downloaded. This is not a recipe of the paper:
the paper's perplexity of 54.52 needs 24M parameters and strong regularisation.

Measured (two cores of an AMD EPYC, jax 0.10.2, 2026-11-21): 660 s in all, while tests ran on the
same machine for part of the time; test perplexity 111.96 with memory 320, 118.09 without memory.
RESULTS.md has the details.
"""

from ml_collections import ConfigDict

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "ptb_small",
            "model": {
                "dtype": "auto",
                "n_layer": 3,
                "d_model": 160,
                "n_head": 4,
                "d_head": 40,
                "d_inner": 480,
                "dropout": 0.2,
                "pre_lnorm": True,
            },
            "data": {"name": "ptb"},
            "optimizer": {"learning_rate": 2e-3, "warmup_steps": 100},
            "train": {
                "steps": 3000,
                "batch_size": 16,
                "seg_len": 64,
                "mem_len": 64,
                "log_every": 50,
                "eval_every": 1000,
            },
            "validate": {"batch_size": 10, "seg_len": 64, "mem_len": 128},
            "evaluate": {
                "batch_size": 10,
                "seg_len": 128,
                "mem_len": 320,
                "baselines": ("unigram", "bigram"),
            },
            "generate": {
                "prompt": "the company said",
                "length": 120,
                "mem_len": 320,
                "temperature": 0.9,
                "top_k": 100,
            },
            "checkpoint": {"every": 1000},
        }
    )
    if variant == "smoke":
        config.train.update({"steps": 20, "log_every": 5, "eval_every": 0})
        config.optimizer.warmup_steps = 5
        config.validate.max_segments = config.evaluate.max_segments = 4
        config.generate.length = 16
    return config
