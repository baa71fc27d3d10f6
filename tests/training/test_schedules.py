"""Every schedule gives the learning rate of its formula at every step."""

import math

import numpy as np
import pytest

from txl_jax.config import OptimizerConfig
from txl_jax.training.optimizer import schedule

STEPS = 50


def by_hand(c, t):
    """The learning rate of update t = 0, 1, .., from the schedule's formula."""
    if t < c.warmup_steps:
        return c.learning_rate * (t + 1) / c.warmup_steps
    if c.schedule == "constant":
        return c.learning_rate
    if c.schedule == "inverse_sqrt":
        return c.learning_rate / math.sqrt((t + 1) / c.warmup_steps)
    angle = math.pi * (t - c.warmup_steps) / (STEPS - c.warmup_steps)
    lowest = c.learning_rate * c.min_ratio
    return lowest + (c.learning_rate - lowest) * (1 + math.cos(angle)) / 2


@pytest.mark.parametrize("name", ["cosine", "inverse_sqrt", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
@pytest.mark.parametrize("min_ratio", [0.0, 0.1])
def test_rate_is_the_formula_at_every_step(name, warmup_steps, min_ratio):
    if name == "inverse_sqrt" and not warmup_steps:
        pytest.skip("refused by the config: inverse_sqrt is scaled by its warm-up")
    c = OptimizerConfig(
        learning_rate=3e-4, schedule=name, warmup_steps=warmup_steps, min_ratio=min_ratio
    )
    rate = schedule(c, STEPS)
    got = [float(rate(t)) for t in range(STEPS)]
    np.testing.assert_allclose(got, [by_hand(c, t) for t in range(STEPS)], rtol=2e-5, atol=1e-10)


def test_first_update_is_not_at_the_full_rate_under_warmup():
    c = OptimizerConfig(learning_rate=1.0, warmup_steps=10)
    assert float(schedule(c, STEPS)(0)) == pytest.approx(0.1)


def test_cosine_ends_at_its_least_ratio():
    c = OptimizerConfig(learning_rate=1.0, warmup_steps=10, min_ratio=0.25)
    assert float(schedule(c, STEPS)(STEPS)) == pytest.approx(0.25)
