"""WikiText-103, the paper's table 6: recurrence, position encoding, loss; a variant for each row.

    python -m txl_jax.main --config=configs/table6.py:ours_recurrence_full --workdir=runs/ours

Each variant is a row of the table, a key of ROWS below. ROW-smoke is a small version of ROW. The
default is the first row.

The shape of the table's 128M model was never published. The shape here is that of wt103_base.py
with 7 instead of 16 layers: 128.0M parameters in the rows "ours", and a few more or fewer with
other encodings. Batch size, learning rate and number of updates are those of wt103_base.py.
Gradients go back through segments of 128 tokens (table 10). The memory length is 128, or 0 without
recurrence. The last rows of the table are scores of the 151M model; to reproduce them, use
wt103_base.py with --config.evaluate.mem_len=640, 450 or 300.

Scores (*paper*; here *not run*). The three numbers are the test perplexity at the training length,
the best test perplexity over all attention lengths in evaluation, and the shortest attention length
that reaches this best perplexity.

    ours_recurrence_full                    27.02   26.77   500
    shaw_recurrence_full                    27.94   27.94   256
    ours_recurrence_half                    28.69   28.33   460
    ours_no_recurrence_full                 29.59   29.02   260
    ours_no_recurrence_half                 30.10   30.10   120
    shaw_no_recurrence_full                 29.75   29.75   120
    shaw_no_recurrence_half                 30.50   30.50   120
    absolute_no_recurrence_half             30.97   30.97   120
    absolute_per_layer_no_recurrence_half   31.16   31.16   120

Evaluation: test, 10 streams, at the attention length in the last column. With recurrence: segments
of 64, memory of this length, same_length window, and for "ours" distances clamped at 400 as in
wt103_base.py (an assumption). Without recurrence: segments of 10 after a recomputed context;
context and segment together have the attention length, so the first token of a segment attends to 9
tokens fewer.

To train all rows and score them at all attention lengths, use
--mode=ablation --config=configs/table6.py --workdir=runs/table6

Hardware: as for wt103_base.py; arithmetic gives 1.2e18 operations for each row, 3 hours at a
sustained 100 TFLOP/s (*not run*).
Of eight GPUs, a batch of 60 uses six, and of eight TPU chips four;
a train.batch_size of 56 or 64 uses all.

Dtype: bfloat16 on TPUs, on GPUs from compute capability 8.0 and on AMD CPUs with AVX512-BF16, else
float32, which the authors used.
"""

from . import wt103_base
from .shared.rows import row_of
from .shared.smoke import smoke

ROWS = {
    "ours_recurrence_full": ("relative", True, "full", 500),
    "shaw_recurrence_full": ("shaw", True, "full", 256),
    "ours_recurrence_half": ("relative", True, "half", 460),
    "ours_no_recurrence_full": ("relative", False, "full", 260),
    "ours_no_recurrence_half": ("relative", False, "half", 120),
    "shaw_no_recurrence_full": ("shaw", False, "full", 120),
    "shaw_no_recurrence_half": ("shaw", False, "half", 120),
    "absolute_no_recurrence_half": ("absolute", False, "half", 120),
    "absolute_per_layer_no_recurrence_half": ("absolute_per_layer", False, "half", 120),
}
"""For each row: position encoding, recurrence, positions in the loss, and attention length."""


def row_config(name, attention, recurrence, positions, attention_len, seg_len=128):
    """Returns wt103_base with 7 layers and the settings of a row.

    The memory length in training is ``seg_len`` with recurrence, else 0.
    """
    config = wt103_base.get_config()
    memory = seg_len if recurrence else 0
    config.name = name
    config.model.update({"n_layer": 7, "attention": attention})
    if attention in ("shaw", "absolute_per_layer"):
        config.model.n_positions = seg_len + memory
    config.loss = {"positions": positions}
    config.train.update({"seg_len": seg_len, "mem_len": memory})
    config.validate.update({"seg_len": seg_len, "mem_len": memory})
    if recurrence:
        config.evaluate.mem_len = attention_len
        config.evaluate.clamp_len = 400 if attention == "relative" else -1
    else:
        context = attention_len - 10
        config.evaluate = {"batch_size": 10, "seg_len": 10, "mem_len": 0, "context_len": context}
    config.ablation = {"lengths": (120, 180, 260, 320, 400, 460, 500, 560, 640)}
    return config


def get_config(variant=""):
    row, small = row_of(variant, ROWS)
    config = row_config(f"table6-{row}", *ROWS[row])
    return smoke(config) if small else config
