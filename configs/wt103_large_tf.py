"""WikiText-103, large, in the form of the authors' TensorFlow code.

    python -m txl_jax.main --config=configs/wt103_large_tf.py --workdir=runs/wt103_large_tf

Its training differs from wt103_large.py in these points. Each layer has its own attention biases u
and v, initial weights have a standard deviation of 0.005, LayerNorm's epsilon is 1e-12, the
learning rate falls to 0.01 of its peak, and memory is emptied every 1,000 steps instead of at the
end of an epoch, as in the TF code for TPUs. 285.2M parameters.

Score: test perplexity 18.3 (*paper*), here *not run*.
Evaluation: as in wt103_large.py, but with the attention window of the TF code, and with a
memory of zeros that the first segment attends to.

Hardware: as for wt103_large.py (*not run*).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import wt103_large
from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = wt103_large.get_config()
    config.name = "wt103_large_tf"
    config.model.update({"untie_r": True, "init_std": 0.005, "norm_epsilon": 1e-12})
    config.optimizer.min_ratio = 0.01
    config.train.update({"epoch_memory": "carry", "reset_every": 1000})
    config.validate.first_memory = config.evaluate.first_memory = "zeros"
    config.evaluate.same_length = "tf"
    return smoke(config) if variant == "smoke" else config
