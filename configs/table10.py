"""WikiText-103, the paper's table 10: table 6 at equal device memory; a variant for each row.

    python -m txl_jax.main --config=configs/table10.py:no_recurrence_full --workdir=runs/table10

Each variant is a row of the table, a key of ROWS below. ROW-smoke is a small version of ROW. The
default is the first row. Without recurrence, a model of the same shape needs less device memory.
Rows without recurrence use the rest for longer segments, so their gradients reach further back. The
shape (an assumption) and the protocol are those of table6.py, which also has the rows with
recurrence.

Scores (*paper*; here *not run*). The four numbers are the length of backpropagation, the test
perplexity at the training length, the best test perplexity over all attention lengths in
evaluation, and the shortest attention length that reaches this best perplexity.

    recurrence_full      128   27.02   26.77   500
    recurrence_half      128   28.69   28.33   460
    no_recurrence_full   176   28.43   27.98   400
    no_recurrence_half   172   28.83   28.83   120

Hardware: as for table6.py (*not run*).
Of eight GPUs, a batch of 60 uses six, and of eight TPU chips four;
a train.batch_size of 56 or 64 uses all.

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from .shared.rows import row_of
from .shared.smoke import smoke
from .table6 import row_config

ROWS = {
    "recurrence_full": ("relative", True, "full", 500, 128),
    "recurrence_half": ("relative", True, "half", 460, 128),
    "no_recurrence_full": ("relative", False, "full", 400, 176),
    "no_recurrence_half": ("relative", False, "half", 120, 172),
}
"""For each row: position encoding, recurrence, positions in the loss, two lengths.

The lengths are the attention length in evaluation and the segment length in training.
"""


def get_config(variant=""):
    row, small = row_of(variant, ROWS)
    config = row_config(f"table10-{row}", *ROWS[row])
    return smoke(config) if small else config
