"""Run by an interpreter, the fused kernel for TPUs equals plain attention; it compiles for TPUs.

No TPU is needed. The interpreter runs the kernel's operations one by one on the CPU. If libtpu is
installed, the tests also compile the kernel for absent chips.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_devices import absent_tpus, needs_libtpu
from jax.experimental.pallas import tpu as pltpu
from tiny_models import quick

from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.kernels import AttentionInputs, pallas_tpu, reference
from txl_jax.model.kernels.pallas_tpu_tiles import Tiles
from txl_jax.model.masks import AttentionMask, attention_mask
from txl_jax.model.positions import Positions

N, B, S = 2, 3, 16
NAMES = ("out", "dq", "dk", "dval", "du", "dv", "dr")
TOLERANCE = 3e-6
"""The allowed error in float32, relative to the largest entry of the expected array.

Measured: at most 1.1e-6, with three seeds for each case.
"""


def inputs(t, m, h, dtype=np.float32, seed=0):
    """Random q, k, val, u, v and r, which all affect the result, and weights for the result."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    # Half of a model's scale: an attention weight near 1 would amplify its rounding in dq.
    scale = dtype(0.5 * h**-0.5)
    q, u, v = draw(N, B, t, h) * scale, draw(N, h) * scale, draw(N, h) * scale
    keys = draw(N, B, m + t, h), draw(N, B, m + t, h)
    return (q, *keys, u, v, draw(N, m + t, h)), draw(N, B, t, h)


def values_and_gradients(attend, arrays, weights, mask, dropout=None):
    """The result, and gradients of its weighted sum, in the order of ``NAMES``."""

    def loss(q, k, val, u, v, r):
        out = attend(AttentionInputs(q, k, val, Positions(u, v, r), mask, dropout))
        return jnp.sum(out.astype(jnp.float32) * weights.astype(jnp.float32)), out

    grad = jax.value_and_grad(loss, argnums=range(6), has_aux=True)
    (_, out), gradients = quick(grad)(*arrays)
    return out, *gradients


def fused(tile=S, interpret=True):
    return functools.partial(pallas_tpu.attend, tile=tile, interpret=interpret)


def differences(some, others):
    """For each name, the largest difference divided by the largest entry of ``others`` (if not 0).

    The result is NaN if either array has a NaN: NumPy's ``max`` keeps NaN, Python's can lose it.
    """
    f32 = lambda x: np.asarray(x, np.float32)
    apart = lambda x, y: np.max(np.abs(f32(x) - f32(y))) / (np.max(np.abs(f32(y))) or 1.0)
    return {name: apart(x, y) for name, x, y in zip(NAMES, some, others, strict=True)}


def resets(t):
    """Resets [B,t]: none in row 0, at the first token and late in row 1, two in a tile in row 2."""
    reset = np.zeros((B, t), bool)
    reset[1, [0, t - 2]] = reset[2, [3, 9]] = True
    return reset


CASES = {
    "causal with memory": {},
    "window shorter than a tile": {"same_length": "tf", "m": 3},
    "memory in part": {"filled": (0, 17, 50), "m": 50, "t": 20},
    "distances clamped, dropout": {"clamp": 9, "rate": 0.3},
    "all": {
        "same_length": "pytorch",
        "m": 30,
        "filled": (1, 12, 30),
        "reset": True,
        "clamp": 20,
        "rate": 0.15,
        "h": 8,
    },
    "no memory": {"m": 0, "t": 37},
    "one query": {"t": 1, "m": 40},
    "heads of 41": {"h": 41},
}
MORE_CASES = {
    "resets": {"reset": True},
    "window of M": {"same_length": "pytorch", "m": 16},
    "whole tiles": {"t": 32, "m": 48},
    "one tile": {"t": 5, "m": 7},
    "70 and 70, window of M and one": {"t": 70, "m": 70, "same_length": "tf"},
    "one query, no memory": {"t": 1, "m": 0},
    "heads of 48": {"h": 48, "t": 17, "m": 15},
    "heads of 64": {"h": 64},
    "heads of 128": {"h": 128},
}


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.few(3)
def test_fused_equals_plain_attention_with_every_gradient(case):
    settings = {"t": 40, "m": 24, "h": 5, "filled": None, "same_length": False, **case}
    t, m = settings["t"], settings["m"]
    arrays, weights = inputs(t, m, settings["h"])
    if "clamp" in case:
        nearest = np.maximum(np.arange(m + t), m + t - 1 - case["clamp"])
        arrays = (*arrays[:-1], arrays[-1][:, nearest])
    filled = jnp.asarray(settings["filled"] or (m,) * B, jnp.int32)
    reset = jnp.asarray(resets(t)) if case.get("reset") else None
    mask = attention_mask(t, filled, m, settings["same_length"], reset)
    dropout = None
    if "rate" in case:
        dropout = AttentionDropout(jnp.asarray((3, 5), jnp.uint32), case["rate"])
    plain = values_and_gradients(reference.attend, arrays, weights, mask, dropout)
    tiled = values_and_gradients(fused(), arrays, weights, mask, dropout)
    apart = differences(tiled, plain)
    assert np.max(list(apart.values())) < TOLERANCE, apart


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES.values(), ids=MORE_CASES)
def test_fused_equals_plain_attention_at_other_sizes(case):
    test_fused_equals_plain_attention_with_every_gradient(case)


