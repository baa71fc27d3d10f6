"""One Billion Word, base, in the form of the authors' TensorFlow code.

    python -m txl_jax.main --config=configs/lm1b_base_tf.py --workdir=runs/lm1b_base_tf

Its training differs from lm1b_base.py in these points. Each layer has its own attention biases u
and v. Words whose embedding is as wide as the model are not projected. LayerNorm's epsilon is
1e-12. The learning rate falls to 0.004 of its peak. Memory is never emptied. The text has two <S>
between sentences. Each sentence therefore adds one target that is trivial to predict. This target
lowers the perplexity, so perplexities of this recipe and of lm1b_base.py cannot be compared.
Lengths, batch size, dropout and number of steps are those of lm1b_base.py. The authors' only TF
script for a model of this size is for GPUs. It has segments and memory of 256 tokens, batch 256,
dropout 0.1, no warm-up and 400,000 steps. 355.7M parameters.

Score: test perplexity 23.5 (*paper*), here *not run*.
Evaluation: as in lm1b_base.py, but with the attention window of the TF code, and with a
memory of zeros that the first segment attends to.

Hardware: as for lm1b_base.py (*not run*).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import lm1b_base
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = lm1b_base.get_config()
    config.name = "lm1b_base_tf"
    config.model.update({"untie_r": True, "proj_same_dim": False, "norm_epsilon": 1e-12})
    config.optimizer.min_ratio = 0.004
    config.data.protocol = "double"
    config.train.epoch_memory = "carry"
    config.validate.first_memory = config.evaluate.first_memory = "zeros"
    config.evaluate.same_length = "tf"
    return smoke(config) if variant == "smoke" else config
