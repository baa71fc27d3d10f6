"""WikiText-103, base, in the form of the authors' TensorFlow code.

    python -m txl_jax.main --config=configs/wt103_base_tf.py --workdir=runs/wt103_base_tf

As wt103_base.py, but u and v in each layer, epsilon of LayerNorm 1e-12, the rate falls to 0.004
of its peak, and memory is never emptied. TF's script says div_val 4 and 400,000 steps; with that
it is far from the paper's 151M, so the embedding and the steps here are those of PyTorch's.
151.1M parameters.

Score: test perplexity 24.0 in table 1 (*paper*), here *not run*.
Evaluation: as wt103_base.py, in TF's window and with zeros before the first segment, which
are attended to.

Hardware: as wt103_base.py (*not run*).
Of eight devices, a batch of 60 uses six (four TPU chips); a train.batch_size of 56 or 64 uses all.

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on CPUs with units for it, else
float32, as the authors had.
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
