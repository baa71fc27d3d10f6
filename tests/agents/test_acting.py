"""Acting (single steps) and learning (windows with the buffer's memory) give equal outputs."""

import dataclasses
import doctest
import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiers import rest_integration, rest_slow

import txl_jax
from txl_jax import agents
from txl_jax.config import ConfigError
from txl_jax.model.layout import stack_layers

B, D, ACTIONS = 3, 8, 4
FORMS = {
    "post_norm": tiny.config(same_length="tf"),
    "gtrxl": tiny.config(same_length="tf", untie_r=True, vocab_size=None, **tiny.GTRXL),
    "one_key_less": tiny.config(same_length="pytorch", clamp_len=2),
    "shaw": tiny.config(**tiny.attention("shaw", same_length="tf", gate="gru")),
    "shared_projection": tiny.config(**tiny.attention("shared_projection", same_length="tf")),
}
CFG = FORMS["gtrxl"]
TOLERANCE = 1e-5


def model_and_variables(cfg, seed=0):
    return txl_jax.TransformerXL(cfg), tiny.variables(cfg, seed)


def assert_close(got, want, what=""):
    """Allows an error of 1e-5 times the largest magnitude, or 1e-5 if this magnitude is below 1."""
    bound = TOLERANCE * max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=what)


@functools.partial(jax.jit, static_argnums=0)
def rollout(model, variables, mems, inputs, begins):
    """Outputs [B,T,D] and states [L,B,T,D] of T steps, under ``scan``."""

    def step(actor, now):
        outputs, actor, states = actor.step(*now)
        return actor, (outputs, states)

    actor = agents.Actor.start(model, variables, mems)
    over_time = inputs.swapaxes(0, 1), begins.T
    _, (outputs, states) = jax.lax.scan(step, actor, over_time)
    return outputs.swapaxes(0, 1), jnp.moveaxis(states, 0, 2)


@functools.partial(jax.jit, static_argnums=0)
def window(model, variables, mems, inputs, begins):
    return model.apply(variables, inputs, mems, method="core", reset=begins)[0]


def log_probabilities(outputs):
    """Log-probabilities of the actions under a linear policy."""
    weights = np.random.default_rng(7).standard_normal((D, ACTIONS)).astype(np.float32)
    return jax.nn.log_softmax(outputs @ weights)


def drawn(rng, steps, ends=0.2):
    """Random inputs [B,T,D], and bools [B,T]: an episode begins with the probability ``ends``."""
    inputs = rng.standard_normal((B, steps, D)).astype(np.float32)
    return inputs, rng.random((B, steps)) < ends


def act_and_learn(cfg, mem_len, length, seg_len, seed, ends):
    """Acts for three rollouts; compares the outputs of each with the outputs of all its windows."""
    model, variables = model_and_variables(cfg)
    rng = np.random.default_rng(seed)
    buffer = agents.StateBuffer.start(model.init_mems(B, mem_len), length)
    for n in range(3):
        inputs, begins = drawn(rng, length, ends)
        outputs, states = rollout(model, variables, buffer.memory(mem_len), inputs, begins)
        buffer = buffer.add(states, begins)
        for start in range(0, length - seg_len + 1):
            part = slice(start, start + seg_len)
            mems = buffer.memory(mem_len, before=mem_len + start)
            got = window(model, variables, mems, inputs[:, part], begins[:, part])
            where = f"rollout {n}, window from {start}"
            assert_close(got, outputs[:, part], where)
            assert_close(log_probabilities(got), log_probabilities(outputs[:, part]), where)


# The memory is empty at first; the rollouts then fill it partly, fully or more than once.
@pytest.mark.parametrize(
    ("mem_len", "length", "seg_len"), rest_integration(1, [(4, 6, 3), (9, 5, 5), (1, 4, 3)])
)
@pytest.mark.few(1)
def test_windows_give_what_acting_gave(mem_len, length, seg_len):
    act_and_learn(CFG, mem_len, length, seg_len, seed=0, ends=0.2)


