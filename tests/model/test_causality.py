"""Outputs do not depend on later inputs: no bit changes, and the gradient is 0."""

import jax
import numpy as np
import pytest
import tiny_models as tiny

FORMS = {
    "post_norm": tiny.config(),
    "pre_norm_window_clamp": tiny.config(pre_lnorm=True, same_length="tf", clamp_len=2),
}

OTHERS = {name: tiny.config(**tiny.attention(name)) for name in tiny.ATTENTION}
OTHERS["clusters"] = tiny.config(cutoffs=(4, 9), div_val=2)


@pytest.mark.parametrize("name", FORMS)
def test_future_embeddings_have_exactly_zero_gradient_and_the_past_does_not(name):
    cfg, seg_len = FORMS[name], 4
    mems = tiny.memory(cfg, (2,), 5)
    core = tiny.apply(cfg, "core")
    first_row = lambda x: core(tiny.variables(cfg), x[None], mems)[0][0]
    x = tiny.embeddings(cfg, 1, seg_len)[0]
    jacobian = np.abs(tiny.quick(jax.jacrev(first_row))(x)).max(axis=(1, 3))  # [output, input]
    for i in range(seg_len):
        np.testing.assert_array_equal(jacobian[i, i + 1 :], 0)
        assert (jacobian[i, : i + 1] > 1e-6).all()


@pytest.mark.parametrize("name", [*FORMS, *OTHERS])
def test_future_tokens_change_no_bit_of_earlier_losses(name):
    cfg = (FORMS | OTHERS)[name]
    mems, tokens = tiny.memory(cfg, (0, 2, 5), 5), tiny.tokens(cfg, 3, 4)
    others = np.where(np.arange(4) < 2, tokens, (tokens + 1) % 13)
    targets = tiny.tokens(cfg, 3, 4, seed=1)
    nll, _ = tiny.apply(cfg, "nll")(tiny.variables(cfg), tokens, targets, mems)
    changed, _ = tiny.apply(cfg, "nll")(tiny.variables(cfg), others, targets, mems)
    np.testing.assert_array_equal(nll[:, :2], changed[:, :2])
    assert (np.abs(nll[:, 2:] - changed[:, 2:]) > 1e-4).all()


def test_a_window_hides_what_is_farther_than_it_reaches_in_one_layer():
    """With one layer and M = 2, the last query attends to distances 0 and 1 (and 2 with "tf")."""
    for window, reach in (("pytorch", 1), ("tf", 2)):
        cfg = tiny.config(n_layer=1, same_length=window)
        mems = tiny.memory(cfg, (2,), 2)
        core = tiny.apply(cfg, "core")
        last = lambda x, f=core, c=cfg, m=mems: f(tiny.variables(c), x[None], m)[0][0, -1]
        jacobian = tiny.quick(jax.jacrev(last))(tiny.embeddings(cfg, 1, 5)[0])
        seen = np.abs(jacobian).max(axis=(0, 2)) > 0
        np.testing.assert_array_equal(seen, np.arange(4, -1, -1) <= reach)
