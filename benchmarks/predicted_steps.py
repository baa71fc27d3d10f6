"""Predicted time of an update of the large recipes, as rows of a table. Nothing is run.

    python -m benchmarks.predicted_steps

Assumptions and formulas: txl_jax/planning/prediction.py, machines.py, flops.py. What the programs
hold: ``python -m txl_jax.main --mode=compile``, see benchmarks/README.md.
"""

import pathlib

import jax

from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import ExperimentConfig, load_config
from txl_jax.planning.flops import update_flops
from txl_jax.planning.machines import CHIPS
from txl_jax.planning.prediction import predict_step_time
from txl_jax.planning.vocabulary import with_vocab_size

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
RECIPES = ("enwik8_24l", "wt103_large", "lm1b_large")
MACHINES = (
    ("v5e-16", "v5e", 16),
    ("v5p-32", "v5p", 16),
    ("8 x H100", "h100", 8),
    ("8 x H200", "h200", 8),
)
"""What it is called, its chip, and how many: a v5p-32 has 32 cores on 16 chips."""


def rows(exp: ExperimentConfig) -> list[str]:
    """A row of every machine."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(exp.model)))
    operations = sum(update_flops(exp))
    found = []
    for name, kind, chips in MACHINES:
        fsdp = chips if (exp.name, name) == ("lm1b_large", "v5e-16") else 1  # it does not fit else
        p = predict_step_time(exp, parameters, CHIPS[kind], data=chips // fsdp, fsdp=fsdp)
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
