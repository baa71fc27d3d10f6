"""enwik8, 12 layers: the small model of the paper's table 2.

    python -m txl_jax.main --config=configs/enwik8_12l.py --workdir=runs/enwik8_12l

Without data.path the text is downloaded. data.path can also name the file enwik8.zip or enwik8, or
a folder with the authors' train.txt, valid.txt and test.txt. 41.1M parameters.

Score: 1.06 bits per character (*paper*), here *not run*. Evaluation: test, 10 streams, segments of
80, memory 2,100, same_length window, distances clamped at 820. The authors' preparation leaves
newline bytes out (204 symbols), so a character here is a byte other than a newline. The standard
protocol, data.protocol=bytes, keeps all bytes (205 symbols). Scores of the two protocols cannot be
compared.

Hardware: the authors used four GPUs. On one H100 in bfloat16 an update takes 19.0 ms (*measured*),
so all 400,000 updates take 2.1 hours (*arithmetic*). On a smaller GPU raise train.micro_batches.
Of eight devices, a batch of 22 uses two; a train.batch_size of 16 or 24 uses all.

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from ml_collections import ConfigDict

from .shared.smoke import smoke

VARIANTS = ("smoke",)


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "enwik8_12l",
            "model": {
                "dtype": "auto",
                "n_layer": 12,
                "d_model": 512,
                "n_head": 8,
                "d_head": 64,
                "d_inner": 2048,
                "dropout": 0.1,
                "dropatt": 0.0,
                "scan_layers": "auto",
            },
            "data": {"name": "enwik8", "protocol": "authors"},
            "optimizer": {"learning_rate": 2.5e-4, "warmup_steps": 0},
            "train": {
                "steps": 400_000,
                "batch_size": 22,
                "seg_len": 512,
                "mem_len": 512,
                "log_every": 200,
                "eval_every": 4000,
            },
            "validate": {"batch_size": 10, "seg_len": 128, "mem_len": 896},
            "evaluate": {
                "batch_size": 10,
                "seg_len": 80,
                "mem_len": 2100,
                "clamp_len": 820,
                "same_length": "pytorch",
            },
            "generate": {"prompt": "The "},
            "checkpoint": {"every": 4000},
        }
    )
    return smoke(config) if variant == "smoke" else config
