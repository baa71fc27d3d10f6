"""One Billion Word, base, in the form of the authors' TensorFlow code.

    python -m txl_jax.main --config=configs/lm1b_base_tf.py --workdir=runs/lm1b_base_tf

As lm1b_base.py, but u and v in each layer, no projection of the words that are as wide as the
model, epsilon of LayerNorm 1e-12, the rate falls to 0.004 of its peak, and two <S> between
sentences. So each sentence adds a trivial target. The perplexity is over more targets and is lower
for the same model: it cannot be compared with that of lm1b_base.py. Lengths, batch, dropout and
steps are those of lm1b_base.py; TF's one script for this size (GPU) has T = M = 256, batch 256,
dropout 0.1, no warm-up and 400,000 steps.
355.7M parameters.

Score: test perplexity 23.5 (*paper*), here *not run*.
Evaluation: as lm1b_base.py, in TF's window and with zeros before the first segment, which
are attended to.

Hardware: as lm1b_base.py (*not run*).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on CPUs with units for it, else
float32, as the authors had.
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
