"""Both programs without memory predict as the model does, and operation counts are right.

The paper's Table 9 compares a model with memory to a vanilla model that reads a window per token.
"""

import numpy as np
import pytest
from tiny_models import config, variables

from txl_jax.analysis import speed
from txl_jax.config import SpeedConfig
from txl_jax.model.transformer_xl import TransformerXL

TINY = config(d_head=4, n_layer=3)


@pytest.mark.integration
@pytest.mark.parametrize("efficient", [True, False], ids=["last only", "every position"])
@pytest.mark.parametrize("length", [1, 7, 150])
@pytest.mark.few(2)
def test_a_window_predicts_what_the_vanilla_model_predicts_after_it(efficient, length):
    model = speed.vanilla(TINY, efficient)
    params = variables(model.cfg)["params"]
    text = np.random.default_rng(0).integers(0, 13, (2, length + 1)).astype(np.int32)
    found = speed.window_nll(model, efficient)(params, text[:, :-1], text[:, -1:])
    plain = TransformerXL(model.cfg)
    logits, _ = plain.apply({"params": params}, text[:, :-1], plain.init_mems(2, 0))
    last = np.asarray(logits[:, -1], np.float64)
    expected = np.log(np.exp(last).sum(-1)) - last[np.arange(2), text[:, -1]]
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)


def test_the_better_windows_leave_out_what_the_last_position_does_not_need():
    """With one layer, only the last position needs a query, scores and a feed-forward network."""
    one = config(n_layer=1, d_head=4)  # width 8, heads 2 x 4, feed-forward 10, vocabulary 13
    length = 5
    keys_and_values = length * 2 * (2 * 8 * 8)
    query_and_output = 2 * (2 * 8 * 8)
    scores_and_sums = 2 * (2 * length * 8)
    feed_forward, words = 2 * (2 * 8 * 10), 2 * 8 * 13
    expected = keys_and_values + query_and_output + scores_and_sums + feed_forward + words
    assert speed.window_flops(one, length) == expected


def test_a_token_with_memory_costs_its_projections_and_three_products_with_every_key():
    """A layer has 4 projections, the feed-forward part, and 3 matrix products with all keys.

    These 3 are the terms a and b of the scores, and the weighted sum of the values.
    """
    keys = 5 + 2
    layer = 4 * (2 * 8 * 8) + 3 * (2 * keys * 8) + 2 * (2 * 8 * 10)
    assert speed.memory_flops(TINY, 5, seg_len=2) == 3 * layer + 2 * 8 * 13


@pytest.mark.slow
def test_rows_have_a_time_for_each_program_and_both_ratios():
    settings = SpeedConfig(lengths=(4, 8), seg_len=4, windows=2, rounds=2)
    rows = list(speed.measure_rows(TINY, settings))
    assert [row["length"] for row in rows] == [4, 8]
    for row in rows:
        took = {name: found["median"] for name, found in row["seconds_per_token"].items()}
        assert set(took) == {"memory", "windows", "recomputed"}
        assert min(took.values()) > 0
        length = row["length"]
        of_all = speed.window_flops(TINY, length) / speed.memory_flops(TINY, length, 4)
        assert row["operations"] == of_all
        assert f"{length:>5}  memory" in speed.format_row(row)