@pytest.mark.integration
@pytest.mark.parametrize("name", rest_slow(2, FORMS))
def test_windows_give_what_acting_gave_in_every_form(name):
    for seed, ends in enumerate((0.0, 0.1, 0.5)):
        act_and_learn(FORMS[name], 5, 7, 4, seed, ends)


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.sampled_from(list(FORMS)),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.05, 0.2, 0.7, 1.0]),
)
def test_windows_give_what_acting_gave_at_random(name, mem_len, length, seg_len, seed, ends):
    act_and_learn(FORMS[name], mem_len, length, min(seg_len, length), seed, ends)


def test_without_a_window_acting_and_learning_differ_and_an_actor_is_refused():
    cfg = dataclasses.replace(CFG, same_length=False)
    model, variables = model_and_variables(cfg)
    with pytest.raises(ConfigError, match=r"model\.same_length = False: acting and learning would"):
        agents.Actor.start(model, variables, model.init_mems(B, 4))
    mems = tiny.memory(cfg, (4, 4, 4), 4)
    inputs, begins = drawn(np.random.default_rng(0), 6, ends=0)
    learnt = window(model, variables, mems, inputs, begins)
    core = jax.jit(functools.partial(model.apply, method="core"))
    for t in range(6):
        last, mems = core(variables, inputs[:, [t]], mems)
    assert np.abs(last[:, 0] - learnt[:, -1]).max() > 1e-3


def test_a_form_without_memory_is_refused():
    cfg = tiny.config(**tiny.attention("absolute"))
    model = txl_jax.TransformerXL(cfg)
    with pytest.raises(ConfigError, match=r"model\.attention = 'absolute': acting needs a memory"):
        agents.Actor.start(model, tiny.variables(cfg), model.init_mems(B, 0))


def test_another_number_of_rows_is_refused():
    model, variables = model_and_variables(CFG)
    mems = model.init_mems(B, 4)
    actor = agents.Actor.start(model, variables, mems)
    inputs, begins = jnp.zeros((B, D)), jnp.zeros(B, bool)
    with pytest.raises(ValueError, match=re.escape(f"inputs must be floats [{B},{D}], not")):
        actor.step(inputs[:1], begins[:1])
    with pytest.raises(ValueError, match=re.escape(f"begins must be bool [{B}], not bool [1]")):
        actor.step(inputs, begins[:1])


def test_steps_of_scanned_layers_are_those_of_layers_one_by_one():
    model, variables = model_and_variables(CFG)
    scanned = txl_jax.TransformerXL(dataclasses.replace(CFG, scan_layers=True))
    stacked = {"params": stack_layers(variables["params"])}
    inputs, begins = drawn(np.random.default_rng(1), 4)
    mems = tiny.memory(CFG, (0, 2, 5), 5)
    want = rollout(model, variables, mems, inputs, begins)
    for got, one_by_one in zip(rollout(scanned, stacked, mems, inputs, begins), want, strict=True):
        np.testing.assert_array_equal(got, one_by_one)
    assert_close(window(scanned, stacked, mems, inputs, begins), want[0])


def test_several_agents_act_under_vmap_as_each_alone():
    model = txl_jax.TransformerXL(CFG)
    each = [tiny.variables(CFG, seed) for seed in (0, 1)]
    both = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    inputs, begins = drawn(np.random.default_rng(2), 4)
    mems = tiny.memory(CFG, (0, 2, 5), 5)
    run = lambda variables: rollout(model, variables, mems, inputs, begins)
    got = jax.vmap(run)(both)
    for n, variables in enumerate(each):
        for a, b in zip(got, run(variables), strict=True):
            assert_close(a[n], b)


def test_an_actor_of_new_parameters_projects_the_memory_again():
    """An actor with the old parameters does not change: it has its own parameters and cache."""
    model, old = model_and_variables(CFG)
    new = tiny.variables(CFG, seed=1)
    mems = tiny.memory(CFG, (0, 2, 5), 5)
    inputs, begins = drawn(np.random.default_rng(3), 1)
    first = agents.Actor.start(model, old, mems)
    for variables, actor in ((new, agents.Actor.start(model, new, mems)), (old, first)):
        got, _, _ = actor.step(inputs[:, 0], begins[:, 0])
        assert_close(got, window(model, variables, mems, inputs, begins)[:, 0])


# --------------------------------------------------------------------------------------
# The buffer.


