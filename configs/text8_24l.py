"""text8, 24 layers: the model of the paper's table 3.

    python -m txl_jax.main --config=configs/text8_24l.py --workdir=runs/text8_24l

Without data.path the text is downloaded. data.path can also name the file text8.zip or text8, or a
folder with the authors' train.txt, valid.txt and test.txt. 27 symbols, 277.1M parameters; all other
settings are those of enwik8_24l.py.

Score: 1.08 bits per character (*paper*), here *not run*. Evaluation: test, 10 streams, segments of
128, memory 3,800, same_length window, distances clamped at 1,000.

Hardware: as for enwik8_24l.py (*not run*).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import enwik8_24l
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = enwik8_24l.get_config()
    config.name = "text8_24l"
    config.data = {"name": "text8"}
    config.generate.prompt = "the "
    return smoke(config) if variant == "smoke" else config
