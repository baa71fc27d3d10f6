"""Every implementation of attention equals the plain form, with the same dropout mask."""

import functools
import itertools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from jax.sharding import AxisType

import txl_jax
from txl_jax.model.dropout import AttentionDropout
from txl_jax.model.kernels import AttentionInputs, attend, choice, parity, reference, xla
from txl_jax.model.masks import AttentionMask, attention_mask
from txl_jax.model.positions import Positions
from txl_jax.parallel.mesh import AXES

RESET = np.zeros((3, 300), bool)
RESET[1, 160] = True
FORMS = {
    "causal with memory": {},
    "window": {"window": "pytorch"},
    "window of TF": {"window": "tf"},
    "no memory": {"mem_len": 0},
    "reset": {"reset": RESET},
    "dropout": {"dropatt": 0.3},
    "one query": {"seg_len": 1},
    "short": {"seg_len": 101},
    "short, window of TF": {"seg_len": 101, "window": "tf"},
    "short, reset and dropout": {"seg_len": 101, "reset": RESET[:, 100:201], "dropatt": 0.3},
}


def of_shape(q_shape, n_keys, positions, dropout=False, dtype=jnp.bfloat16):
    """Attention inputs with shapes but no values; they suffice to choose an implementation."""
    n, b, t, h = q_shape
    shape: Any = lambda length: jax.ShapeDtypeStruct((n, b, length, h), dtype)
    mask = attention_mask(t, jnp.zeros(b, jnp.int32), n_keys - t)
    drop = AttentionDropout(jnp.zeros(2, jnp.uint32), 0.1) if dropout else None
    return AttentionInputs(shape(t), shape(n_keys), shape(n_keys), positions, mask, drop)


def both(form, names, dtype=jnp.float32):
    """Values and gradients of a form of attention, by each of the named implementations."""
    seg_len, mem_len = form.get("seg_len", 300), form.get("mem_len", 90)
    filled = jnp.minimum(jnp.array([mem_len, 0, 40]), mem_len)
    mask = attention_mask(seg_len, filled, mem_len, form.get("window", False), form.get("reset"))
    rate = form.get("dropatt")
    dropout = AttentionDropout.draw(jax.random.key(1), rate) if rate else None
    inputs = parity.random_inputs(2, 3, mask, 8, dtype, dropout)
    run = jax.jit(parity.values_and_gradients, static_argnums=0)
    return [run(functools.partial(attend, implementation=n), inputs) for n in names]


@pytest.mark.integration
@pytest.mark.parametrize("shape", [(3, 1, 1), (1, 3, 2), (1, 1, 2)])
@pytest.mark.few(1)
def test_devices_that_share_rows_and_heads_compute_what_one_does(shape):
    """The dropout mask is the same, and gradients of shared arrays are summed over the devices."""
    mask = attention_mask(300, jnp.array([90, 0, 40]), 90, "tf", jnp.asarray(RESET))
    dropout = AttentionDropout.draw(jax.random.key(1), 0.3)
    inputs = parity.random_inputs(2, 3, mask, 8, jnp.float32, dropout)
    run = jax.jit(parity.values_and_gradients, static_argnums=0)
    devices = jax.devices()[: np.prod(shape)]
    mesh = jax.make_mesh(shape, AXES, (AxisType.Auto,) * 3, devices=devices)
    one, many = (
        run(functools.partial(attend, implementation="xla", mesh=m), inputs) for m in (None, mesh)
    )
    assert parity.largest_difference(jax.device_get(many), jax.device_get(one)) < 1e-5


