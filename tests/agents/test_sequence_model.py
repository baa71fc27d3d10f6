"""SequenceModel, a recurrent Flax module: single steps give the outputs of one long window."""

import dataclasses
import doctest
import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from flax import nnx
from tiers import rest_slow

import txl_jax
from txl_jax import agents
from txl_jax.agents import sequence_model
from txl_jax.config import ConfigError
from txl_jax.model.layout import stack_layers

B, D, M, T = 3, 8, 4, 9
FORMS = {
    # d_head 8 makes a step attend to the states themselves, without projecting them.
    "gtrxl": tiny.config(same_length="tf", untie_r=True, d_head=8, vocab_size=None, **tiny.GTRXL),
    "one_key_less": tiny.config(same_length="pytorch", clamp_len=2),
    "shaw": tiny.config(**tiny.attention("shaw", same_length="tf", gate="gru")),
}
CFG = FORMS["gtrxl"]
MODEL: Any = agents.SequenceModel(CFG, M)
VARIABLES = tiny.variables(CFG)
rng = np.random.default_rng(0)
INPUTS = rng.standard_normal((B, T, D)).astype(np.float32)
BEGINS = rng.random((B, T)) < 0.2
assert BEGINS[:, 1:].any()


def assert_close(got, want):
    """Allows an error of 1e-5 times the largest magnitude, or 1e-5 if this magnitude is below 1."""
    bound = 1e-5 * max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


@functools.cache
def applied(model):
    return tiny.quick(model.apply)


def in_parts(model, variables, lengths, carry=None):
    """The carry and the outputs of all steps, from segments of ``lengths`` steps."""
    outputs: list[Any] = []
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        if carry is None:
            carry = model.initialize_carry(None, (B, D))
        carry, y = applied(model)(variables, INPUTS[:, part], BEGINS[:, part], carry)
        outputs, start = [*outputs, y], start + length
    return carry, jnp.concatenate(outputs, axis=1)


@pytest.mark.parametrize("name", rest_slow(1, FORMS))
def test_steps_and_segments_of_any_length_give_what_one_window_gives(name):
    model, variables = agents.SequenceModel(FORMS[name], M), tiny.variables(FORMS[name])
    (hidden, filled), want = in_parts(model, variables, [T])
    for lengths in ([1] * T, [4, 1, 4]):
        carry, got = in_parts(model, variables, lengths)
        assert_close(got, want)
        for row in range(B):  # slots that are not filled can hold anything
            real = slice(M - int(filled[row]), M)
            for one, other in zip(carry[0], hidden, strict=True):
                assert_close(one[row, real], other[row, real])
        np.testing.assert_array_equal(carry[1], filled)


def test_a_window_is_core_with_the_same_parameters():
    core: Any = txl_jax.TransformerXL(CFG)
    options: Any = {"mems": core.init_mems(B, M), "method": "core", "reset": BEGINS}

    def loss(apply, states):  # returns ((sum of squares, result of apply), gradient)
        both = lambda v: (jnp.sum(states(found := apply(v)) ** 2), found)
        return tiny.quick(jax.value_and_grad(both, has_aux=True))(VARIABLES)

    (_, (want, mems)), wanted = loss(lambda v: core.apply(v, INPUTS, **options), lambda x: x[0])
    (_, (carry, got)), gradient = loss(lambda v: MODEL.apply(v, INPUTS, BEGINS), lambda x: x[1])
    assert_close(got, want)
    assert_close(jnp.stack(carry[0]), mems.hidden)
    np.testing.assert_array_equal(carry[1], mems.filled)
    for a, b in zip(*map(jax.tree.leaves, (gradient, wanted)), strict=True):
        assert_close(a, b)
        assert np.abs(b).max() > 0
    init = lambda key: MODEL.init(key, INPUTS, BEGINS, carry)
    got = jax.eval_shape(init, jax.random.key(0))["params"]
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, VARIABLES["params"])


def test_an_episode_sees_nothing_earlier_and_a_row_nothing_of_the_others():
    before, _ = in_parts(MODEL, VARIABLES, [T])
    first = np.array([True, False, True])
    fresh = MODEL.initialize_carry(None, (B,))
    after = lambda carry, begins: applied(MODEL)(VARIABLES, INPUTS[:, :1], begins, carry)[1]
    got, unmasked = after(before, first[:, None]), after(before, None)
    want = after(fresh, None)
    assert_close(got[first], want[first])
    assert_close(got[1], unmasked[1])
    assert np.abs(got[1] - want[1]).max() > 1e-3
    # A program can also reset rows of the carry itself, as for other recurrent cells.
    keep = lambda a, b: jnp.where(first.reshape(B, *[1] * (b.ndim - 1)), a, b)
    assert_close(after(jax.tree.map(keep, fresh, before), None), got)


