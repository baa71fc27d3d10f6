"""WikiText-103 as NVIDIA trains it, large: LAMB, 100,000 updates.

    python -m txl_jax.main --config=configs/nvidia_wt103_large.py --workdir=runs/nvidia_wt103_large

This is the recipe of NVIDIA's PyTorch port of 2020, not of the paper. 285.2M parameters. The
learning rate falls from 0.01 to 0.0001. Streams are partially shuffled as in nvidia_wt103_base.py.

Score: test perplexity 18.17 +- 0.04 over 16 seeds (published by NVIDIA), here *not run*.
Evaluation: test, 16 streams, segments of 128, memory 1,600, the attention window of the authors'
TensorFlow code, distances clamped at 1,000. Each stream first reads the 1,664 tokens before it into
its memory.

Hardware: eight accelerators. On one A100 of 40 GB in half precision NVIDIA cuts the batch into 8
parts (--config.train.micro_batches=8). NVIDIA reports 25,084 tokens/s for one A100 at batch 16, so
the recipe's 4.9e9 tokens take 54 hours. With txl_jax one H100 trains on 132,400 tokens/s, 32
streams at a time (*measured*), so the recipe takes ten hours (*arithmetic*).

Dtype: bfloat16 (NVIDIA: float16) on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs
with AVX512-BF16; float32 elsewhere.
"""

from . import nvidia_wt103_base
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = nvidia_wt103_base.get_config()
    config.name = "nvidia_wt103_large"
    config.model.update({"n_layer": 18, "d_model": 1024, "n_head": 16, "d_head": 64})
    config.model.update({"d_inner": 4096, "dropout": 0.2, "dropatt": 0.2, "div_val": 4})
    config.model.init_std = 0.005
    config.optimizer.update({"warmup_steps": 16_000, "min_ratio": 0.01})
    config.train.update({"steps": 100_000, "batch_size": 128, "seg_len": 384, "mem_len": 384})
    config.validate.update({"seg_len": 128, "mem_len": 640, "warm_start": 640})
    config.evaluate.update({"seg_len": 128, "mem_len": 1600, "clamp_len": 1000})
    config.evaluate.warm_start = 1664
    return smoke(config) if variant == "smoke" else config
