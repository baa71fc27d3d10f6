"""One Billion Word, large, in the form of the authors' TensorFlow code.

    python -m txl_jax.main --config=configs/lm1b_large_tf.py --workdir=runs/lm1b_large_tf

As lm1b_large.py, but u and v in each layer, no projection of the words that are as wide as
the model, initial values 0.005, epsilon of LayerNorm 1e-12, learning rate 1e-4 falling to 0.01 of
it. TF's own stream (two <S> between sentences) is not there, nor is its emptying of memory every
1,000 steps.
838,078,062 parameters.

Score: test perplexity 21.8 (*paper*), here *not run*.
Evaluation: as lm1b_large.py, in TF's window and with zeros before the first segment, which
are attended to.

Hardware: as lm1b_large.py (*not run*).
"""

import pathlib
import runpy

base = runpy.run_path(str(pathlib.Path(__file__).with_name("lm1b_large.py")))
smoke = base["smoke"]


def get_config(variant=""):
    config = base["get_config"]()
    config.name = "lm1b_large_tf"
    config.model.update({"untie_r": True, "proj_same_dim": False, "init_std": 0.005})
    config.model.norm_epsilon = 1e-12
    config.optimizer.update({"learning_rate": 1e-4, "min_ratio": 0.01})
    config.train.epoch_memory = "carry"
    config.validate.first_memory = config.evaluate.first_memory = "zeros"
    config.evaluate.same_length = "tf"
    return smoke(config) if variant == "smoke" else config