class History:
    """For each row, a list of the states since the row's last episode began."""

    def __init__(self):
        self.states: list[list] = [[] for _ in range(B)]

    def add(self, states, begins):
        for b in range(B):
            if begins[b]:
                self.states[b] = []
            self.states[b] = [*self.states[b], states[:, b]]


def assert_memory(mems, history, mem_len, rows=range(B)):
    for r, b in enumerate(rows):
        want = history.states[b][-mem_len:] if mem_len else []
        assert int(mems.filled[r]) == len(want)
        for got, one in zip(np.swapaxes(tiny.real_states(mems, r), 0, 1), want, strict=True):
            np.testing.assert_array_equal(got, one)


@pytest.mark.parametrize("mem_len", [0, 1, 4, 7])
def test_memory_before_any_step_holds_the_states_of_its_episode(mem_len):
    rng, steps, length = np.random.default_rng(mem_len), 7 + 5, 5
    mems = tiny.memory(CFG, (0, 2, 7), 7)  # the memory before the first rollout
    buffer, history, past = agents.StateBuffer.start(mems, length), History(), []
    history.states = [list(np.swapaxes(tiny.real_states(mems, b), 0, 1)) for b in range(B)]
    for _ in range(4):
        begins = rng.random((B, length)) < 0.15
        states = rng.standard_normal((2, B, length, D)).astype(np.float32)
        buffer = buffer.add(jnp.asarray(states), jnp.asarray(begins))
        for t in range(length):
            past.append([list(row) for row in history.states])
            history.add(states[:, :, t], begins[:, t])
        for t in range(length):  # the slots of the newest steps are the last ones
            before = History()
            before.states = past[t - length]
            mems = buffer.memory(mem_len, before=steps - length + t)
            assert_memory(mems, before, mem_len)
        assert_memory(buffer.memory(mem_len), history, mem_len)


def test_each_row_may_have_a_slot_of_its_own_and_rows_are_chosen():
    rng = np.random.default_rng(0)
    buffer = agents.StateBuffer.start(txl_jax.TransformerXL(CFG).init_mems(B, 3), 6)
    states = jnp.asarray(rng.standard_normal((2, B, 9, D)), jnp.float32)
    buffer = buffer.add(states, jnp.asarray(rng.random((B, 9)) < 0.2))
    rows, before = np.array([2, 0, 2, 1]), np.array([4, 9, 6, 5])
    got = jax.jit(lambda b: buffer.memory(3, before=b, rows=rows))(before)
    for r, (row, slot) in enumerate(zip(rows, before, strict=True)):
        want = buffer.memory(3, before=int(slot))
        np.testing.assert_array_equal(got.hidden[:, r], want.hidden[:, row])
        assert got.filled[r] == want.filled[row]


def test_a_slot_that_is_known_when_traced_is_checked_and_any_other_is_clipped():
    buffer = agents.StateBuffer.start(txl_jax.TransformerXL(CFG).init_mems(B, 3), 6)
    assert jax.jit(lambda: buffer.memory(3))().hidden.shape == (2, B, 3, D)
    with pytest.raises(ValueError, match="before = 2"):
        jax.jit(lambda: buffer.memory(3, before=2))()
    states = jnp.broadcast_to(jnp.arange(9.0)[:, None], (2, B, 9, D))
    buffer = buffer.add(states, jnp.zeros((B, 9), bool))
    clipped = jax.jit(lambda slot: buffer.memory(3, before=slot))(2)
    np.testing.assert_array_equal(clipped.hidden[0, 0, :, 0], [0, 1, 2])


