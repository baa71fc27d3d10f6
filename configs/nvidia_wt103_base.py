"""WikiText-103 as NVIDIA trains it, base: LAMB, large batches, 40,000 updates.

    python -m txl_jax.main --config=configs/nvidia_wt103_base.py --workdir=runs/nvidia_wt103_base

This is the recipe of NVIDIA's PyTorch port of 2020, not of the paper. 192.0M parameters. The
learning rate falls from 0.01 to 0.001. In every epoch each stream of text begins at a random place
and wraps around at its end (partial shuffling).

Score: test perplexity 23.24 +- 0.08 over 16 seeds (published by NVIDIA), here *not run*.
Evaluation: test, 16 streams, segments of 64, memory 640, the attention window of the authors'
TensorFlow code, distances clamped at 400. Each stream first reads the 640 tokens before it into its
memory. A score of streams that start with an empty memory cannot be compared with this score.

Hardware: eight accelerators. On one A100 of 40 GB in half precision NVIDIA cuts the batch into 8
parts (--config.train.micro_batches=8). NVIDIA reports 59,961 tokens/s for one A100 at batch 32, so
the recipe's 1.97e9 tokens take 9 hours. With txl_jax one H100 trains on 293,600 tokens/s, 128
streams at a time (*measured*), so the recipe takes two hours (*arithmetic*).

Dtype: bfloat16 (NVIDIA: float16) on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs
with AVX512-BF16; float32 elsewhere.
"""

from . import wt103_base
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = wt103_base.get_config()
    config.name = "nvidia_wt103_base"
    config.model.update({"d_model": 512, "n_head": 8, "d_head": 64, "d_inner": 2048})
    config.model.cutoffs = (19_997, 39_997, 199_997)
    config.optimizer = {
        "name": "lamb",
        "learning_rate": 0.01,
        "warmup_steps": 1000,
        "min_ratio": 0.1,
        "eps": 1e-6,
    }
    config.train.update({"steps": 40_000, "batch_size": 256, "seg_len": 192, "mem_len": 192})
    config.train.update({"partial_shuffle": True, "eval_every": 5000})
    config.validate.update({"batch_size": 16, "seg_len": 192, "mem_len": 192})
    config.validate.warm_start = 192
    config.evaluate.update({"batch_size": 16, "warm_start": 640, "same_length": "tf"})
    config.checkpoint.every = 5000
    return smoke(config) if variant == "smoke" else config