@pytest.mark.slow
def test_tiles_of_the_size_that_a_tpu_has():
    t, m = 140, 200
    arrays, weights = inputs(t, m, 5)
    mask = attention_mask(t, jnp.asarray((200, 3, 0)), m)
    plain = values_and_gradients(reference.attend, arrays, weights, mask)
    tiled = values_and_gradients(fused(None), arrays, weights, mask)
    apart = differences(tiled, plain)
    assert np.max(list(apart.values())) < TOLERANCE, apart


@pytest.mark.integration
def test_nothing_is_read_before_it_is_written():
    arrays, weights = inputs(20, 12, 5)
    mask = attention_mask(20, jnp.asarray((12, 3, 0)), 12)
    plain = values_and_gradients(reference.attend, arrays, weights, mask)
    memories = pltpu.InterpretParams(uninitialized_memory="nan")
    tiled = values_and_gradients(fused(interpret=memories), arrays, weights, mask)
    apart = differences(tiled, plain)
    assert np.max(list(apart.values())) < TOLERANCE, apart


@pytest.mark.parametrize("absent", ["u", "v"])
def test_forms_without_a_bias(absent):
    (q, k, val, u, v, r), _ = inputs(20, 12, 5)
    positions = Positions(u, v, r).replace(**{absent: None})
    mask = attention_mask(20, jnp.full(B, 12), 12)
    x = AttentionInputs(q, k, val, positions, mask)
    plain = reference.attend(x)
    tiled = quick(fused())(x)
    np.testing.assert_allclose(tiled, plain, rtol=0, atol=TOLERANCE * np.max(np.abs(plain)))


def test_dropout_drops_the_weights_that_plain_attention_drops():
    t, m, rate = 20, 13, 0.25
    (q, k, _, u, v, r), _ = inputs(t, m, m + t)
    shown = jnp.broadcast_to(jnp.eye(m + t), k.shape)  # so that the result equals the weights
    mask = attention_mask(t, jnp.full(B, m), m)
    dropout = AttentionDropout(jnp.asarray((2**31 + 3, 7), jnp.uint32), rate)
    x = AttentionInputs(q, k, shown, Positions(u, v, r), mask, dropout)
    dropped, plain = (quick(f)(x) for f in (fused(), reference.attend))
    whole = quick(reference.attend)(x.replace(dropout=None))
    np.testing.assert_array_equal(dropped == 0, plain == 0)
    share = np.mean(np.asarray(dropped)[np.asarray(whole) > 0] == 0)
    assert abs(share - rate) < 0.03


def test_bfloat16_rounds_no_more_than_its_size():
    t, m, h = 40, 24, 48
    arrays, weights = inputs(t, m, h, jnp.bfloat16)
    mask = attention_mask(t, jnp.asarray((24, 3, 0)), m)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, weights))
    exact = values_and_gradients(reference.attend, wide[0], wide[1], mask)
    rounded = values_and_gradients(fused(), arrays, weights, mask)
    assert {x.dtype for x in rounded} == {jnp.dtype(jnp.bfloat16)}
    apart = differences(rounded, exact)
    # bfloat16 has 8 bits, and sums add a few roundings; measured: 0.004, and 0.012 for du and dv.
    assert np.max(list(apart.values())) < 2**-6, apart


@pytest.mark.parametrize(("filled", "reach"), [(8, 79), (60, 10)], ids=["empty", "beyond"])
def test_what_nobody_sees_is_not_read(filled, reach):
    t, m = 20, 60  # three tiles of 16 keys are empty, or beyond the window
    (q, k, val, u, v, r), weights = inputs(t, m, 5)
    mask = AttentionMask(jnp.full(B, filled), None, t, m, reach)
    clean = values_and_gradients(reference.attend, (q, k, val, u, v, r), weights, mask)
    spoilt = (q, k.at[:, :, :48].set(np.nan), val.at[:, :, :48].set(np.nan), u, v, r)
    apart = differences(values_and_gradients(fused(), spoilt, weights, mask), clean)
    assert np.max(list(apart.values())) < TOLERANCE, apart