def test_rows_that_the_devices_do_not_divide_are_computed_too():
    mask = attention_mask(200, jnp.zeros(3, jnp.int32), 9)
    inputs = parity.random_inputs(2, 3, mask, 8, jnp.float32, None)
    mesh = jax.make_mesh((2, 1, 1), AXES, (AxisType.Auto,) * 3, devices=jax.devices()[:2])
    found = attend(inputs, "xla", mesh)
    np.testing.assert_allclose(found, attend(inputs, "reference"), rtol=0, atol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.few(3)
def test_some_queries_at_a_time_equal_all_at_once(form):
    some, every = both(FORMS[form], ("xla", "reference"))
    assert parity.largest_difference(some, every) < 1e-5


def test_a_short_segment_reads_less_of_what_nobody_sees_where_that_is_quicker(monkeypatch):
    mask = attention_mask(128, jnp.array([128]), 128)
    inputs = parity.random_inputs(2, 1, mask, 16, jnp.float32)

    def products():
        lowered = jax.jit(functools.partial(attend, implementation="xla")).lower(inputs)
        found: Any = lowered.cost_analysis()
        return found["flops"]

    groups = products()
    monkeypatch.setattr(xla, "HALVED_FROM", {})
    assert groups < 0.9 * products()  # on average (192 + 256) / 2 keys, not 256


@pytest.mark.parametrize(
    ("seg_len", "platform", "size"),
    [
        (128, "cpu", 64),
        (101, "cpu", 51),
        (64, "cpu", 32),
        (63, "cpu", 63),
        (1, "cpu", 1),
        (128, "gpu", 128),
        (129, "cpu", 128),
        (4096, "", 256),
    ],
)
def test_queries_taken_at_a_time(seg_len, platform, size):
    assert xla.group_size(seg_len, platform) == size


def test_some_queries_at_a_time_with_learnt_scalars_of_distances():
    mask = attention_mask(200, jnp.array([60, 3]), 60, "tf")
    inputs = parity.random_inputs(2, 2, mask, 8, jnp.float32)
    b = jax.random.normal(jax.random.key(5), (2, 260))
    inputs = inputs.replace(positions=inputs.positions.replace(b=b, v=None))
    run = jax.jit(parity.values_and_gradients, static_argnums=0)
    got, want = (run(f, inputs) for f in (lambda x: xla.attend(x.joined()), plain))
    assert parity.largest_difference(got, want) < 1e-5


plain = reference.attend


HELD = """
import functools
import jax
import jax.numpy as jnp
from txl_jax.model.kernels import attend, parity
from txl_jax.model.masks import AttentionMask, attention_mask

mask = attention_mask(1024, jnp.array([1024]), 1024)
inputs = parity.random_inputs(2, 1, mask, 16, jnp.float32)
for implementation in ("xla", "reference"):
    run = functools.partial(attend, implementation=implementation)
    gradients = jax.jit(parity.values_and_gradients, static_argnums=0)
    compiled = gradients.lower(run, inputs).compile()
    print(compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
def test_some_queries_at_a_time_hold_less_for_the_gradient():
    """The program has one device: with several, the fixed order of collectives costs memory."""
    one_device = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    printed = subprocess.check_output([sys.executable, "-c", HELD], text=True, env=one_device)
    xla, reference = map(int, printed.split())
    assert xla < reference / 3


@pytest.mark.slow
def test_the_difference_from_the_plain_form_is_that_of_a_wrong_kernel(monkeypatch):
    assert parity.difference("xla", 8, jnp.float32, dropatt=0.2) < 1e-5

    def slightly_wrong(x, halved_from=None, platform=None):
        return plain(x.replace(positions=x.positions.replace(r=-x.positions.r)))

    monkeypatch.setattr(xla, "attend", slightly_wrong)
    assert parity.difference("xla", 8, jnp.float32) > 0.1


def test_dropout_drops_its_share_independently_of_place_and_seed():
    rate, shape = 0.3, (4, 5, 64, 96)
    dropout = AttentionDropout.draw(jax.random.key(0), rate)
    kept = np.asarray(dropout.mask(shape))
    np.testing.assert_allclose(np.unique(kept), [0, 1 / (1 - rate)], rtol=1e-6)
    dropped = (kept == 0).astype(float)
    n, sigma = dropped.size, np.sqrt(rate * (1 - rate))
    assert abs(dropped.mean() - rate) < 4 * sigma / np.sqrt(n)
    for axis in range(4):  # correlation of neighbours along every axis, and means along it
        pairs = np.mean((dropped - rate) * (np.roll(dropped, 1, axis) - rate))
        assert abs(pairs) < 4 * sigma**2 / np.sqrt(n), axis
        lines = dropped.mean(axis)
        assert np.abs(lines - rate).max() < 6 * sigma / np.sqrt(shape[axis]), axis
    other = np.asarray(AttentionDropout.draw(jax.random.key(1), rate).mask(shape)) == 0
    assert abs(np.mean((dropped - rate) * (other - rate))) < 4 * sigma**2 / np.sqrt(n)
    part = dropout.mask((4, 5, 8, 16), query0=16, key0=32)
    np.testing.assert_array_equal(part, kept[:, :, 16:24, 32:48])


@pytest.mark.parametrize("rate", [0.05, 0.15, 0.5])
def test_weights_that_share_a_hash_are_dropped_independently(rate):
    """All correlations between weights are noise, also between heads, rows, queries and layers."""
    shape = (4, 4, 128, 512)
    draw = lambda seed: AttentionDropout.draw(jax.random.key(seed), rate).mask(shape)
    unit = lambda kept: ((np.asarray(kept) == 0) - rate) / np.sqrt(rate * (1 - rate))
    first, other = unit(draw(0)), unit(draw(1))
    key, noise = np.arange(shape[-1]), 4.5 / np.sqrt(first.size / 2)
    four = [first[..., key ^ place] for place in (0, 1, 8, 9)]
    for a, b in itertools.combinations(four, 2):
        assert abs(np.mean(a * b)) < noise
    assert abs(np.mean(four[0] * four[1] * four[2])) < noise
    assert abs(np.mean(np.prod(four, axis=0))) < 2 * noise  # a quarter as many samples
    assert abs(first.mean()) < noise
    assert abs(np.mean(first * other)) < noise  # masks of two layers
    for axis in range(3):
        for place in (1, 2):
            assert abs(np.mean(first * np.roll(first, place, axis))) < noise
    shares = first.reshape(-1, 16).mean(0)  # by key modulo 16, which selects the factors
    assert np.abs(shares).max() < 4.5 / np.sqrt(first.size / 16)


def test_attention_dropout_keeps_the_expectation_and_is_off_in_evaluation():
    inputs = parity.random_inputs(1, 1, attention_mask(4, jnp.array([12]), 12), 4, jnp.float32)
    want = attend(inputs)
    drop = lambda key: attend(inputs.replace(dropout=AttentionDropout.draw(key, 0.25)))
    drawn = jax.vmap(drop)(jax.random.split(jax.random.key(0), 4000))
    error = drawn.std(0) / np.sqrt(4000)
    assert (np.abs(drawn.mean(0) - want) < 5 * error).all()


def test_an_implementation_is_refused_by_name_where_it_cannot_run():
    mask = attention_mask(4, jnp.array([4, 0, 2]), 4)
    inputs = parity.random_inputs(2, 3, mask, 8, jnp.float32)
    for name, platform in choice.FUSED.items():
        with pytest.raises(
            ValueError, match=f"{name}.* needs .*{platform.upper()}, but .*runs on a cpu"
        ):
            attend(inputs, implementation=name)


def test_auto_takes_what_the_platform_and_the_form_allow(monkeypatch):
    r, b = Positions(r=jnp.zeros(())), Positions(r=jnp.zeros(()), b=jnp.zeros(()))
    form = lambda positions, t=256: of_shape((2, 4, t, 64), 512, positions)
    assert choice.choose("auto", form(r)).name == "xla"
    monkeypatch.setattr(choice, "platform_of", lambda mesh: "tpu")
    assert choice.choose("auto", form(r)).name == "pallas_tpu"
    assert choice.choose("auto", form(b)).name == "xla"
    assert choice.choose("auto", form(r, t=32)).name == "xla"
    with pytest.raises(
        ValueError, match=r"pallas_tpu.*not support this attention.*use 'auto' or 'xla'"
    ):
        choice.choose("pallas_tpu", form(b))


class OtherSoftmax(Positions):
    """Terms of another softmax, which fused kernels cannot compute."""


class OtherMask(AttentionMask):
    """A mask of another kind, which fused kernels cannot apply."""


@pytest.mark.parametrize("other", ["OtherSoftmax", "OtherMask"])
def test_no_fused_kernel_computes_another_softmax_or_mask(other, monkeypatch):
    softmax = OtherSoftmax if other == "OtherSoftmax" else Positions
    x = of_shape((2, 4, 256, 64), 512, softmax(r=jnp.zeros(())))
    if other == "OtherMask":
        x = x.replace(mask=OtherMask(jnp.zeros(4, jnp.int32), None, 256, 256, 511))
    for name, platform in choice.FUSED.items():
        monkeypatch.setattr(choice, "platform_of", lambda mesh, platform=platform: platform)
        assert choice.choose("auto", x).name == "xla"
        with pytest.raises(ValueError, match=f"{name}.*Positions, AttentionMask.*not {other}"):
            choice.choose(name, x)


def test_a_model_gives_the_same_by_every_portable_implementation():
    text = np.asarray(tiny.tokens(tiny.config(), 2, 301))
    losses = []
    for kernel in ("reference", "xla"):
        cfg = tiny.config(same_length="tf", kernel=kernel)
        mems = txl_jax.TransformerXL(cfg).init_mems(2, 20)
        apply = tiny.compiled(cfg, "nll")
        losses.append(apply(tiny.variables(cfg), text[:, :-1], text[:, 1:], mems)[0])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
