"""Functions of the model and its memory are exported by jax.export, stored, and run again."""

import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import model_settings
import numpy as np
import pytest
import tiny_models as tiny
from tiers import rest_integration, rest_slow

from txl_jax.model.kernels.choice import FUSED

M, T = 8, 4
FEW = ("div_val=2",)
"""Models whose tests are not slow. This one has clusters of three widths, hence the most shapes."""
ROUNDING = 1e-5
"""Tolerance for float32: compiled programs sum in another order than single operations."""


def stored(function, *arguments):
    """The function after it was exported for all platforms, serialized and deserialized."""
    exported = jax.export.export(jax.jit(function), platforms=("cpu", "cuda", "tpu"))(*arguments)
    return jax.export.deserialize(exported.serialize()).call


def assert_equal(a, b, atol):
    """Checks that the trees have one structure, and equal numbers to within ``atol``."""
    kinds: list[Any] = list(map(jax.tree.structure, (a, b)))
    assert kinds[0] == kinds[1]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol, rtol=0), a, b)


@pytest.mark.parametrize("clamp_len", rest_integration(1, [3, -1]))
def test_functions_of_memory_and_cache_are_stored_with_their_classes(clamp_len):
    cfg = tiny.config(clamp_len=clamp_len)
    variables, mems, tokens = tiny.variables(cfg), tiny.memory(cfg, [5, 8], 20), tiny.tokens
    segment = tokens(cfg, 2, 9)
    cache = tiny.apply(cfg, "init_cache")(variables, mems, seg_len=9)
    assert (cache.far is not None) == (clamp_len == 3)
    call = tiny.apply(cfg, "__call__")
    for past in (mems, cache):
        loaded = stored(call, variables, segment, past)
        assert_equal(loaded(variables, segment, past), call(variables, segment, past), ROUNDING)


def cases():
    """Every model of ``model_settings``, those of :data:`FEW` first.

    Fused kernels are left out, since they do not run on a CPU. The dtypes bfloat16, float16 and
    ``auto`` (bfloat16 on some CPUs) are left out too: with them, the compiler chooses after which
    operations it rounds.
    """
    models = dict(model_settings.models())
    narrow = [f"dtype={dtype}" for dtype in ("bfloat16", "float16", "auto")]
    for name in [*(f"kernel={kernel}" for kernel in FUSED), *narrow]:
        del models[name]
    return [*((name, models[name]) for name in FEW), *models.items()]


@pytest.mark.integration
@pytest.mark.parametrize(("name", "cfg"), rest_slow(len(FEW), cases()))
def test_any_number_of_rows_gives_the_numbers_of_the_model(name, cfg):
    variables, mem_len = tiny.variables(cfg), 0 if cfg.memory_free else M
    (rows,) = jax.export.symbolic_shape("b")
    symbolic = lambda x, axis: jax.ShapeDtypeStruct(
        (*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype
    )
    segments = {b: tiny.tokens(cfg, b, T, seed=b) for b in (1, 3)}
    memories = {b: tiny.memory(cfg, [5] * b, mem_len) for b in segments}
    of_one = symbolic(segments[1], 0)
    shapes = memories[1].replace(
        hidden=symbolic(memories[1].hidden, 1), filled=symbolic(memories[1].filled, 0)
    )
    nll, logits = (tiny.apply(cfg, method) for method in ("nll", "__call__"))
    stored_nll = stored(nll, variables, of_one, of_one, shapes)
    stored_logits = stored(logits, variables, of_one, shapes)
    for b, tokens in segments.items():
        scored = variables, tokens, tokens[:, ::-1], memories[b]
        assert_equal(stored_nll(*scored), nll(*scored), ROUNDING)
        read = variables, tokens, memories[b]
        assert_equal(stored_logits(*read), logits(*read), ROUNDING)


@pytest.mark.parametrize("seg_len", [3, 4])
def test_a_gradient_in_bfloat16_is_exported_for_any_number_of_rows(seg_len):
    """bfloat16 gradients of matrices read rows in pairs only if the number of rows is known."""
    cfg = tiny.config(dtype="bfloat16", n_layer=1)
    (rows,) = jax.export.symbolic_shape("b")
    tokens, mems = tiny.tokens(cfg, 2, seg_len), tiny.memory(cfg, [5, 3], M)
    mems = mems.replace(hidden=mems.hidden.astype(jnp.bfloat16))
    shape = lambda x, axis: jax.ShapeDtypeStruct(
        (*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype
    )
    shapes = mems.replace(hidden=shape(mems.hidden, 1), filled=shape(mems.filled, 0))
    loss = lambda v, tokens, mems: tiny.apply(cfg, "nll")(v, tokens, tokens, mems)[0].mean()
    gradient = jax.jit(jax.grad(loss))
    exported = jax.export.export(gradient)(tiny.variables(cfg), shape(tokens, 0), shapes)
    got = exported.call(tiny.variables(cfg), tokens, mems)
    want = gradient(tiny.variables(cfg), tokens, mems)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05 * float(np.abs(b).max()))