@pytest.mark.parametrize(("t", "m"), [(40, 24), (33, 0), (7, 50), (64, 64), (1, 16)])
@pytest.mark.parametrize("reach", [3, 16, 31, 1000])
def test_exactly_the_tiles_that_someone_sees_are_computed(t, m, reach):
    filled = jnp.asarray((0, min(m, 17), m))
    mask = AttentionMask(filled, None, t, m, min(reach, m + t - 1))
    tiles = Tiles(S, t, m, mask.reach, None)
    more = tiles.n_q * S - t, tiles.n_k * S - (m + t)
    cells = np.pad(np.asarray(mask.allowed()), [(0, 0), (0, more[0]), (0, more[1])])
    anyone = np.asarray(cells.reshape(B, tiles.n_q, S, tiles.n_k, S).any((2, 4)))
    first, last = tiles.spans(filled)
    j, low = np.arange(tiles.n_k), np.reshape(first, (B, tiles.n_q, 1))
    np.testing.assert_array_equal((j >= low) & (j <= np.asarray(last)[:, None]), anyone)
    assert tiles.scores() == anyone[2].sum() * S**2  # of row 2, whose memory is full


def test_forms_that_it_does_not_have_are_refused_with_the_reason():
    (_, _, _, u, v, r), _ = inputs(4, 3, 5)

    def why(positions, k=7, dtype=jnp.float32) -> Any:
        shape: Any = lambda length: jax.ShapeDtypeStruct((N, B, length, 5), dtype)
        mask = attention_mask(4, jnp.full(B, k - 4), k - 4)
        x = AttentionInputs(shape(4), shape(k), shape(k), positions, mask)
        return pallas_tpu.supports(x)

    assert why(Positions(u, v, r)) is None
    assert why(Positions(u, v, r), dtype=jnp.bfloat16) is None
    assert "this attention has none" in why(Positions())
    assert "a learnt score for each distance" in why(Positions(u, v, r, b=r[..., 0]))
    assert "not float16" in why(Positions(u, v, r), dtype=jnp.float16)
    assert "do not fit into on-chip memory" in why(Positions(u, v, r), k=20_000)


# Compilation for absent TPUs.


def compiled_for(topology, n, b, t, m, h, dtype=jnp.bfloat16, reset=False, rate=None):
    """The gradient (values included) of the fused kernel, compiled for a chip of a slice."""
    with absent_tpus(topology) as devices:
        there = jax.sharding.SingleDeviceSharding(devices[0])
        shape = lambda *s, dtype=dtype: jax.ShapeDtypeStruct(s, dtype, sharding=there)

        def loss(q, k, val, u, v, r, filled, episode, seed):
            mask = AttentionMask(filled, episode, t, m, m + t - 1)
            dropout = None if rate is None else AttentionDropout(seed, rate)
            out = pallas_tpu.attend(AttentionInputs(q, k, val, Positions(u, v, r), mask, dropout))
            return jnp.sum(out.astype(jnp.float32) ** 2)

        keys = shape(n, b, m + t, h)
        arrays = shape(n, b, t, h), keys, keys, shape(n, h), shape(n, h), shape(n, m + t, h)
        episode = shape(b, t, dtype=jnp.int32) if reset else None
        masks = shape(b, dtype=jnp.int32), episode, shape(2, dtype=jnp.uint32)
        grad = jax.value_and_grad(loss, argnums=range(6))
        return jax.jit(grad).lower(*arrays, *masks).compile()


slow = pytest.mark.slow
SHAPES = [
    pytest.param({"h": 64, "rate": 0.1}, id="heads of 64, dropout"),
    pytest.param({"h": 128}, id="heads of 128", marks=slow),
    pytest.param({"h": 41, "t": 70, "m": 70, "reset": True}, id="odd sizes, resets", marks=slow),
    pytest.param({"h": 48, "dtype": jnp.float32}, id="float32", marks=slow),
    pytest.param({"h": 64, "t": 1, "m": 500}, id="one query", marks=slow),
    pytest.param({"h": 128, "t": 4096, "m": 4096}, id="as long as it takes", marks=slow),
]


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("form", SHAPES)
def test_it_compiles_for_tpus(topology, form):
    program = compiled_for(topology, **{"n": 8, "b": 2, "t": 512, "m": 512, **form})
    assert program.as_text().count("tpu_custom_call") >= 2


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", pytest.param("v6e:2x2", marks=slow)])
def test_no_array_of_queries_by_keys_is_ever_held(topology):
    n, b, t, m = 8, 2, 2048, 2048
    used = compiled_for(topology, n, b, t, m, 64).memory_analysis()
    # Measured: a fifth of one such array in float32. Plain attention holds 3.5 such arrays.
    assert used.temp_size_in_bytes < n * b * t * (m + t) * 4 / 4
