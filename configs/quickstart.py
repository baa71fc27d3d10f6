"""A byte-level model of Python source, from nothing, on any machine."""

from ml_collections import ConfigDict


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "quickstart",
            "model": {
                "n_layer": 4,
                "d_model": 192,
                "n_head": 4,
                "d_head": 48,
                "d_inner": 768,
            },
            "data": {"name": "stdlib"},
            "optimizer": {"learning_rate": 2e-3, "warmup_steps": 100},
            "train": {
                "steps": 1200,
                "batch_size": 16,
                "seg_len": 128,
                "mem_len": 128,
                "log_every": 25,
                "eval_every": 400,
            },
            "validate": {"batch_size": 16, "seg_len": 128, "mem_len": 256, "max_segments": 40},
            "evaluate": {
                "batch_size": 16,
                "seg_len": 256,
                "mem_len": 640,
                "baselines": ("unigram", "bigram", "xz"),
            },
            "generate": {
                "prompt": "def read_lines(path):\n",
                "length": 400,
                "mem_len": 512,
                "temperature": 0.8,
            },
            "checkpoint": {"every": 200},
        }
    )
    if variant == "smoke":
        config.train.update({"steps": 20, "log_every": 5, "eval_every": 0})
        config.generate.length = 32
    return config
