"""One Billion Word, the large model of the paper's table 4: 24 layers.

    python -m txl_jax.main --config=configs/lm1b_large.py --workdir=runs/lm1b_large

The text is that of lm1b_base.py (validation and test are the same file). 841.3M parameters.

Score: test perplexity 21.8 (*paper*), here *not run*. Evaluation: test, 8 streams, segments of 32,
memory 128, same_length window, no clamp.

Hardware: a TPU pod slice or several hosts; the authors' TensorFlow script is for 32 TPU hosts.
Arithmetic gives 1.0e20 operations, 12 days at a sustained 100 TFLOP/s (*not run*). The train step
fits a TPU v5p-32, where it takes 17.22 of 95.7 GiB on each chip. With the parameters divided among
the chips, it also fits a v5e-16: 4.84 of 15.75 GiB (*compiled* ahead of time, RESULTS.md).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import lm1b_base
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = lm1b_base.get_config()
    config.name = "lm1b_large"
    config.model.update({"n_layer": 24, "d_model": 1280, "n_head": 16, "d_head": 80})
    config.model.update({"d_inner": 8192, "dropout": 0.05, "dropatt": 0.05})
    config.optimizer.warmup_steps = 30_000
    config.train.update({"steps": 1_200_000, "batch_size": 512})
    config.evaluate.batch_size = 8
    return smoke(config) if variant == "smoke" else config
