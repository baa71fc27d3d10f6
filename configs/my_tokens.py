"""A model of your own arrays of ids: MIDI events, actions, proteins, tokens of your own tokenizer.

These commands train a model, score it again, and continue some ids:

    python -m txl_jax.main --config=configs/my_tokens.py --workdir=runs/mine --config.data.path=PATH
    python -m txl_jax.main --mode=evaluate --workdir=runs/mine
    python -m txl_jax.main --mode=generate --workdir=runs/mine --config.generate.prompt="17 4 99"

PATH is a .npy file, a raw .bin file (--config.data.dtype=uint16 is the default), or a folder with
a file of one of these kinds for train, valid (or val) and test. A nanoGPT folder has train.bin and
val.bin but no test file. After training on such a folder, val.bin is scored.

The vocabulary has all ids from 0 up to the largest id in the data, or N ids with
--config.data.vocab_size=N. See docs/own_data.md. The model suits some minutes of training on two
CPU cores and a vocabulary of some thousand ids; for more time or more ids, raise train.steps and
the model's sizes. No score is given here, because it depends on the data.
"""

from ml_collections import ConfigDict

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "my_tokens",
            "model": {
                "dtype": "auto",
                "n_layer": 3,
                "d_model": 128,
                "n_head": 4,
                "d_head": 32,
                "d_inner": 512,
                "dropout": 0.1,
            },
            "data": {"name": "tokens"},
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
            "generate": {"length": 256, "mem_len": 320},
            "checkpoint": {"every": 1000},
        }
    )
    if variant == "smoke":
        config.train.update({"steps": 20, "log_every": 5, "eval_every": 0})
        config.optimizer.warmup_steps = 5
        config.validate.max_segments = config.evaluate.max_segments = 4
        config.generate.length = 32
    return config
