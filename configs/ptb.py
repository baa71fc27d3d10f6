"""Penn Treebank with memory, 23.5M parameters: the candidate recipe, *not run* yet.

    python -m txl_jax.main --config=configs/ptb.py --config.data.path=FOLDER --workdir=runs/ptb

FOLDER contains ptb.train.txt, ptb.valid.txt and ptb.test.txt. data.path can also name the published
archive; without data.path the archive is downloaded. 23.5M parameters: 12 layers of width
400, each with its own projection of positions (the paper's attention). The memory length is 80, and
segment lengths are random, around 80. In every epoch each stream of text begins at a random place
(partial shuffling, Press 2019). Dropout of hidden states uses one mask for all positions of a
sequence ("locked"), and the L2 term is added to the gradient. Training keeps two averages of the
weights: a plain average over the last 50 of 250 epochs, and an exponential moving average over all
epochs. The final model has the raw weights or one of the averages, whichever has the lowest
validation loss. One epoch here means 290 updates.

Score: *not run*. The paper reports a test perplexity of 54.52 (*paper*), but its recipe was never
published; configs/ptb_authors.py is a recipe that the authors released later. Seeds, validation and
test perplexity at temperature 1 will be listed here. Evaluation: test, one stream, segments of 10,
memory 160.

Hardware: one GPU, 72,500 updates of 40 streams (time *not run*). benchmarks/ptb_gpu.sh splits the
training into calls of limited time, and can train several seeds at once. On a CPU, give
--config.train.steps_per_dispatch=1, or use ptb_small.py.

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from ml_collections import ConfigDict

from .shared.smoke import smoke

EPOCH = 290

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "ptb",
            "model": {
                "dtype": "auto",
                "n_layer": 12,
                "d_model": 400,
                "n_head": 10,
                "d_head": 40,
                "d_inner": 1024,
                "dropout": 0.3,
                "dropout_input": 0.6,
                "dropout_output": 0.65,
                "dropout_qkv": 0.1,
                "dropout_embedding": 0.25,
                "dropout_mask": "locked",
                "dropatt": 0.15,
            },
            "data": {"name": "ptb"},
            "loss": {"ar": 0.1, "tar": 0.05},
            "optimizer": {
                "learning_rate": 8e-4,
                "warmup_steps": 10 * EPOCH,
                "min_ratio": 1 / 8,
                "l2": 1.2e-6,
            },
            "average": {"swa_start": 200 * EPOCH, "swa_lr_ratio": 0.5, "ema_decay": 0.9998},
            "train": {
                "steps": 250 * EPOCH,
                "steps_per_dispatch": EPOCH,
                "batch_size": 40,
                "seg_len": 80,
                "mem_len": 80,
                "seg_len_std": 5.0,
                "partial_shuffle": True,
                "text_on_device": True,
                "epoch_memory": "reset",
                "log_every": EPOCH,
                "eval_every": 5 * EPOCH,
            },
            "validate": {"batch_size": 10, "seg_len": 80, "mem_len": 160},
            "evaluate": {"batch_size": 1, "seg_len": 10, "mem_len": 160},
            "generate": {"mem_len": 160},
            "checkpoint": {"every": EPOCH},
        }
    )
    return smoke(config) if variant == "smoke" else config
