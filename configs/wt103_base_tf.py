"""WikiText-103, base, in the form of the authors' TensorFlow code.

    python -m txl_jax.main --config=configs/wt103_base_tf.py --workdir=runs/wt103_base_tf

Its training differs from wt103_base.py in four points. Each layer has its own attention biases u
and v, LayerNorm's epsilon is 1e-12, the learning rate falls to 0.004 of its peak, and memory is
never emptied. The authors' TF script has div_val 4 (embeddings of rare words are narrower) and
400,000 steps. A model with this div_val is far from the paper's 151M parameters, so the embedding
and the number of steps here are those of the PyTorch script. 151.1M parameters.

Score: test perplexity 24.0 in table 1 (*paper*), here *not run*.
Evaluation: as in wt103_base.py, but with the attention window of the TF code, and with a
memory of zeros that the first segment attends to.

Hardware: as for wt103_base.py (*not run*).
Of eight GPUs, a batch of 60 uses six, and of eight TPU chips four;
a train.batch_size of 56 or 64 uses all.

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import wt103_base
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = wt103_base.get_config()
    config.name = "wt103_base_tf"
    config.model.update({"untie_r": True, "norm_epsilon": 1e-12})
    config.optimizer.min_ratio = 0.004
    config.train.epoch_memory = "carry"
    config.validate.first_memory = config.evaluate.first_memory = "zeros"
    config.evaluate.same_length = "tf"
    return smoke(config) if variant == "smoke" else config
