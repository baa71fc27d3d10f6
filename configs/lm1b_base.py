"""One Billion Word, the base model of the paper's table 4: 18 layers, shuffled sentences.

    python -m txl_jax.main --config=configs/lm1b_base.py --workdir=runs/lm1b_base

Without data.path the text is downloaded. data.path can also name the archive or its unpacked
folder, with 1b_word_vocab.txt inside or next to it. Validation and test are the same held-out file
(news.en.heldout-00000-of-00050), as in the authors' script. 357.8M parameters: with tied weights
the model does not reach the paper's 0.46B (with --config.model.tie_weight=False it has 466.5M).

Score: test perplexity 23.5 (*paper*), here *not run*. Evaluation: test, 64 streams, segments of 32,
memory 128, same_length window, no clamp.

Hardware: several accelerators. On one H100 in bfloat16 an update of 56 of the 224 streams takes 29
ms (*measured*). With train.micro_batches=4, an update consists of four such parts, and all 500,000
updates take 16 hours (*arithmetic*).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from ml_collections import ConfigDict

from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "lm1b_base",
            "model": {
                "dtype": "auto",
                "n_layer": 18,
                "d_model": 1024,
                "n_head": 8,
                "d_head": 128,
                "d_inner": 4096,
                "dropout": 0.0,
                "dropatt": 0.0,
                "cutoffs": (60_000, 100_000, 640_000),
                "div_val": 4,
                "tie_projs": (False, False, False, False),
                "scan_layers": "auto",
            },
            "data": {"name": "lm1b"},
            "optimizer": {"learning_rate": 2.5e-4, "warmup_steps": 20_000},
            "train": {
                "steps": 500_000,
                "batch_size": 224,
                "seg_len": 32,
                "mem_len": 32,
                "log_every": 200,
                "eval_every": 4000,
            },
            "validate": {"batch_size": 10, "seg_len": 32, "mem_len": 32},
            "evaluate": {
                "batch_size": 64,
                "seg_len": 32,
                "mem_len": 128,
                "clamp_len": -1,
                "same_length": "pytorch",
            },
            "checkpoint": {"every": 4000},
        }
    )
    return smoke(config) if variant == "smoke" else config
