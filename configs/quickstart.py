"""A byte-level model of Python source, trained from scratch on any machine in minutes.

    python -m txl_jax.main --config=configs/quickstart.py

The text is the standard library of the Python that runs this command. The results therefore depend
on the Python version, and the run records the hash of the text with them. Hardware: two CPU cores.
This is not a recipe of the paper: a model so small, trained so briefly, only shows that everything
works.

Measured (two cores of an Intel Xeon, Python 3.11.7, jax 0.10.2, 2026-11-23): 264 s, not counting
installation; 1.437 bits per byte on the held-out files with memory 320, 1.851 without memory (means
of three seeds). RESULTS.md has the details.
"""

from ml_collections import ConfigDict

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "quickstart",
            "model": {
                "dtype": "auto",
                "n_layer": 3,
                "d_model": 128,
                "n_head": 2,
                "d_head": 64,
                "d_inner": 512,
                "pre_lnorm": True,
            },
            "data": {"name": "stdlib"},
            "optimizer": {
                "name": "muon",
                "learning_rate": 8e-3,
                "embedding_ratio": 0.3,
                "warmup_steps": 100,
                "clip_norm": 0.0,
            },
            "train": {
                "steps": 2300,
                "batch_size": 16,
                "seg_len": 128,
                "mem_len": 128,
                "steps_per_dispatch": 10,
                "log_every": 100,
                "eval_every": 1150,
            },
            "validate": {"batch_size": 16, "seg_len": 128, "mem_len": 192, "max_segments": 40},
            "evaluate": {
                "batch_size": 16,
                "seg_len": 128,
                "mem_len": 320,
                "baselines": ("unigram", "bigram", "xz"),
            },
            "generate": {
                "prompt": "def read_lines(path):\n",
                "length": 500,
                "mem_len": 320,
                "temperature": 0.7,
            },
            "checkpoint": {"every": 1150},
        }
    )
    if variant == "smoke":
        config.train.update({"steps": 20, "steps_per_dispatch": 1, "log_every": 5, "eval_every": 0})
        config.optimizer.warmup_steps = 5
        config.validate.max_segments = config.evaluate.max_segments = 4
        config.generate.length = 32
    return config
