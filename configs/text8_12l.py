"""text8, 12 layers: the small model of the authors' scripts, not in the paper's table 3.

    python -m txl_jax.main --config=configs/text8_12l.py --workdir=runs/text8_12l

Without data.path the text is downloaded. data.path can also name the file text8.zip or text8, or a
folder with the authors' train.txt, valid.txt and test.txt. 27 symbols, 41.0M parameters; all other
settings are those of enwik8_12l.py.

Score: none published, here *not run*. Evaluation: test, 10 streams, segments of 80,
memory 2,100, same_length window, distances clamped at 820.

Hardware: as for enwik8_12l.py (*not run*).
Of eight devices, a batch of 22 uses two; a train.batch_size of 16 or 24 uses all.

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import enwik8_12l
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = enwik8_12l.get_config()
    config.name = "text8_12l"
    config.data = {"name": "text8"}
    config.generate.prompt = "the "
    return smoke(config) if variant == "smoke" else config
