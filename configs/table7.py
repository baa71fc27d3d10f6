"""One Billion Word, the paper's table 7: recurrence and position encoding; a variant for each row.

    python -m txl_jax.main --config=configs/table7.py:ours --workdir=runs/table7-ours

Each variant is a row of the table, a key of ROWS below. ROW-smoke is a small version of ROW. The
default is the first row.

The table's model has 20 layers and 0.3B parameters; the rest of its shape was never published. The
model here is that of lm1b_base.py with 20 layers and inner width 2,048: 301.2M parameters in the
row "ours". Batch size, learning rate and number of updates are those of lm1b_base.py.

Scores, test perplexity (*paper*; here *not run*): ours 25.2, shaw 25.7, no_recurrence 27.1.
Evaluation: test, 64 streams; segments of 32, memory 128 and a same_length window. The row
no_recurrence has segments of 8 after 24 tokens of recomputed context, together as long as a
training segment (an assumption).

Hardware: as for lm1b_base.py; arithmetic gives 6.8e18 operations for each row, 19 hours at a
sustained 100 TFLOP/s (*not run*).

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import lm1b_base
from .shared.rows import row_of
from .shared.smoke import smoke

ROWS = {"ours": ("relative", True), "shaw": ("shaw", True), "no_recurrence": ("relative", False)}
"""For each row: position encoding, and whether the model has recurrence."""


def get_config(variant=""):
    row, small = row_of(variant, ROWS)
    attention, recurrence = ROWS[row]
    config = lm1b_base.get_config()
    config.name = f"table7-{row}"
    config.model.update({"n_layer": 20, "d_inner": 2048, "attention": attention})
    if attention == "shaw":
        config.model.n_positions = config.train.seg_len + config.train.mem_len
    if not recurrence:
        config.train.mem_len = config.validate.mem_len = 0
        config.evaluate = {"batch_size": 64, "seg_len": 8, "mem_len": 0, "context_len": 24}
    config.ablation = {"lengths": (32, 64, 96, 128)}
    return smoke(config) if small else config
