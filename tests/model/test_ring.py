"""The ring buffer of projected memory gives the same results as memory, even when it wraps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiers import rest_slow

import txl_jax
from txl_jax.model import attention, ring
from txl_jax.model.kernels import attend, reference
from txl_jax.model.masks import attention_mask
from txl_jax.model.positions import Positions, relative_shift

ROWS = 2


def run(cfg, mems, lengths, seed=0):
    """Runs random segments of these lengths; returns all outputs and the final memory or cache."""
    core = tiny.compiled(cfg, "core")
    outs, rng = [], np.random.default_rng(seed)
    for t in lengths:
        x = rng.normal(size=(ROWS, t, cfg.d_model)).astype(np.float32)
        out, mems = core(tiny.variables(cfg), x, mems)
        outs.append(np.asarray(out))
    return np.concatenate(outs, axis=1), mems


def cached(cfg, mems, seg_len):
    model = txl_jax.TransformerXL(cfg)
    return model.apply(tiny.variables(cfg), mems, seg_len=seg_len, method="init_cache")


@pytest.mark.integration
@pytest.mark.parametrize("window", [False, "pytorch", "tf"])
@pytest.mark.parametrize(
    ("mem_len", "seg_len"), rest_slow(2, [(5, 4), (3, 5), (6, 3), (7, 3), (5, 1)])
)
@pytest.mark.few(2)
def test_a_ring_that_wraps_several_times_gives_what_memory_gives(mem_len, seg_len, window):
    gives_what_memory_gives(tiny.config(same_length=window), mem_len, seg_len, segments=5)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["relative", "shaw", "shared_projection"])
@pytest.mark.parametrize(
    ("clamp_len", "mem_len", "seg_len"),
    rest_slow(2, [(9, 18, 9), (12, 35, 10), (1, 18, 9), (10, 25, 12)]),
)
@pytest.mark.few(2)
def test_what_is_beyond_the_clamp_is_in_a_ring_of_its_own(clamp_len, mem_len, seg_len, name):
    """Both rings wrap, after states have moved from the near ring to the far ring."""
    cfg = tiny.config(**tiny.attention(name), clamp_len=clamp_len, same_length="pytorch")
    cache = gives_what_memory_gives(cfg, mem_len, seg_len, segments=2 * -(-mem_len // seg_len) + 1)
    assert clamp_len <= cache.near.count < clamp_len + seg_len
    assert cache.far is not None
    assert cache.slots == cache.near.count + cache.far.count < mem_len + seg_len


@pytest.mark.parametrize(
    ("clamp_len", "slots"),
    [(-1, (40, 0)), (40, (40, 0)), (30, (30, 10)), (29, (30, 10)), (1, (10, 30))],
)
def test_slots_are_whole_segments_and_the_near_ones_reach_the_clamp(clamp_len, slots):
    assert ring.slots_of(35, 10, clamp_len) == slots


def test_for_few_queries_there_is_one_ring():
    assert ring.slots_of(35, 8, clamp_len=9) == (40, 0)
    assert ring.slots_of(35, 9, clamp_len=9) == (9, 27)


def gives_what_memory_gives(cfg, mem_len, seg_len, segments):
    """Compares outputs, final keys and values with those of memory; returns the cache."""
    lengths = [seg_len] * segments
    want, mems = run(cfg, txl_jax.TransformerXL(cfg).init_mems(ROWS, mem_len), lengths)
    start = txl_jax.TransformerXL(cfg).init_mems(ROWS, mem_len)
    got, cache = run(cfg, cached(cfg, start, seg_len), lengths)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(cache.filled, mems.filled)
    again = cached(cfg, mems, seg_len)
    for n in range(cfg.n_layer):
        np.testing.assert_allclose(cache.past(n).keys, again.past(n).keys, atol=1e-5)
        np.testing.assert_allclose(cache.past(n).values, again.past(n).values, atol=1e-5)
    return cache


@pytest.mark.integration
@pytest.mark.parametrize(("clamp_len", "seg_len"), [(-1, 3), (4, 9)])
@pytest.mark.parametrize("name", rest_slow(1, tiny.WITH_MEMORY))
@pytest.mark.few(1)
def test_shorter_segments_between_full_ones_change_nothing(name, clamp_len, seg_len):
    cfg = tiny.config(**tiny.attention(name), clamp_len=clamp_len)
    lengths = [seg_len, seg_len, 1, seg_len, 2, seg_len, seg_len]
    start = txl_jax.TransformerXL(cfg).init_mems(ROWS, 2 * seg_len + 1)
    want, _ = run(cfg, start, lengths)
    got, cache = run(cfg, cached(cfg, start, seg_len), lengths)
    assert (cache.far is None) == (clamp_len < 0)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_scores_of_slots_are_those_of_keys_in_another_order():
    rng = np.random.default_rng(0)
    r, t = 6, 3
    x = jnp.asarray(rng.normal(size=(2, t, r + t)), jnp.float32)
    by_key = np.asarray(relative_shift(x))
    np.testing.assert_array_equal(np.tril(np.asarray(ring._by_key(x, r))), np.tril(by_key[..., r:]))
    for oldest in (0, 3):
        longer = jnp.pad(x, [(0, 0), (1, 1), (0, 0)], constant_values=np.nan)
        got = np.asarray(ring._by_slot(longer, jnp.int32(oldest), r))
        np.testing.assert_array_equal(got, np.roll(by_key[..., :r], oldest, axis=-1))


def test_plain_attention_puts_the_keys_of_a_ring_in_order():
    rng, (n, t, r, h) = np.random.default_rng(0), (2, 4, 12, 5)
    draw = lambda *sides: jnp.asarray(rng.normal(size=sides), jnp.float32)
    states = lambda length: (draw(n, ROWS, length, h), draw(n, ROWS, length, h))
    past = [ring.Ring(*states(r), jnp.int32(8))]
    mask = attention_mask(t, jnp.array([r - 1, 3]), r, "tf")
    positions = Positions(draw(n, h), draw(n, h), draw(n, r + t, h), draw(n, r + t))
    inputs = draw(n, ROWS, t, h), past, ring.KeysValues(*states(t)), positions, mask
    expected = ring.attend(*inputs)
    found = reference.attend(ring.one_ring(*inputs))
    np.testing.assert_allclose(found, expected, atol=2e-6)  # float32


@pytest.mark.integration
@pytest.mark.parametrize("clamp_len", [-1, 12])
def test_a_fused_kernel_reads_one_ring_and_gives_what_memory_gives(monkeypatch, clamp_len):
    """The implementation ``xla`` takes the place of the fused kernel, which needs a GPU."""
    monkeypatch.setattr(attention, "may_fuse_cache", lambda c, mesh: True)
    monkeypatch.setattr(attention, "FUSED", {"xla": "cpu"})
    given = []

    def recorded(x, *rest):
        given.append(x)
        return attend(x, *rest)

    monkeypatch.setattr(attention, "attend", recorded)
    # No other test has this dropout rate, so no program compiled earlier is reused.
    cfg = tiny.config(clamp_len=clamp_len, same_length="pytorch", dropatt=0.0625)
    start = txl_jax.TransformerXL(cfg).init_mems(ROWS, 35)
    want, _ = run(cfg, start, [10] * 9)
    given.clear()
    got, cache = run(cfg, cached(cfg, start, 10), [10] * 9)
    assert [x.oldest is not None for x in given] == [True] * cfg.n_layer
    assert (cache.far, cache.slots) == (None, 40)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_beyond_the_clamp_no_scores_by_position_are_made():
    mem_len, clamp_len, t = 96, 32, 16
    made = {}
    for clamp in (-1, clamp_len):
        cfg = tiny.config(clamp_len=clamp)
        model = txl_jax.TransformerXL(cfg)
        cache, x = cached(cfg, model.init_mems(1, mem_len), t), jnp.zeros((1, t, cfg.d_model))
        step = lambda cache, x, m=model: m.apply(tiny.variables(m.cfg), x, cache, method="core")
        about: Any = jax.jit(step).lower(cache, x).compile().cost_analysis()
        made[clamp] = about["flops"]
    spared = 2 * t * (mem_len - clamp_len) * cfg.n_head * cfg.d_head * cfg.n_layer
    assert made[-1] - made[clamp_len] > 0.9 * spared


@pytest.mark.integration
@pytest.mark.parametrize(("clamp_len", "t"), [(-1, 1), (2048, 9)])
def test_a_donated_ring_is_written_in_place(clamp_len, t):
    """The program makes no copy of the ring, although it overwrites slots that it reads."""
    cfg = tiny.config(same_length="pytorch", clamp_len=clamp_len, d_head=256)
    model, mem_len = txl_jax.TransformerXL(cfg), 4096
    cache = cached(cfg, model.init_mems(1, mem_len), t)
    step = lambda cache, x: model.apply(tiny.variables(cfg), x, cache, method="core")
    x = jnp.zeros((1, t, cfg.d_model))
    held: Any = jax.jit(step, donate_argnums=0).lower(cache, x).compile().memory_analysis()
    of_a_ring = cache.past(0).keys.size * 4
    assert held.alias_size_in_bytes >= 2 * cfg.n_layer * of_a_ring
    scores = cfg.n_head * t * mem_len * 4
    assert 4 * scores < of_a_ring / 2
    assert held.temp_size_in_bytes < of_a_ring + 4 * scores