def test_rows_of_a_carry_may_be_shuffled():
    """PPO shuffles environments into minibatches."""
    carry, _ = in_parts(MODEL, VARIABLES, [T])
    order = np.array([2, 0, 1])
    shuffled = jax.tree.map(lambda x: x[order], carry)
    _, got = applied(MODEL)(VARIABLES, INPUTS[order], BEGINS[order], shuffled)
    _, want = in_parts(MODEL, VARIABLES, [T], carry)
    assert_close(got, want[order])


@pytest.mark.parametrize("shape", [(B,), (B, None), (B, 5, 5, 3)])
def test_the_empty_carry_has_rows_first(shape):
    hidden, filled = MODEL.initialize_carry(jax.random.key(0), shape)
    assert [(h.shape, h.dtype) for h in hidden] == [((B, M, D), np.float32)] * 2
    assert (filled.tolist(), filled.dtype) == ([0] * B, np.int32)
    narrow = agents.SequenceModel(dataclasses.replace(CFG, dtype="bfloat16"), M)
    assert narrow.initialize_carry(None, shape)[0][0].dtype == jnp.bfloat16


def test_scan_and_vmap_give_what_single_calls_give():
    masks = {"numbers": BEGINS.astype(np.float32), "bool": BEGINS}
    carry, want = in_parts(MODEL, VARIABLES, [T])

    @tiny.quick
    def acted(variables, mask):
        step = lambda carry, now: MODEL.apply(variables, now[0][:, None], now[1][:, None], carry)
        over_time = jnp.swapaxes(INPUTS, 0, 1), mask.T
        carry, outputs = jax.lax.scan(step, MODEL.initialize_carry(None, (B,)), over_time)
        return carry, outputs[:, :, 0].swapaxes(0, 1)

    for mask in masks.values():
        got_carry, got = acted(VARIABLES, mask)
        assert_close(got, want)
        for a, b in zip(*map(jax.tree.leaves, (got_carry, carry)), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
    two = jax.tree.map(lambda *x: jnp.stack(x), VARIABLES, tiny.variables(CFG, 1))
    each = tiny.quick(jax.vmap(lambda v: MODEL.apply(v, INPUTS, BEGINS)[1]))(two)
    assert_close(each[0], want)
    assert np.abs(each[1] - want).max() > 1e-3


def test_it_is_exported_for_any_number_of_rows():
    (rows,) = jax.export.symbolic_shape("b")
    carry = MODEL.initialize_carry(None, (B,))
    given: Any = (INPUTS, BEGINS, carry)
    of_any = lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
    exported = jax.export.export(jax.jit(MODEL.apply))(VARIABLES, *jax.tree.map(of_any, given))
    assert_close(exported.call(VARIABLES, *given)[1], in_parts(MODEL, VARIABLES, [T])[1])


def test_no_gradient_flows_into_the_carry():
    carry, _ = in_parts(MODEL, VARIABLES, [T])

    def of(hidden):
        after, outputs = MODEL.apply(VARIABLES, INPUTS[:, :2], None, (hidden, carry[1]))
        return outputs.sum() + sum(h.sum() for h in after[0])

    assert not any(map(np.any, jax.grad(of)(carry[0])))


def test_scanned_layers_have_the_same_carry():
    model = agents.SequenceModel(dataclasses.replace(CFG, scan_layers=True), M)
    variables = {"params": stack_layers(VARIABLES["params"])}
    got, want = in_parts(model, variables, [4, 1, 4]), in_parts(MODEL, VARIABLES, [4, 1, 4])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b)


def test_it_is_a_part_of_other_modules():
    class Agent(nn.Module):
        torso: nn.Module

        @nn.compact
        def __call__(self, x, mask, carry):
            carry, y = self.torso(nn.Dense(D)(x), mask=mask, initial_carry=carry, action=None)
            return carry, nn.Dense(2)(y)

    agent, carry = Agent(MODEL), MODEL.initialize_carry(None, (B,))
    init = lambda key: agent.init(key, INPUTS, BEGINS, carry)
    variables = jax.eval_shape(init, jax.random.key(0))
    assert set(variables["params"]) == {"Dense_0", "torso", "Dense_1"}
    assert hash(agent) == hash(Agent(agents.SequenceModel(CFG, M)))  # a static argument of jit
    model = nnx.bridge.ToNNX(MODEL, rngs=nnx.Rngs(0)).lazy_init(INPUTS, BEGINS, carry)
    new, y = model(INPUTS, BEGINS, carry)
    assert y.shape == (B, T, D)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, carry)


