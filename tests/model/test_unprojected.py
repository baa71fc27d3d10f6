"""For few tokens, attention uses the memory's states unprojected, and gives the same results."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiers import rest_slow

B, M = 3, 5
FORMS = {
    "gtrxl": {"same_length": "tf", "untie_r": True, **tiny.GTRXL},
    "post_norm": {"same_length": "tf"},
    "one_key_less": {"same_length": "pytorch", "clamp_len": 2, "pre_lnorm": True},
    "shaw": tiny.attention("shaw", pre_lnorm=True, attention_bias=True),
    "shared_projection": tiny.attention("shared_projection", pre_lnorm=True),
    "scanned": {"scan_layers": True, **tiny.GTRXL},
}


def both(seg_len, **changes):
    """Two configs of a model: the first leaves memory unprojected, the second projects memory."""
    cfg = tiny.config(d_head=8 * seg_len, **changes)
    return cfg, dataclasses.replace(cfg, kernel="reference")


def outcome(cfg, variables, mems, inputs, reset):
    """The gradient of a weighted sum of the output states; then these states and new memory."""
    core = tiny.apply(cfg, "core")
    weights = np.random.default_rng(1).standard_normal(inputs.shape).astype(np.float32)

    def loss(variables, inputs):
        states, new = core(variables, inputs, mems, reset=reset)
        return jnp.sum(states * weights), (states, new.hidden)

    gradient = tiny.quick(jax.grad(loss, argnums=(0, 1), has_aux=True))
    return gradient(variables, inputs)


def products(cfg, variables, mems, inputs):
    core = functools.partial(tiny.apply(cfg, "core"), variables)
    costs: Any = jax.jit(core).lower(inputs, mems).cost_analysis()
    return costs["flops"]


@pytest.mark.integration
@pytest.mark.parametrize("seg_len", [1, 2])
@pytest.mark.parametrize("name", rest_slow(1, FORMS))
@pytest.mark.few(1)
def test_outputs_and_gradients_are_those_of_projected_states(name, seg_len):
    cfg, projected = both(seg_len, **FORMS[name])
    variables, inputs = tiny.variables(cfg), tiny.embeddings(cfg, B, seg_len)
    mems = tiny.memory(cfg, (0, 2, M), M)
    for reset in (None, np.array([[False] * seg_len, [True] * seg_len, [False] * seg_len])):
        got = outcome(cfg, variables, mems, inputs, reset)
        want = outcome(projected, variables, mems, inputs, reset)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            # The two ways to compute differ by rounding: up to 1e-5 of the largest entry.
            bound = 1e-5 * max(1.0, float(np.abs(b).max()))
            np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def test_few_tokens_need_fewer_operations_and_more_tokens_project_the_states():
    mems_of = lambda cfg: tiny.memory(cfg, (M, M, M), M)
    for seg_len, fewer in ((1, True), (2, False)):
        cfg, projected = both(1, **FORMS["gtrxl"])
        inputs, variables = tiny.embeddings(cfg, B, seg_len), tiny.variables(cfg)
        own, plain = (products(c, variables, mems_of(c), inputs) for c in (cfg, projected))
        assert (own < plain) == fewer, (own, plain)


def test_without_memory_a_step_works():
    cfg, projected = both(1, same_length="tf", **tiny.GTRXL)
    inputs, mems = tiny.embeddings(cfg, B, 1), tiny.memory(cfg, (0, 0, 0), 0)
    got, want = (tiny.apply(c, "core")(tiny.variables(cfg), inputs, mems) for c in (cfg, projected))
    np.testing.assert_array_equal(got[0], want[0])
