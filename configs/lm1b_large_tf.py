"""One Billion Word, large, in the form of the authors' TensorFlow code.

    python -m txl_jax.main --config=configs/lm1b_large_tf.py --workdir=runs/lm1b_large_tf

As lm1b_large.py, but u and v in each layer, no projection of the words that are as wide as
the model, initial values 0.005, epsilon of LayerNorm 1e-12, learning rate 1e-4 falling to 0.01 of
it, memory emptied every 1,000 steps and not at an epoch's end (TF on TPUs), and two <S> between
sentences. So each sentence adds a trivial target. The perplexity is over more targets and is lower
for the same model: it cannot be compared with that of lm1b_large.py.
838.1M parameters.

Score: test perplexity 21.8 (*paper*), here *not run*.
Evaluation: as lm1b_large.py, in TF's window and with zeros before the first segment, which
are attended to.

Hardware: as lm1b_large.py (*not run*).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on CPUs with units for it, else
float32, as the authors had.
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
