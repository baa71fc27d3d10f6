"""One Billion Word, large, in the form of the authors' TensorFlow code.

    python -m txl_jax.main --config=configs/lm1b_large_tf.py --workdir=runs/lm1b_large_tf

Its training differs from lm1b_large.py in these points. Each layer has its own attention biases u
and v. Words whose embedding is as wide as the model are not projected. Initial weights have a
standard deviation of 0.005, and LayerNorm's epsilon is 1e-12. The learning rate falls from 1e-4 to
0.01 of this peak. Memory is emptied every 1,000 steps instead of at the end of an epoch, as in the
TF code for TPUs. The text has two <S> between sentences. Each sentence therefore adds one target
that is trivial to predict. This target lowers the perplexity, so perplexities of this recipe and of
lm1b_large.py cannot be compared. 838.1M parameters.

Score: test perplexity 21.8 (*paper*), here *not run*.
Evaluation: as in lm1b_large.py, but with the attention window of the TF code, and with a
memory of zeros that the first segment attends to.

Hardware: as for lm1b_large.py (*not run*).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import lm1b_large
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = lm1b_large.get_config()
    config.name = "lm1b_large_tf"
    config.model.update({"untie_r": True, "proj_same_dim": False, "init_std": 0.005})
    config.model.norm_epsilon = 1e-12
    config.optimizer.update({"learning_rate": 1e-4, "min_ratio": 0.01})
    config.data.protocol = "double"
    config.train.update({"epoch_memory": "carry", "reset_every": 1000})
    config.validate.first_memory = config.evaluate.first_memory = "zeros"
    config.evaluate.same_length = "tf"
    return smoke(config) if variant == "smoke" else config