@pytest.mark.parametrize(
    ("before", "told"), [(2, " = 2"), (10, " = 10"), (np.array([3, 2, 5]), "[1] = 2")]
)
def test_a_slot_with_too_few_slots_before_it_is_refused(before, told):
    buffer = agents.StateBuffer.start(txl_jax.TransformerXL(CFG).init_mems(B, 3), 6)
    message = re.escape(f"before{told}: must be from 3 (mem_len) to 9")
    with pytest.raises(ValueError, match=message):
        buffer.memory(3, before=before)
    with pytest.raises(
        ValueError, match="mem_len = 20: must be at most 9, the slots of this buffer"
    ):
        buffer.memory(20)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"rows": np.array([0, 3])}, "rows[1] = 3: must be from 0 to 2, a row of this buffer"),
        ({"rows": jnp.array([-1])}, "rows[0] = -1: must be from 0 to 2"),
        ({"rows": np.array([200, 1], np.uint8)}, "rows[0] = 200: must be from 0 to 2"),
        ({"rows": np.array([True, False, True])}, "rows must be integers [R], not bool [3]"),
        ({"rows": 1}, "rows must be integers [R], not int64 []"),
        ({"before": 4.5}, "before must be integers [] or [3], not float"),
        ({"before": np.array([4, 5])}, "before must be integers [] or [3], not int64 [2]"),
    ],
)
def test_rows_and_slots_that_do_not_exist_are_refused(wrong, told):
    buffer = agents.StateBuffer.start(txl_jax.TransformerXL(CFG).init_mems(B, 3), 6)
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        buffer.memory(3, **wrong)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "int64"])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_buffer_takes_integers_of_any_type(dtype, jitted):
    """The buffer has more slots than int8 can count."""
    rng, steps = np.random.default_rng(0), 300
    cast = lambda *values: np.array(values, dtype)
    mems = tiny.memory(CFG, (0, 2, 3), 3)
    as_given = mems.replace(filled=cast(0, 2, 3))
    states = jnp.asarray(rng.standard_normal((2, B, steps, D)), jnp.float32)
    begins = jnp.asarray(rng.random((B, steps)) < 0.005)
    full = cast(100, 120, 127)  # numbers of real slots; 300 more would overflow int8

    def read(mems, stored, before, rows):
        start = agents.StateBuffer.start(mems, steps=np.int16(steps))
        buffer = start.replace(stored=stored).add(states, begins)
        kept = buffer.memory(np.uint8(3), before=before, rows=rows)
        return kept.hidden, kept.filled, buffer.stored

    given = read if not jitted else jax.jit(read)
    got = given(as_given, full, cast(70, 127, 5), cast(2, 0, 2))
    want = read(mems, full.astype(np.int32), np.array([70, 127, 5]), np.array([2, 0, 2]))
    assert [x.dtype for x in got] == [np.float32, np.int32, np.int32]
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(got[2], steps + 3)


def test_states_of_another_shape_are_refused():
    buffer = agents.StateBuffer.start(txl_jax.TransformerXL(CFG).init_mems(B, 3), 6)
    states, begins = jnp.zeros((4, 2, B, D)), jnp.zeros((B, 4), bool)  # wrong: time is first
    with pytest.raises(ValueError, match=r"states must be floats \[2,3,T,8\], not float32 \[4,2"):
        buffer.add(states, begins)
    with pytest.raises(ValueError, match=r"begins must be bool \[3,4\]"):
        buffer.add(jnp.moveaxis(states, 0, 2), begins.T)
    model, variables = model_and_variables(CFG)
    actor = agents.Actor.start(model, variables, model.init_mems(B, 4))
    with pytest.raises(ValueError, match=r"begins must be bool \[3\], not bool \[3,1\]"):
        actor.step(jnp.zeros((B, D)), jnp.zeros((B, 1), bool))


# --------------------------------------------------------------------------------------
# Rows that skip a step.


@pytest.mark.parametrize("cached", [False, True])
def test_a_row_of_length_0_skips_the_step(cached):
    """The row's memory does not change, so its next outputs are as if the step did not exist."""
    model, variables = model_and_variables(CFG)
    past = tiny.memory(CFG, (0, 2, 5), 5)
    if cached:
        past = model.apply(variables, past, seg_len=1, method="init_cache")
    core = functools.partial(model.apply, variables, method="core")
    inputs, _ = drawn(np.random.default_rng(4), 2)
    _, skipped = core(inputs[:, :1], past, lengths=np.array([1, 0, 1], np.int32))
    np.testing.assert_array_equal(skipped.filled, [1, 2, 5])
    got, _ = core(inputs[:, 1:], skipped)
    want, _ = core(inputs[:, 1:], past)
    assert_close(got[1], want[1])
    _, stepped = core(inputs[:, :1], past)
    others, _ = core(inputs[:, 1:], stepped)
    for row in (0, 2):
        assert_close(got[row], others[row])


@pytest.mark.slow
def test_the_example_of_the_package_runs():
    result = doctest.testmod(agents, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 5
    assert result.failed == 0
