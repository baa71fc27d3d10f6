"""Predicted time of an update of the large recipes, as rows of a table. Nothing is run.

    python -m benchmarks.predicted_steps

Assumptions and formulas: txl_jax/planning/prediction.py, chips.py, products.py. What the programs
hold: ``python -m txl_jax.main --mode=compile``, see benchmarks/README.md.
"""

import pathlib

import jax
from txl_jax.planning.chips import CHIPS
from txl_jax.planning.products import of_update

from txl_jax.checkpoint.trained_model import param_shapes
from txl_jax.config import ExperimentConfig, load_config
from txl_jax.planning.prediction import predicted
from txl_jax.planning.vocabulary import with_known_size

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
    operations = sum(of_update(exp))
    found = []
    for name, kind, chips in MACHINES:
        fsdp = chips if (exp.name, name) == ("lm1b_large", "v5e-16") else 1  # it does not fit else
        p = predicted(exp, parameters, CHIPS[kind], data=chips // fsdp, fsdp=fsdp)
        times = " | ".join(f"{1e3 * x:,.0f}" for x in (p.products, p.traffic, p.exchange))
        span = f"{1e3 * p.at_best:,.0f} to {1e3 * p.at_worst:,.0f}"
        days = " to ".join(f"{x * exp.train.steps / 86_400:,.1f}" for x in (p.at_best, p.at_worst))
        cells = (f"`{exp.name}`", name, f"{operations:.2e}", times, span, days)
        found.append(f"| {' | '.join(cells)} |")
    return found


if __name__ == "__main__":
    for recipe in RECIPES:
        print("\n".join(rows(with_known_size(load_config(str(CONFIGS / f"{recipe}.py"))))))
