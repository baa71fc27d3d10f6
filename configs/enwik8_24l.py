"""enwik8, 24 layers: the paper's best character-level model (table 2).

    python -m txl_jax.main --config=configs/enwik8_24l.py --workdir=runs/enwik8_24l

Text and protocol are those of enwik8_12l.py. 277.2M parameters.

Score: 0.99 bits per character (*paper*), here *not run*. Evaluation: test, 10 streams, segments of
128, memory 3,800, same_length window, distances clamped at 1,000.

Hardware: several accelerators. On one H100 in bfloat16 an update of 16 of the 64 streams takes 89
ms (*measured*). With train.micro_batches=4, an update consists of four such parts, and all 400,000
updates take 40 hours (*arithmetic*).
The train step fits a TPU v5e-16: 10.53 of 15.75 GiB a chip with fused attention, 15.60 without
(*compiled* ahead of time, RESULTS.md).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import enwik8_12l
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = enwik8_12l.get_config()
    config.name = "enwik8_24l"
    config.model.update({"n_layer": 24, "d_model": 1024, "n_head": 8, "d_head": 128})
    config.model.update({"d_inner": 3072, "dropout": 0.15, "dropatt": 0.15})
    config.optimizer.warmup_steps = 4000
    config.train.update({"batch_size": 64, "seg_len": 768, "mem_len": 768})
    config.validate.mem_len = 1408
    config.evaluate.update({"seg_len": 128, "mem_len": 3800, "clamp_len": 1000})
    return smoke(config) if variant == "smoke" else config