CARRY = MODEL.initialize_carry(None, (B,))


EMPTY = "initial_carry must be float32 [3,4,8], float32 [3,4,8], int32 [3] (see initialize_carry)"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ((INPUTS[..., :5],), "inputs must be floats [B,T,8], not float32 [3,9,5]"),
        ((INPUTS[:, 0],), "inputs must be floats [B,T,8], not float32 [3,8]"),
        ((INPUTS, BEGINS[:, :2]), "mask must be bool or numbers [3,9], not bool [3,2]"),
        ((INPUTS, 1.0 * BEGINS[..., None]), "mask must be bool or numbers [3,9], not float32 [3,9"),
        (
            (INPUTS[:2], BEGINS[:2], CARRY),
            EMPTY.replace("[3", "[2") + ", not float32 [3,4,8], float32 [3,4,8], int32 [3]",
        ),
        (
            (INPUTS, BEGINS, (CARRY[0][:1], CARRY[1])),
            f"{EMPTY}, not float32 [3,4,8], int32 [3]",
        ),
        ((INPUTS, BEGINS, (CARRY[0], CARRY[1][:2])), f"{EMPTY}, not float32 [3,4,8], float32 [3,4"),
        (
            (INPUTS, BEGINS, (CARRY[0], CARRY[1] * 1.0)),
            f"{EMPTY}, not float32 [3,4,8], float32 [3,",
        ),
        ((INPUTS, BEGINS, ()), f"{EMPTY}, not empty"),
        ((INPUTS, BEGINS, np.zeros((B, D), np.float32)), f"{EMPTY}, not float32 [3,8]"),
        ((INPUTS, BEGINS, "carry"), f"{EMPTY}, not str"),
        (
            (INPUTS, BEGINS, txl_jax.TransformerXL(CFG).init_mems(B, M)),
            f"{EMPTY}, not float32 [2,3,4,8], int32 [3]",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(wrong, told):
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        MODEL.apply(VARIABLES, *wrong)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("reset", "give mask"),
        ("begins", "give mask"),
        ("mems", "give initial_carry"),
        ("carry", "give initial_carry"),
        ("lengths", "core"),
        ("train", "core"),
    ],
)
def test_what_core_calls_otherwise_is_not_left_unused(name, told):
    with pytest.raises(TypeError, match=rf"^SequenceModel\(\) has no argument '{name}': .*{told}"):
        MODEL.apply(VARIABLES, INPUTS, BEGINS, **{name: None})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_carry_of_another_dtype_comes_back_in_that_of_the_model(dtype):
    """The returned carry has the dtypes of ``initialize_carry``."""
    model: Any = agents.SequenceModel(dataclasses.replace(CFG, dtype=dtype), M)
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    hidden, filled = model.initialize_carry(None, (3, D))
    given = tuple(x.astype(other) for x in hidden), filled.astype("int16")
    (hidden, filled), _ = model.apply(VARIABLES, INPUTS[:, :1], None, given)
    assert [x.dtype for x in hidden] == [dtype] * CFG.n_layer
    assert filled.dtype == "int32"


def test_a_table_of_its_layers_can_be_printed():
    shown = MODEL.tabulate(jax.random.key(0), INPUTS)
    assert "SequenceModel" in shown


def test_a_model_that_would_learn_other_outputs_than_it_acted_on_is_refused():
    with pytest.raises(ConfigError, match=r"model\.same_length = False: acting and learning would"):
        agents.SequenceModel(dataclasses.replace(CFG, same_length=False), M)
    with pytest.raises(ConfigError, match=r"model\.attention = 'absolute': acting needs a memory"):
        agents.SequenceModel(tiny.config(**tiny.attention("absolute")), M)
    with pytest.raises(ValueError, match="mem_len = -1: must be an integer of at least 0"):
        agents.SequenceModel(CFG, -1)
    with pytest.raises(ValueError, match="mem_len = 0: must be an integer of at least 1"):
        agents.SequenceModel(dataclasses.replace(CFG, same_length="pytorch"), 0)


@pytest.mark.slow
def test_the_example_of_the_module_runs():
    result = doctest.testmod(sequence_model)
    assert result.attempted > 5
    assert result.failed == 0
