"""enwik8, 18 layers: the middle model of the paper's table 2. Its shape is an assumption.

    python -m txl_jax.main --config=configs/enwik8_18l.py --workdir=runs/enwik8_18l

The paper's model has 18 layers and 88M parameters; the rest of its shape was never published. This
recipe assumes width 640, 10 heads of width 64 and feed-forward layers of inner width 2,200, which
gives 87.8M parameters. Dropout is that of enwik8_12l.py, and all other settings are those of
enwik8_24l.py.

Score: 1.03 bits per character (*paper*, with the paper's shape), here *not run*. Evaluation: test,
10 streams, segments of 128, memory 3,800, same_length window, distances clamped at 1,000. Text and
protocol are those of enwik8_12l.py.

Hardware: several accelerators. Arithmetic gives 1.8e19 operations, 2 days at a sustained 100
TFLOP/s (*not run*).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import enwik8_24l
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = enwik8_24l.get_config()
    config.name = "enwik8_18l"
    config.model.update({"n_layer": 18, "d_model": 640, "n_head": 10, "d_head": 64})
    config.model.update({"d_inner": 2200, "dropout": 0.1, "dropatt": 0.0})
    return smoke(config) if variant == "smoke" else config
