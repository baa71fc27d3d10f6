"""A model of your own text: a file, or a folder of *.txt files.

    python -m txl_jax.main --config=configs/my_text.py --config.data.path=FILE_OR_FOLDER \\
        --workdir=runs/mine

A token is a character; --config.data.vocab=byte or word changes that. A folder with train.txt,
valid.txt and test.txt is used as it is, any other text is cut into the three. Sized for a text of
a few megabytes and some minutes on two CPU cores; for more, raise train.steps and the model's
sizes. What it reaches depends on the text: no number is given here.
"""

from ml_collections import ConfigDict


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "my_text",
            "model": {
                "n_layer": 3,
                "d_model": 128,
                "n_head": 4,
                "d_head": 32,
                "d_inner": 512,
                "dropout": 0.1,
            },
            "data": {"name": "text", "vocab": "char"},
            "optimizer": {"learning_rate": 2e-3, "warmup_steps": 100},
            "train": {
                "steps": 5000,
                "batch_size": 8,
                "seg_len": 64,
                "mem_len": 64,
                "log_every": 100,
                "eval_every": 1000,
            },
            "validate": {"batch_size": 8, "seg_len": 128, "mem_len": 192, "max_segments": 40},
            "evaluate": {
                "batch_size": 8,
                "seg_len": 128,
                "mem_len": 320,
                "baselines": ("unigram", "bigram"),
            },
            "generate": {"length": 500, "mem_len": 320, "temperature": 0.8},
            "checkpoint": {"every": 1000},
        }
    )
    if variant == "smoke":
        config.train.update({"steps": 20, "log_every": 5, "eval_every": 0})
        config.optimizer.warmup_steps = 5
        config.validate.max_segments = config.evaluate.max_segments = 4
        config.generate.length = 32
    return config
