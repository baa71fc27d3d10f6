"""The settings of every form of model that generates text, and prompts for these models."""

from typing import Any

import numpy as np
import pytest
import tiny_models

CFG = tiny_models.config(n_layer=2)
WITH_MEMORY: dict[str, dict[str, Any]] = {
    "relative": {},
    "pre_lnorm": {"pre_lnorm": True},
    "gtrxl": tiny_models.GTRXL,
    "shaw": {"attention": "shaw", "n_positions": 6},
    "shared_projection": {"attention": "shared_projection"},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2},
}
WITHOUT_MEMORY: dict[str, dict[str, Any]] = {
    "absolute": {"attention": "absolute", "n_positions": 2},  # n_positions has no effect
    "absolute_per_layer": {"attention": "absolute_per_layer", "n_positions": 5, "d_head": 4},
}


def some(forms, *default):
    """All of the forms as test parameters; those not in ``default`` are slow tests."""
    slow = lambda form: () if form in default else (pytest.mark.slow,)
    return [pytest.param(form, marks=slow(form)) for form in forms]


def prompts_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, CFG.vocab_size, n).astype(np.int32) for n in lengths]
