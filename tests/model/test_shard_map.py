"""The model works inside a user's ``jax.shard_map``, which checks how arrays vary by device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import rest_slow

from txl_jax.model import cross_entropy
from txl_jax.model.kernels import AttentionInputs, choice
from txl_jax.model.kernels.choice import KernelError
from txl_jax.model.masks import attention_mask
from txl_jax.model.positions import Positions

DEVICES = 4
FORMS: dict[str, dict] = {
    "relative": {},
    "clusters": {"cutoffs": (4, 9), "div_val": 2},
    "clusters of one width": {"cutoffs": (4, 9)},
    "40,000 words": {"vocab_size": 40_000, "n_layer": 1},
    "mixture": {"mixtures": 2},
    "mixture of 40,000 words": {"mixtures": 2, "vocab_size": 40_000, "n_layer": 1},
    "scanned": {"scan_layers": True, "cutoffs": (4,), "remat": "products"},
    "shaw": tiny.attention("shaw", cutoffs=(4,)),
    "agents": {**tiny.GTRXL, "same_length": "tf", "clamp_len": 3},
}
TRAINED: dict[str, dict] = {
    "dropout": {"dropout": 0.3, "dropatt": 0.2, "dropout_embedding": 0.2, "cutoffs": (4,)},
    "sampled softmax": {"sample_softmax": 3},
}


def sharded(function, n_rows):
    """Compiles a function of variables and ``n_rows`` arrays with rows split over four devices."""
    mesh = jax.make_mesh((DEVICES,), ("d",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])
    rows = (P("d"),) * n_rows
    specs: Any = {"mesh": mesh, "in_specs": (P(), *rows), "out_specs": (P(), P("d"))}
    return jax.jit(jax.shard_map(function, **specs))


def losses_and_gradient(cfg, total, seg_len, mem_len=5, **options):
    """A function that returns the gradient of ``total(losses)``; by row, losses and filled slots.

    It takes variables, tokens, the memory's states [B,L,M,D], its filled slots, and resets.
    """

    def run(variables, tokens, hidden, filled, reset):
        mems = tiny.memory(cfg, (0,), mem_len).replace(hidden=hidden.swapaxes(0, 1), filled=filled)

        def loss(variables):
            given = {"reset": reset, **options}
            nll, after = tiny.apply(cfg, "nll")(variables, tokens, tokens, mems, **given)
            return total(nll), (nll, after.filled)

        (_, of_rows), gradient = jax.value_and_grad(loss, has_aux=True)(variables)
        return gradient, of_rows

    return run


def inputs(cfg, seg_len, mem_len=5, rows=8):
    mems = tiny.memory(cfg, [0, 2, 5, 1, 0, 3, 5, 5][:rows], mem_len)
    reset = np.zeros((rows, seg_len), bool)
    reset[1, seg_len // 2] = True
    return (tiny.tokens(cfg, rows, seg_len), mems.hidden.swapaxes(0, 1), mems.filled, reset)


def assert_equal(cfg, seg_len, **options):
    given = inputs(cfg, seg_len)
    over_devices = lambda nll: jax.lax.psum(nll.sum(), "d")
    got = sharded(losses_and_gradient(cfg, over_devices, seg_len, **options), len(given))
    want = jax.jit(losses_and_gradient(cfg, lambda nll: nll.sum(), seg_len, **options))
    results = got(tiny.variables(cfg), *given), want(tiny.variables(cfg), *given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *results)


@pytest.mark.integration
@pytest.mark.parametrize("form", rest_slow(2, FORMS))
@pytest.mark.few(1)
def test_losses_and_gradients_are_those_of_one_device(form):
    cfg = tiny.config(**FORMS[form])
    assert_equal(cfg, 100 if "40,000" in form else 6)


@pytest.mark.slow
def test_losses_in_several_blocks_and_tiles_are_those_of_one_device(monkeypatch):
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", 3)
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", 1)
    monkeypatch.setitem(cross_entropy.TILE_WORDS, "cpu", 2)
    assert_equal(tiny.config(n_layer=1, cutoffs=(4, 9)), 6)
    assert_equal(tiny.config(n_layer=1), 6)


@pytest.mark.integration
def test_a_long_segment_gives_what_one_device_gives():
    """The queries of a long segment are computed in several groups, one after another."""
    assert_equal(tiny.config(n_layer=1), 200)


@pytest.mark.slow
@pytest.mark.parametrize("form", TRAINED)
def test_training_runs_on_every_device(form):
    """All devices draw the same dropout, so each device's rows give the same results alone."""
    cfg = tiny.config(n_layer=1, **TRAINED[form])
    given = inputs(cfg, 6)
    options = {"train": True, "rngs": {"dropout": jax.random.key(0)}}
    over_devices = lambda nll: jax.lax.psum(nll.sum(), "d")
    run = sharded(losses_and_gradient(cfg, over_devices, 6, **options), len(given))
    gradient, (nll, _) = run(tiny.variables(cfg), *given)
    one = jax.jit(losses_and_gradient(cfg, lambda nll: nll.sum(), 6, **options))
    parts = [[x[i : i + 2] for x in given] for i in range(0, 8, 2)]
    each = [one(tiny.variables(cfg), *part) for part in parts]
    np.testing.assert_allclose(nll, np.concatenate([x[1][0] for x in each]), atol=1e-5)
    total = jax.tree.map(lambda *x: sum(x), *[x[0] for x in each])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradient, total)


