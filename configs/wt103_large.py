"""WikiText-103, the large model of the paper's table 1: 18 layers, narrow embeddings of rare words.

    python -m txl_jax.main --config=configs/wt103_large.py --workdir=runs/wt103_large

The text is that of wt103_base.py. 285.2M parameters; the paper's "257M" is this shape with 16
layers (--config.model.n_layer=16: 257.9M).

Score: test perplexity 18.3 (*paper*), here *not run*. Evaluation: test, 10 streams, segments of
128, memory 1,600, same_length window, distances clamped at 1,000.

Hardware: a TPU pod slice or several hosts. 4,000,000 updates is the largest number that the
authors' script allows. On one H100 in bfloat16 an update of 16 of the 128 streams takes 50 ms
(*measured*), so all updates take 19 days (*arithmetic*). nvidia_wt103_large.py trains on a fortieth
as many tokens. The train step fits a TPU v5e-16: 11.08 of 15.75 GiB a chip with fused attention,
13.29 without (*compiled* ahead of time, RESULTS.md).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import wt103_base
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = wt103_base.get_config()
    config.name = "wt103_large"
    config.model.update({"n_layer": 18, "d_model": 1024, "n_head": 16, "d_head": 64})
    config.model.update({"d_inner": 4096, "dropout": 0.2, "dropatt": 0.2, "div_val": 4})
    config.optimizer.warmup_steps = 16_000
    config.train.update({"steps": 4_000_000, "batch_size": 128, "seg_len": 384, "mem_len": 384})
    config.validate.update({"seg_len": 128, "mem_len": 640})
    config.evaluate.update({"seg_len": 128, "mem_len": 1600, "clamp_len": 1000})
    return smoke(config) if variant == "smoke" else config
