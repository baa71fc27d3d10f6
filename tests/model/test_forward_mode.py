"""Forward-mode differentiation: ``jax.jvp``, ``jax.jacfwd`` and ``jax.linearize`` of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiers import rest_integration, rest_slow

from txl_jax.model.kernels import choice
from txl_jax.model.kernels.choice import KernelError

FORMS: dict[str, dict] = {
    "relative": {},
    "shaw": tiny.attention("shaw"),
    "clusters": {"cutoffs": (4, 9), "div_val": 2},
    "mixture": {"mixtures": 2},
    "40,000 words": {"vocab_size": 40_000},
    "scanned": {"scan_layers": True, "remat": "products"},
    "reference": {"kernel": "reference"},
}


def functions(cfg, seg_len):
    """For each method, a function of the parameters whose result depends on every parameter."""
    tokens, x = tiny.tokens(cfg, 2, seg_len), tiny.embeddings(cfg, 2, seg_len)
    mems, reset = tiny.memory(cfg, (3, 0), 5), np.zeros((2, seg_len), bool)
    reset[0, seg_len // 2] = True
    of = lambda method, *given: (
        lambda variables: tiny.apply(cfg, method)(variables, *given, mems, reset=reset)[0]
    )
    return {
        "core": of("core", x),
        "__call__": of("__call__", tokens),
        "nll": of("nll", tokens, tokens),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "seg_len"), rest_slow(4, [("relative", 200), *((form, 6) for form in FORMS)])
)
def test_the_derivative_along_a_direction_is_that_of_reverse_mode(form, seg_len):
    """The test differentiates a randomly weighted mean of a method's results."""
    cfg = tiny.config(**{"n_layer": 1, **FORMS[form]})
    seg_len = 200 if form == "40,000 words" else seg_len
    variables, move = tiny.variables(cfg), tiny.variables(cfg, seed=1)
    for name, function in functions(cfg, seg_len).items():
        if form == "40,000 words" and name == "__call__":
            continue  # this method computes all logits of all tokens
        shape = jax.eval_shape(function, variables).shape
        weights = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        total = lambda v, f=function, w=weights: jnp.mean(w * f(v))
        forward = tiny.quick(lambda v, dv, f=total: jax.jvp(f, (v,), (dv,)))
        value, along = forward(variables, move)
        want, gradient = tiny.quick(jax.value_and_grad(total))(variables)
        products = jax.tree.map(lambda g, dv: np.sum(np.asarray(g) * dv), gradient, move)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        np.testing.assert_allclose(along, sum(jax.tree.leaves(products)), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_jacobians_of_a_long_segment_are_those_of_reverse_mode():
    """Checks ``core`` with several groups of queries; also ``linearize`` and second derivatives."""
    cfg = tiny.config(n_layer=1, vocab_size=None)
    variables, mems = tiny.variables(cfg), tiny.memory(cfg, (3,), 5)
    x = tiny.embeddings(cfg, 1, 150)
    move = tiny.embeddings(cfg, 1, 150, seed=1)
    core = lambda scale: tiny.apply(cfg, "core")(variables, x + scale[0] * move, mems)[0][0, -1]
    scale = jnp.ones(1)
    want = tiny.quick(jax.jacrev(core))(scale)
    np.testing.assert_allclose(tiny.quick(jax.jacfwd(core))(scale), want, atol=1e-5)
    np.testing.assert_allclose(jax.jvp(core, (scale,), (scale,))[1], want[:, 0], atol=1e-5)
    _, linear = jax.linearize(core, scale)
    np.testing.assert_allclose(linear(scale), want[:, 0], atol=1e-5)
    total = lambda scale: (core(scale) ** 2).sum()
    orders = [jax.jacfwd(jax.jacfwd(total)), jax.jacfwd(jax.jacrev(total))]
    second = tiny.quick(jax.jacrev(jax.jacrev(total)))(scale)
    for order in [*orders, jax.jacrev(jax.jacfwd(total))]:
        np.testing.assert_allclose(tiny.quick(order)(scale), second, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("transform", rest_integration(1, [jax.jit, lambda f: f]))
def test_forward_mode_of_a_fused_kernel_names_the_other_implementations(transform, monkeypatch):
    """Plain attention takes the place of a fused kernel. Reverse mode works, forward mode fails."""
    fused = type("Fused", (), {"attend": staticmethod(choice.reference.attend)})
    monkeypatch.setattr(choice, "choose", lambda *_: choice.Choice("pallas_tpu"))
    monkeypatch.setattr(choice, "_module", lambda _: fused)
    cfg = tiny.config(n_layer=1, vocab_size=None)
    mems, x = tiny.memory(cfg, (3, 0), 5), tiny.embeddings(cfg, 2, 6)
    core = lambda x: tiny.apply(cfg, "core")(tiny.variables(cfg), x, mems)[0].sum()
    with pytest.raises(KernelError, match=r"jax\.jvp.*: use model\.kernel = 'reference' or 'xla'"):
        transform(lambda x: jax.jvp(core, (x,), (x,)))(x)
    gradient = transform(jax.grad(core))(x)
    monkeypatch.undo()
    np.testing.assert_allclose(gradient, jax.grad(core)(x), atol=1e-5)