@pytest.mark.integration
@pytest.mark.parametrize("form", ["clusters", "mixture"])
def test_logits_and_states_are_those_of_one_device(form):
    cfg = tiny.config(n_layer=1, **FORMS[form])
    tokens, hidden, filled, reset = inputs(cfg, 6)
    x = tiny.embeddings(cfg, 8, 6)

    def run(variables, tokens, x, hidden, filled, reset):
        mems = tiny.memory(cfg, (0,), 5).replace(hidden=hidden.swapaxes(0, 1), filled=filled)
        logits, _ = tiny.apply(cfg, "__call__")(variables, tokens, mems, reset=reset[:, 0])
        states, after = tiny.apply(cfg, "core")(variables, x, mems, reset=reset)
        return variables, (logits, states, after.hidden.swapaxes(0, 1))

    given = (tiny.variables(cfg), tokens, x, hidden, filled, reset)
    results = sharded(run, 5)(*given)[1], jax.jit(run)(*given)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)


@pytest.mark.parametrize("platform", choice.BEST)
def test_fused_kernels_are_not_chosen_where_variation_is_checked(platform, monkeypatch):
    """A fused kernel would not sum the gradient of parameters over the devices."""
    monkeypatch.setattr(choice, "platform_of", lambda mesh: platform)
    chosen = []

    def attention(check, kernel):
        def run(variables, x):
            q = jnp.zeros((2, len(x), 128, 16)) + x[:, None, None]
            terms = Positions(r=jnp.zeros((2, 128, 16)))
            mask = attention_mask(128, jnp.zeros(len(x), jnp.int32), 0)
            chosen.append(choice.choose(kernel, AttentionInputs(q, q, q, terms, mask)))
            return variables, x

        mesh = jax.make_mesh((DEVICES,), ("d",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])
        specs: Any = {"in_specs": (P(), P("d")), "out_specs": (P(), P("d")), "check_vma": check}
        jax.eval_shape(jax.shard_map(run, mesh=mesh, **specs), jnp.zeros(()), jnp.zeros(8))
        return chosen.pop()

    checked = attention(True, "auto")
    assert checked.name == "xla"
    assert "check_vma=True" in checked.reason
    assert "check_vma" not in attention(False, "auto").reason
    with pytest.raises(KernelError, match=r"inside of jax\.shard_map with check_vma=True; use 'a"):
        attention(True, choice.BEST[platform])
