"""WikiText-103, the base model of the paper's table 1: 16 layers, adaptive softmax.

    python -m txl_jax.main --config=configs/wt103_base.py --workdir=runs/wt103_base

Without data.path the text is downloaded. data.path can also name the archive, or a folder with
wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens. 151.1M parameters.

Score: test perplexity 24.0 in table 1 and 23.09 at attention length 640 in table 6 (*paper*), here
*not run*. Evaluation: test, 10 streams, segments of 64, memory 640, same_length window, distances
clamped at 400.

Hardware: the authors used four GPUs. On one H100 in bfloat16 an update takes 41 ms (*measured*), so
all 200,000 updates take 2.3 hours (*arithmetic*).
Of eight GPUs, a batch of 60 uses six, and of eight TPU chips four;
a train.batch_size of 56 or 64 uses all.

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from ml_collections import ConfigDict

from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "wt103_base",
            "model": {
                "dtype": "auto",
                "n_layer": 16,
                "d_model": 410,
                "n_head": 10,
                "d_head": 41,
                "d_inner": 2100,
                "dropout": 0.1,
                "dropatt": 0.0,
                "cutoffs": (20_000, 40_000, 200_000),
                "div_val": 1,
                "tie_projs": (False, True, True, True),
                "scan_layers": "auto",
            },
            "data": {"name": "wt103"},
            "optimizer": {"learning_rate": 2.5e-4, "warmup_steps": 0},
            "train": {
                "steps": 200_000,
                "batch_size": 60,
                "seg_len": 150,
                "mem_len": 150,
                "log_every": 200,
                "eval_every": 4000,
            },
            "validate": {"batch_size": 10, "seg_len": 150, "mem_len": 150},
            "evaluate": {
                "batch_size": 10,
                "seg_len": 64,
                "mem_len": 640,
                "clamp_len": 400,
                "same_length": "pytorch",
            },
            "checkpoint": {"every": 4000},
        }
    )
    return smoke(config) if variant == "smoke" else config
