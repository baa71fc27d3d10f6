"""Predicted time of an update of the large recipes, as rows of a table. Nothing is run.

    python -m benchmarks.predicted_steps

The time comes from operations, bytes and a chip's figures (txl_jax/planning/machines.py):

    compute         operations of a chip's rows (flops.py) / (EFFICIENCY x the chip's rate)
    traffic         bytes that each chip moves to and from its memory / bandwidth
    communication   bytes that each chip sends to others / its links

An update takes from max(compute, traffic, communication), with full overlap, to their sum. It was
never compared with a run on these machines: plan with it as a bound. What the programs hold:
``python -m txl_jax.main --mode=compile``, see benchmarks/README.md.
"""

import dataclasses
import pathlib

import jax

from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import ExperimentConfig, load_config
from txl_jax.model.flops import update_flops
from txl_jax.planning.machines import CHIPS, Chip
from txl_jax.planning.vocabulary import with_vocab_size

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
RECIPES = ("enwik8_24l", "wt103_large", "lm1b_large")
MACHINES = (
    ("v5e-16", "v5e", 16),
    ("v5p-32", "v5p", 16),
    ("8 x H100", "h100", 8),
    ("8 x H200", "h200", 8),
    ("1 x H100", "h100", 1),
    ("1 x H200", "h200", 1),
)
"""What it is called, its chip, and how many: a v5p-32 has 32 cores on 16 chips.

One chip alone takes the batch in eighths (``train.micro_batches``), as in compile_recipes.py.
"""
EFFICIENCY = 0.5
"""Share of a chip's rate that matrix products of these sizes are assumed to reach."""

_STATE_BYTES = 32
"""Float32 traffic of a parameter in an update: its gradient is written and read, the parameter and
both moments of Adam or LAMB are read and written."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one update, *predicted*."""

    compute: float
    traffic: float
    communication: float

    @property
    def overlapped(self) -> float:
        """If all of it overlaps."""
        return max(self.compute, self.traffic, self.communication)

    @property
    def sequential(self) -> float:
        """If nothing overlaps."""
        return self.compute + self.traffic + self.communication


def predict_step_time(
    exp: ExperimentConfig, parameters: int, chip: Chip, data: int, fsdp: int = 1
) -> StepTime:
    """One update on a mesh of ``data`` x ``fsdp`` chips; ``exp`` has ``model.vocab_size``.

    ``model.dtype`` ``auto`` is the type that the chip would compute in.
    """
    chips, dtype = data * fsdp, exp.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if chip.has_bfloat16 else "float32"
    exp = dataclasses.replace(exp, model=dataclasses.replace(exp.model, dtype=dtype))
    rate = EFFICIENCY * (chip.float32_flops if dtype == "float32" else chip.flops)
    weights_read = 2 * 4 * parameters * exp.train.micro_batches
    moved = _STATE_BYTES * parameters / fsdp + weights_read + _activation_bytes(exp) / chips
    # Rings: an all-reduce sends the gradient twice; with fsdp the gradient is scattered once, and
    # the weights are gathered forward and backward.
    sent = 4 * parameters * ((0 if data == 1 else 2 / fsdp) + (0 if fsdp == 1 else 3))
    flops = sum(update_flops(exp, -(-exp.train.batch_size // chips)))
    return StepTime(flops / rate, moved / chip.bandwidth, sent / chip.link)


def _activation_bytes(exp: ExperimentConfig) -> float:
    """Bytes of activations moved in an update, all chips together; a rough count.

    With a bytes a value: of each of the L B N T K scores forward 16 + 4a (two float32 products
    written and read; weights written, dropped out and read), of each of the L B T D states
    14a (projections, residuals, normalisation), of each of the L B T F inner ones 4a; backward
    twice that; forward once more with ``remat`` "layer"; all of it twice with ``loss.r_drop``.
    """
    c, t = exp.model, exp.train
    a = 4 if c.dtype == "float32" else 2
    length = t.context_len + t.seg_len
    positions = c.n_layer * t.batch_size * length * (2 if exp.loss.r_drop else 1)
    scores = positions * c.n_head * (t.mem_len + length) * (16 + 4 * a)
    states = positions * (14 * a * c.d_model + 4 * a * c.d_inner)
    return (4 if c.remat == "layer" else 3) * (scores + states)


def rows(exp: ExperimentConfig) -> list[str]:
    """A row of every machine."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(exp.model)))
    operations = sum(update_flops(exp))
    found = []
    in_eighths = dataclasses.replace(exp, train=dataclasses.replace(exp.train, micro_batches=8))
    for name, kind, chips in MACHINES:
        fsdp = chips if (exp.name, name) == ("lm1b_large", "v5e-16") else 1  # it does not fit else
        here = in_eighths if chips == 1 else exp
        p = predict_step_time(here, parameters, CHIPS[kind], data=chips // fsdp, fsdp=fsdp)
        times = " | ".join(f"{1e3 * x:,.0f}" for x in (p.compute, p.traffic, p.communication))
        span = f"{1e3 * p.overlapped:,.0f} to {1e3 * p.sequential:,.0f}"
        seconds = (x * exp.train.steps for x in (p.overlapped, p.sequential))
        days = " to ".join(f"{x / 86_400:,.1f}" for x in seconds)
        cells = (f"`{exp.name}`", name, f"{operations:.2e}", times, span, days)
        found.append(f"| {' | '.join(cells)} |")
    return found


if __name__ == "__main__":
    for recipe in RECIPES:
        print("\n".join(rows(with_vocab_size(load_config(str(CONFIGS / f"{recipe}.py"))))))
